"""The example agent: its games against oracles, its search with a model that knows the rules, and resumed runs."""

import contextlib
import copy
import dataclasses
import fcntl
import itertools
import pickle
import re
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tape
import torch

import gradscale_ext as gs
from gradscale_ext.capture import graphs

gymnasium = pytest.importorskip("gymnasium")
ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "muzero"
sys.path.insert(0, str(EXAMPLE))
import games  # noqa: E402
from configuration import Configuration, RunError  # noqa: E402
from games import tictactoe  # noqa: E402
from learner import make_loss, make_optimizer, make_update, update_weights  # noqa: E402
from replay import n_step_returns  # noqa: E402
from search import search  # noqa: E402
from self_play import dirichlet_noise, draw_actions, evaluate, explored, play  # noqa: E402
from training import Training  # noqa: E402

SMALL = {"num_environments": 4, "num_simulations": 3, "minimum_replay": 20, "batch_size": 8, "training_steps": 60}


def load(name):
    if name == "breakout":
        pytest.importorskip("minatar")
    return games.load(name)


def training(name, **options):
    return Training(Configuration(game=name, **{**load(name).hyperparameters, **SMALL, **options}))


def test_cartpole_agrees_with_gymnasium():
    """Each game is compared with an environment of its own, which gets the state in which the game begins."""
    game, generator = load("cartpole")(3), np.random.default_rng(0)
    observation = game.reset(seed=5)
    singles = [gymnasium.make("CartPole-v1") for _ in range(3)]
    ended = np.ones(3, dtype=bool)
    endings = 0
    for _ in range(200):
        for i in np.flatnonzero(ended):
            singles[i].reset()
            singles[i].unwrapped.state = game.environments.unwrapped.state[:, i]
        action = generator.integers(2, size=3)
        expected = [single.step(a) for single, a in zip(singles, action.tolist(), strict=True)]
        observation, reward, terminated, truncated = game.step(action)
        for i, (state, single_reward, single_terminated, _, _) in enumerate(expected):
            np.testing.assert_allclose(observation[i], state, rtol=1e-5, atol=1e-6)
            assert (reward[i], terminated[i], truncated[i]) == (single_reward, single_terminated, False)
        ended = terminated
        if ended.any():
            endings += 1
            game.reset(seed=endings)
            ended[:] = True
    assert endings > 5


def test_cartpole_ends_at_its_time_limit():
    game = load("cartpole")(1)
    game.reset(seed=0)
    for step in range(1, 501):
        game.environments.unwrapped.state[:] = 0
        _, _, terminated, truncated = game.step(np.array([step % 2]))
        assert not terminated
        assert truncated == (step == 500)


def boards_after(board, actions):
    """(board, reward, whether the game ended) for each action, tried on its own, according to the game's class."""
    game = tictactoe.TicTacToe(len(actions))
    game.reset(seed=0)
    game.board[:] = board
    _, reward, terminated, truncated = game.step(np.array(actions))
    assert not truncated.any()
    return list(zip(map(tuple, game.board.tolist()), reward.tolist(), terminated.tolist(), strict=True))


def test_all_games_of_tictactoe():
    """5478 positions can be reached, 958 of them final, by 255168 games, of which the first player wins 131184."""
    frontier, positions, final, outcomes = Counter({(0,) * 9: 1}), 1, 0, Counter()
    for move in range(9):
        following, ends = Counter(), set()
        for board, ways in frontier.items():
            for after, reward, ended in boards_after(board, [i for i in range(9) if board[i] == 0]):
                following[after] += ways
                if ended:
                    ends.add(after)
                    outcomes[reward * (-1) ** move] += ways
        positions, final = positions + len(following), final + len(ends)
        frontier = Counter({board: ways for board, ways in following.items() if board not in ends})
    assert (positions, final) == (5478, 958)
    assert outcomes == {1.0: 131184, -1.0: 77904, 0.0: 46080}


def test_a_perfect_player_of_tictactoe_never_loses():
    generator = np.random.default_rng(0)

    def perfect(game, observation):
        return game.opponent_actions(generator)

    def random(game, observation):
        return games.Game.opponent_actions(game, generator)

    assert not play(tictactoe.TicTacToe(100), (perfect, perfect), seed=0).any()
    first, second = (play(tictactoe.TicTacToe(100), players, 0) for players in ((perfect, random), (random, perfect)))
    assert first.min() == 0
    assert first.mean() > 0.8
    assert second.max() == 0
    assert second.mean() < -0.6


def test_an_occupied_square_is_rejected():
    game = tictactoe.TicTacToe(2)
    game.reset(seed=0)
    game.step(np.array([4, 0]))
    assert game.legal_actions().tolist() == [[i != 4 for i in range(9)], [i != 0 for i in range(9)]]
    with pytest.raises(ValueError, match=r"taken: \[4\]"):
        game.step(np.array([4, 1]))


def test_breakout_agrees_with_minatar(monkeypatch):
    """Compared with MinAtar's Gymnasium class, in a vector environment with the same time limit."""
    breakout = pytest.importorskip("minatar.gym")
    monkeypatch.setattr("games.breakout.TIME_LIMIT", 12)
    game = load("breakout")(3)

    def single():
        environment = breakout.BaseEnv("breakout", use_minimal_action_set=True)
        return gymnasium.wrappers.TimeLimit(environment, 12)

    oracle = gymnasium.vector.SyncVectorEnv([single] * 3)
    generator = np.random.default_rng(0)
    np.testing.assert_array_equal(game.reset(seed=7).transpose(0, 2, 3, 1), oracle.reset(seed=7)[0])
    counts = np.zeros(3)
    for _ in range(600):
        action = generator.integers(3, size=3)
        observation, *rest = game.step(action)
        expected, *expected_rest, _ = oracle.step(action)
        np.testing.assert_array_equal(observation.transpose(0, 2, 3, 1), expected)
        np.testing.assert_array_equal(rest, expected_rest)
        counts += np.sum(rest, axis=-1)
    assert counts.min() > 5  # bricks, lost balls, time limits


class Rules:
    """A model of tic-tac-toe that knows the rules, but evaluates only positions in which somebody has won."""

    support = gs.Support(-1, 1, 3, "identity")

    def initial_inference(self, observation, legal_actions):
        board = observation[:, :9] - observation[:, 9:]
        hidden = torch.cat((board, torch.zeros_like(board[:, :1])), dim=-1)  # squares, and a flag: game over
        return {"value": self.logits(torch.zeros(len(board))), "policy": self.policy(hidden)}, hidden

    def recurrent_inference(self, hidden, action):
        board, over = hidden[:, :9].scatter(1, action[:, None], 1), hidden[:, 9]
        lines = torch.from_numpy(tictactoe.LINES)
        won = (board[:, lines] == 1).all(-1).any(-1) & (over == 0)
        hidden = torch.cat((-board, torch.maximum(over, won.float())[:, None]), dim=-1)
        outputs = {"reward": self.logits(won.float()), "value": self.logits(torch.zeros(len(won)))}
        return {**outputs, "policy": self.policy(hidden)}, hidden

    def logits(self, values):
        return 50 * self.support.two_hot(values)

    def policy(self, hidden):
        full = (hidden[:, :9] != 0).all(-1, keepdim=True)
        return torch.zeros(len(hidden), 9).masked_fill((hidden[:, :9] != 0) & ~full, -torch.inf)


def test_the_search_finds_forced_wins_and_the_only_defence():
    """In every third position of at least five stones, the player to move finds a move that keeps the best result."""
    frontier, boards = {(0,) * 9}, []
    for stones in range(8):
        frontier = {
            after
            for board in frontier
            for after, _, ended in boards_after(board, [i for i in range(9) if board[i] == 0])
            if not ended
        }
        boards += sorted(frontier)[::3] if stones >= 4 else []
    game = tictactoe.TicTacToe(len(boards))
    game.reset(seed=0)
    game.board[:] = boards
    result = search(Rules(), game.observation(), game.legal_actions(), 100, -1.0)
    values = np.array([tictactoe.value(board) for board in boards])
    assert set(values) == {-1, 0, 1}
    kept = [action in tictactoe.best_moves(board) for board, action in zip(boards, result.best_action, strict=True)]
    assert len(kept) == 1144
    assert all(kept)
    assert result.value[values == 1].min() > 0.5
    assert result.value[values == -1].max() < -0.5


@pytest.mark.parametrize("discount", [0.0, 0.9, 0.99, 1.0, -1.0, -0.9])
@pytest.mark.parametrize(("length", "bootstrap_steps"), [(1, 1), (7, 3), (7, 7), (7, 100), (500, 50), (5000, 5)])
def test_n_step_returns(length, bootstrap_steps, discount):
    """A plain double loop gives the same result, however small the power of the discount."""
    generator = np.random.default_rng(0)
    rewards, searched = generator.normal(size=(2, length)).tolist()
    values = [*searched, 0.5]
    expected = []
    for t in range(length):
        steps = min(bootstrap_steps, length - t)
        expected.append(sum(discount**k * rewards[t + k] for k in range(steps)) + discount**steps * values[t + steps])
    found = n_step_returns(rewards, searched, 0.5, bootstrap_steps, discount)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_a_moving_average_forgets():
    """Values outside the window have no influence, however large they are."""
    pytest.importorskip("matplotlib")
    from plot import moving_average

    assert moving_average(np.array([1e300, 1.0, 2.0, 4.0]), 2).tolist() == [1e300, 5e299, 1.5, 3.0]


def test_no_illegal_action_is_searched_drawn_or_learned():
    run = training("tictactoe")
    with torch.no_grad():
        run.network.policy[-1].bias.copy_(torch.arange(9.0))
    for _ in range(40):
        run.self_play.step(run.network)  # raises if an action is illegal
    legal = np.concatenate([episode.legal_actions for episode in run.self_play.episodes if len(episode)])
    policies = np.concatenate([episode.search_policies for episode in run.self_play.episodes if len(episode)])
    assert not legal.all()
    assert not policies[~legal].any()
    noise = dirichlet_noise(legal, 0.3, np.random.default_rng(0))
    assert not noise[~legal].any()
    np.testing.assert_allclose(noise.sum(axis=-1), 1, rtol=1e-6)

    while len(run.replay) < 50:
        for episode in run.self_play.step(run.network):
            run.replay.add(episode)
    batch = run.replay.sample(16, np.random.default_rng(0))
    outputs, hidden = run.network.initial_inference(batch.observation, batch.legal_actions)
    assert (outputs["policy"].isneginf() == ~batch.legal_actions).all()
    assert not run.network.recurrent_inference(hidden, batch.actions[:, 0])[0]["policy"].isinf().any()
    optimizer = make_optimizer(run.network, 1e-3)
    output = update_weights(run.network, optimizer, make_loss(run.network.support, "fused"), batch, 1e-5)
    assert output.num_nonfinite == 0
    assert output.loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in run.network.parameters())


def test_part_of_the_actions_is_uniformly_random():
    policy, legal = np.array([[1.0, 0, 0], [0.2, 0.3, 0.5]]), np.array([[True, True, False], [True, True, True]])
    expected = [[0.75, 0.25, 0], [(0.2 + 1 / 3) / 2, (0.3 + 1 / 3) / 2, (0.5 + 1 / 3) / 2]]
    np.testing.assert_allclose(explored(policy, legal, 0.5), expected)
    assert explored(policy, legal, 0.0) is policy


def test_noise_with_a_small_alpha_is_a_distribution():
    """The rows sum to 1, although the gamma variates of almost all rows are 0."""
    noise = dirichlet_noise(np.array([[True, True, False]] * 100), 1e-9, np.random.default_rng(0))
    np.testing.assert_allclose(noise.sum(axis=-1), 1, rtol=1e-6)
    assert not noise[:, 2].any()


def test_actions_of_no_probability_are_never_drawn():
    class Largest:
        def random(self, shape):
            return np.full(shape, 1 - 2**-53)

    policy = np.array([[0.7, 0.3 - 1e-7, 0, 0], [0, 1, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0]], dtype=np.float32)
    assert draw_actions(policy, Largest()).tolist() == [1, 1, 2]


@pytest.mark.parametrize("name", games.names())
def test_an_interrupted_run_continues_identically(name, tmp_path):
    def step(run, times):
        for _ in range(times):
            run.step()

    step(whole := training(name), 24)
    step(first := training(name), 12)
    first.save(tmp_path / "checkpoint.pt")
    second = training(name)
    second.load(tmp_path / "checkpoint.pt")
    step(second, 12)
    assert whole.learner_steps == second.learner_steps > 10
    assert whole.curve == second.curve
    for parameter, other in zip(whole.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(parameter, other)
    for array, other in zip(*(run.replay.state_dict()["arrays"].values() for run in (whole, second)), strict=True):
        np.testing.assert_array_equal(array, other)
    with pytest.raises(ValueError, match="--num-simulations 3, not 4"):
        training(name, num_simulations=4).load(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("name", games.names())
def test_the_agent_is_compared_with_other_players(name, monkeypatch):
    monkeypatch.setattr(load(name), "evaluation_episodes", 3)
    run = training(name)
    evaluation = evaluate(run.network, run.configuration)
    assert all(returns.shape == (3,) for returns in evaluation.values())
    described = " / ".join(evaluation)
    if load(name).players == 1:
        assert described == "the agent / random play"
    else:
        opponent = load(name).opponent
        assert described == f"the agent, which begins, against {opponent} / the agent against {opponent}, which begins"
        assert max(returns.max() for returns in evaluation.values()) <= 0  # nobody wins against a perfect player


def test_the_output_of_the_demo(tmp_path, monkeypatch, capsys):
    """The time limit ends this run after 60 of 100000 steps, and the progress bar shows 100 %."""
    for name in ("matplotlib", "tensorboard", "tqdm"):
        pytest.importorskip(name)
    import train

    # A clock that advances by 0.1 s at each call.
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 0.1 * next(ticks))
    monkeypatch.setattr(train, "TIMED_STEPS", 20)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    options = {"directory": tmp_path, "max-minutes": 0.1, "training-steps": 100_000, "num-simulations": 2}
    options |= {"minimum-replay": 50, "batch-size": 8, "num-environments": 4}
    monkeypatch.setattr(sys, "argv", ["train.py", *(f"--{name}={option}" for name, option in options.items())])
    assert train.main() == 0
    printed = capsys.readouterr()
    bar = re.split(r"[\r\n]+", printed.err.strip())[-1]
    assert re.match(r"100%\|█+\| mean return \d+ of 475, step 60 of 100000 of the games, 0\.1 of 0\.1 minutes", bar)
    phases = ("time is up", "evaluating: 20 episodes", "timing the learner step: 20 times", "evaluation: 20 episodes")
    places = [printed.out.index(phase) for phase in phases]
    assert places == sorted(places)


def test_a_captured_run_is_the_same_run(tmp_path, monkeypatch):
    """A stand-in for CUDA graphs replays the learner step. The run is interrupted, and continues without one."""

    def begin():
        return Training(Configuration(game="cartpole", **SMALL), captured=True)

    plain, captured = begin(), begin()
    with monkeypatch.context() as replaced:
        replaced.setattr(graphs, "graphs_of", lambda device: tape.TapeGraphs())
        captured.update = make_update(
            captured.network, captured.optimizer, make_loss(captured.network.support, "fused"), 1e-5, captured=True
        )
    while plain.learner_steps < 20:
        plain.step()
        captured.step()
    assert captured.update.is_captured
    assert not plain.update.is_captured
    captured.save(tmp_path / "checkpoint.pt")
    continued = begin()
    continued.load(tmp_path / "checkpoint.pt")
    for run in (plain, captured, continued):
        run.step()
        assert run.optimizer.param_groups[0]["lr"].item() == plain.optimizer.param_groups[0]["lr"].item() < 2e-3
        for parameter, other in zip(plain.network.parameters(), run.network.parameters(), strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5)


def test_the_network_that_plays_gets_the_weights_of_the_one_that_learns():
    """As on a GPU, where the two are on different devices."""
    whole, run = training("cartpole"), training("cartpole")
    run.acting_network = copy.deepcopy(run.network)
    while whole.learner_steps < 6:
        whole.step()
        run.step()
        for parameter, other in zip(run.network.parameters(), run.acting_network.parameters(), strict=True):
            assert torch.equal(parameter, other)
    assert whole.curve == run.curve
    for parameter, other in zip(whole.network.parameters(), run.network.parameters(), strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_missing_ends_with_an_error(tmp_path, monkeypatch):
    assert error_line(monkeypatch, tmp_path, "--device=cuda").startswith("error: --device cuda needs a GPU")


def error_line(monkeypatch, directory, *options):
    """The error message with which the program ends."""
    for name in ("matplotlib", "tensorboard", "tqdm"):
        pytest.importorskip(name)
    import train

    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["train.py", f"--directory={directory}", *options])
    with pytest.raises(SystemExit) as stopped:
        train.main()
    return stopped.value.code


def test_a_run_without_a_learner_step_ends_with_an_error(tmp_path, monkeypatch):
    line = error_line(monkeypatch, tmp_path, "--training-steps=2")
    assert line.startswith("error: the run ended before its first learner step")


COUNTS = ["num-environments", "training-steps", "num-simulations", "unroll-steps", "bootstrap-steps", "replay-capacity"]
COUNTS += ["minimum-replay", "hidden-size", "layer-size", "batch-size", "updates-per-step"]
FRACTIONS = ["discount", "dirichlet-fraction", "random-actions", "priority-exponent", "importance-exponent"]
REFUSED = {
    "at least 1": [(name, value) for name in COUNTS for value in ("0", "-3")],
    "at least 2": [("support-bins", "1")],
    "at least 0 and finite": [("actors", "-1"), *(("weight-decay", value) for value in ("-0.5", "nan", "inf"))],
    "above 0 and finite": [
        (name, value)
        for name in ("learning-rate", "support-limit", "dirichlet-alpha")
        for value in ("0.0", "-0.5", "nan", "inf")
    ],
    "above 0": [("max-minutes", value) for value in ("0.0", "-0.5", "nan")],
    "from 0 to 1": [(name, value) for name in FRACTIONS for value in ("-0.5", "1.5", "nan")],
    "from 0 to 2147483647": [("seed", "-1"), ("seed", "2147483648")],
    "at most --replay-capacity 30000": [("minimum-replay", "30001")],
    "at most 2147483647": [(name, str(2**31)) for name in (*COUNTS, "support-bins", "actors")],
}


@pytest.mark.parametrize(
    ("name", "value", "accepted"), [(*case, accepted) for accepted, cases in REFUSED.items() for case in cases]
)
def test_an_invalid_option_is_rejected(name, value, accepted, tmp_path, monkeypatch):
    """In one line, before anything is written."""
    line = error_line(monkeypatch, tmp_path / "runs", f"--{name}={value}")
    assert line == f"error: --{name} must be {accepted}, not {value}"
    assert not list(tmp_path.iterdir())


def test_every_numeric_option_has_rejected_values():
    options = {field.name.replace("_", "-") for field in dataclasses.fields(Configuration)}
    assert options - {name for cases in REFUSED.values() for name, _ in cases} == {"game", "loss"}


@pytest.mark.parametrize("name", games.names())
def test_the_smallest_numbers_that_are_accepted_work(name):
    smallest = {option.replace("-", "_"): 1 for option in COUNTS} | {"replay_capacity": 3, "support_bins": 2}
    smallest |= {option.replace("-", "_"): 0.0 for option in FRACTIONS} | {"weight_decay": 0.0, "dirichlet_alpha": 1e-9}
    run = Training(Configuration(game=name, **smallest, seed=2**31 - 1))
    while run.learner_steps < 20:
        assert np.isfinite(list(run.step().values())).all()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    line = error_line(monkeypatch, tmp_path / "file")
    assert line.startswith("error: --directory must be a folder that can be written: ")
    assert str(tmp_path / "file") in line


def saved(path):
    path.parent.mkdir()
    run = training("cartpole")
    run.step()
    run.save(path)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    {
        "empty": (lambda content: b"", "cannot be read as a checkpoint: EOFError: Ran out of input"),
        "truncated": (lambda content: content[: len(content) // 2], "cannot be read as a checkpoint: RuntimeError: "),
        "text": (lambda content: b"not a checkpoint", "cannot be read as a checkpoint: UnpicklingError: "),
        "pickled": (lambda content: pickle.dumps([1]), "cannot be read as a checkpoint: "),
    }.values(),
)
def test_a_damaged_checkpoint_is_rejected(damage, message, tmp_path, monkeypatch):
    """In one line with instructions, and the file is unchanged."""
    path = tmp_path / "cartpole-seed0" / "checkpoint.pt"
    content = damage(saved(path))
    path.write_bytes(content)
    line = error_line(monkeypatch, tmp_path)
    assert line.startswith(f"error: {path} {message}")
    assert line.endswith(". Use another --directory, or --fresh to delete this run.")
    assert "\n" not in line
    assert [file.read_bytes() for file in path.parent.iterdir()] == [content]


def test_a_checkpoint_of_another_run_is_rejected(tmp_path, monkeypatch):
    path = tmp_path / "tictactoe-seed0" / "checkpoint.pt"
    saved(path)
    line = error_line(monkeypatch, tmp_path, "--game=tictactoe")
    assert line.startswith(
        f"error: the run in {path} was begun with --game cartpole, not tictactoe, and can only continue with it. Use"
    )
    torch.save({"network": {}}, path)
    line = error_line(monkeypatch, tmp_path, "--game=tictactoe")
    assert line.startswith(f"error: {path} cannot be read as a checkpoint: it holds something else. Use")


def changed(state, *path):
    """A checkpoint without the entry at a path, or with another value in place of it."""
    *path, last = path
    inner = state
    for key in path[:-1] if callable(last) else path:
        inner = inner[key]
    if callable(last):
        inner[path[-1]] = last(inner[path[-1]])
    else:
        del inner[last]
    return state


CHANGES = [
    *((key,) for key in ("configuration", "network", "optimizer", "shares", "torch_generator", "record")),
    *(("shares", 0, key) for key in ("replay", "self_play", "generator")),
    *(("shares", 0, "self_play", key) for key in ("game", "observation", "ended", "episodes")),
    ("shares", 0, "replay", "num_added"),
    ("shares", 0, "replay", "arrays", "priority"),
    ("shares", 0, "replay", "arrays", "observation", lambda array: array[:, :2]),
    ("record", "curve"),
    ("record", "seconds"),
    ("network", "value.0.weight"),
    ("network", "value.0.weight", lambda weight: weight[:-1]),
    ("optimizer", "param_groups"),
    ("optimizer", "param_groups", lambda groups: []),
    ("configuration", lambda configuration: None),
    ("shares", lambda shares: 1),
    ("shares", 0, "generator", lambda generator: {}),
    ("torch_generator", lambda generator: None),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "checkpoint.pt"
    run = Training(Configuration(minimum_replay=20))
    while len(run.replay) < 20:
        run.step()
    run.save(path)
    return path


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: ".".join(map(str, change[:-1])) + str(len(change)))
def test_an_incomplete_checkpoint_is_rejected(change, checkpoint, tmp_path, monkeypatch):
    path = tmp_path / "cartpole-seed0" / "checkpoint.pt"
    path.parent.mkdir()
    torch.save(changed(torch.load(checkpoint, weights_only=False), *change), path)
    line = error_line(monkeypatch, tmp_path, "--minimum-replay=20")
    assert line.startswith(f"error: {path} cannot be read as a checkpoint: ")
    assert line.endswith(". Use another --directory, or --fresh to delete this run.")
    assert "\n" not in line
    assert len(line) < 700


def test_a_folder_in_place_of_the_checkpoint_is_rejected(tmp_path, monkeypatch):
    path = tmp_path / "cartpole-seed0" / "checkpoint.pt"
    path.mkdir(parents=True)
    line = error_line(monkeypatch, tmp_path)
    assert line.startswith(f"error: {path} cannot be read as a checkpoint: IsADirectoryError: ")
    line = error_line(monkeypatch, tmp_path, "--fresh")
    assert re.match(rf"error: --fresh cannot delete {path}: .*\. Delete it, or use another --directory\.$", line)
    assert path.is_dir()


@contextlib.contextmanager
def full_disk(size):
    """Let no file grow beyond a size, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 10, 1000, 50_000])
def test_a_full_disk_leaves_the_previous_checkpoint(size, tmp_path):
    run, path = training("cartpole"), tmp_path / "checkpoint.pt"
    run.save(path)
    content = path.read_bytes()
    assert len(content) > 50_000
    run.step()
    with full_disk(size), pytest.raises(RunError, match=rf"{path} cannot be written: .*File too large") as stopped:
        run.save(path)
    assert str(stopped.value).endswith("When it can, the same command continues from the last checkpoint")
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]
    (tmp_path / "checkpoint.unfinished").write_text("of a run that was killed")
    run.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_full_disk_ends_the_run_with_an_error(tmp_path, monkeypatch, capsys):
    folder, options = tmp_path / "cartpole-seed0", ("--num-environments=2", "--num-simulations=2")
    for size, path in ((20_000, folder / "checkpoint.pt"), (0, folder)):  # 0: TensorBoard's file cannot be written
        with full_disk(size):
            line = error_line(monkeypatch, tmp_path, *options)
        assert re.match(rf"error: {path} cannot be written: (OSError: )?\[Errno 27\] File too large", line)
        assert "Traceback" not in capsys.readouterr().err
        assert not list(folder.glob("checkpoint.*"))


def fails_with(monkeypatch, error):
    def step(_):
        raise error

    monkeypatch.setattr(Training, "step", step)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError(13, "Permission denied"), "{folder} cannot be written: PermissionError: .*Permission denied"),
        (
            MemoryError("Unable to allocate 1 PiB"),
            "the run needs more memory than there is: .*Unable to allocate 1 PiB",
        ),
        (RuntimeError("[enforce]\ncan't allocate memory: 9 B"), "the run needs more memory .*allocate memory: 9 B"),
    ],
)
def test_a_lack_of_memory_or_permission_is_an_error(error, expected, tmp_path, monkeypatch):
    fails_with(monkeypatch, error)
    line = error_line(monkeypatch, tmp_path)
    assert re.match("error: " + expected.format(folder=tmp_path / "cartpole-seed0"), line)
    assert "\n" not in line


@pytest.mark.parametrize("error", [RuntimeError("a fault"), ValueError("a fault"), KeyError("a fault")])
def test_a_fault_of_the_program_is_not_hidden(error, tmp_path, monkeypatch):
    fails_with(monkeypatch, error)
    with pytest.raises(type(error), match="a fault"):
        error_line(monkeypatch, tmp_path)


def test_two_runs_in_one_folder_are_rejected(tmp_path, monkeypatch):
    path = tmp_path / "cartpole-seed0" / "checkpoint.pt"
    content = saved(path)
    with open(tmp_path / "cartpole-seed0.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for options in ((), ("--fresh",)):
            line = error_line(monkeypatch, tmp_path, *options)
            assert line == (
                f"error: another run is in progress in {path.parent}: wait for its end, or use another --directory"
            )
            assert path.read_bytes() == content
        assert error_line(monkeypatch, tmp_path, "--seed=1", "--training-steps=2").startswith("error: the run ended")
    for _ in range(2):  # a run that has ended holds no lock
        line = error_line(monkeypatch, tmp_path, "--training-steps=2")
        assert line.startswith(f"error: the run in {path} was begun with --num-environments 4, not 32")


def test_a_support_that_float_cannot_hold_is_rejected(tmp_path, monkeypatch):
    line = error_line(monkeypatch, tmp_path / "runs", "--support-limit=1e40")
    assert line.startswith("error: --support-limit 1e+40 and --support-bins 161 make no support: ")
    assert not list(tmp_path.iterdir())


def test_a_cluster_without_actors_is_rejected(tmp_path, monkeypatch):
    assert error_line(monkeypatch, tmp_path, "--ray=auto") == "error: --ray needs --actors, which run on the cluster"


def test_the_home_of_nobody_is_rejected(monkeypatch, capsys):
    assert error_line(monkeypatch, "~nobody has this name/runs") == 2
    assert "argument --directory: Could not determine home directory." in capsys.readouterr().err
