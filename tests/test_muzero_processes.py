"""The example agent in several processes: ranks started by `torchrun`, and actors on Ray that may be killed."""

import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "muzero"))
import training_ranks
from processes import assert_passed, one_server, run_in_processes
from training_ranks import CONFIGURATION, SMALL

from configuration import Configuration
from replay import Episode
from training import Training

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "muzero"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]

PATIENCE = 600  # seconds after which a run counts as hung


def run(command, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(list(map(str, command)), text=True, stdout=subprocess.PIPE, env=environment, **options)


@one_server
def test_ranks_train_as_one(tmp_path):
    checks = {
        "as_one": functools.partial(training_ranks.ranks_train_as_one, checkpoint=tmp_path / "checkpoint.pt"),
        "damaged": training_ranks.a_damaged_checkpoint_is_rejected,
        "problems": training_ranks.a_problem_of_one_rank_ends_both,
        "interrupted": training_ranks.ctrl_c_saves_a_checkpoint,
    }
    for name in ("matplotlib", "tensorboard", "tqdm"):
        pytest.importorskip(name)
    run_in_processes(2, checks, tmp_path)
    for name in checks:
        assert_passed(name, 2, tmp_path)
    with pytest.raises(ValueError, match="begun by 2 processes, not 1"):
        Training(CONFIGURATION).load(tmp_path / "checkpoint.pt")


@pytest.mark.slow
def test_ranks_of_torchrun_save_when_ctrl_c_is_pressed(tmp_path):
    pytest.importorskip("tensorboard")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    process = run([*TORCHRUN, EXAMPLE / "train.py", *options, f"--directory={tmp_path}"])
    deadline = time.monotonic() + PATIENCE
    while not list(tmp_path.glob("*/checkpoint.pt")):  # written in the loop that handles Ctrl-C
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE)[0].count("interrupted; the same command continues") == 1
    saved = torch.load(tmp_path / "cartpole-seed0" / "checkpoint.pt", weights_only=False)
    assert saved["record"]["step_number"] > 0
    assert len(saved["shares"]) == 2


@pytest.mark.slow
def test_a_second_run_ends_and_the_first_goes_on(tmp_path):
    """Killing the first run releases its folder."""
    pytest.importorskip("tensorboard")
    endless = {**SMALL, "training_steps": 10**6}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in endless.items()]
    command = [sys.executable, "-u", EXAMPLE / "train.py", *options, f"--directory={tmp_path}"]
    first = run(command)
    deadline = time.monotonic() + PATIENCE
    while not list(tmp_path.glob("*/checkpoint.pt")):
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    second = run([*command, "--fresh"], stderr=subprocess.PIPE)
    error = second.communicate(timeout=PATIENCE)[1]
    assert error.startswith(f"error: another run is in progress in {tmp_path / 'cartpole-seed0'}: ")
    assert error.count("\n") == 1
    assert second.returncode == 1
    assert first.poll() is None
    first.kill()
    first.communicate(timeout=PATIENCE)
    third = run(command)
    while "continuing from step" not in (line := third.stdout.readline()):
        assert line
    third.send_signal(signal.SIGINT)
    assert "interrupted; the same command continues" in third.communicate(timeout=PATIENCE)[0]


def test_a_share_has_its_part_and_its_own_seed():
    """A share is the configuration of one of several processes, which divide the games among them."""
    shares = [Configuration(num_environments=11).share(i, 4, "num_environments") for i in range(4)]
    assert [share.num_environments for share in shares] == [2, 3, 3, 3]
    assert len({share.seed for share in shares}) == 4
    with pytest.raises(ValueError, match="12 processes cannot share --num-environments 11"):
        Configuration(num_environments=11).share(0, 12, "num_environments")


def test_each_rank_removes_the_files_of_its_machine(tmp_path, monkeypatch):
    """With --fresh, rank 1 removes the replay buffer that an earlier run left on its machine."""
    for name in ("matplotlib", "tensorboard", "tqdm"):
        pytest.importorskip(name)
    import train

    class Second(train.Ranks):
        def __init__(self):
            self.rank, self.size, self.process_group = 1, 2, None

    def begin(*_):
        raise SystemExit("begun")

    monkeypatch.setattr(train, "Ranks", Second)
    monkeypatch.setattr(train, "begin", begin)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "argv", ["train.py", "--fresh", f"--directory={tmp_path}"])
    left = tmp_path / "cartpole-seed0" / "replay.1.sqlite"
    left.parent.mkdir()
    left.touch()
    with pytest.raises(SystemExit, match="begun"):
        train.main()
    assert not left.exists()


def test_too_many_processes_are_rejected_before_anything_is_removed(tmp_path, monkeypatch):
    for name in ("matplotlib", "tensorboard", "tqdm"):
        pytest.importorskip(name)
    import train

    class Third(train.Ranks):
        def __init__(self):
            self.rank, self.size, self.process_group = 2, 3, None

    monkeypatch.setattr(train, "Ranks", Third)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    left = tmp_path / "cartpole-seed0" / "replay.2.sqlite"
    left.parent.mkdir()
    left.touch()
    for options, message in (
        (["--batch-size=2"], "3 processes cannot share --batch-size 2"),
        (["--minimum-replay=1"], "3 processes cannot share --minimum-replay 1"),
        (["--actors=11"], "33 processes cannot share --num-environments 32"),
    ):
        monkeypatch.setattr(sys, "argv", ["train.py", "--fresh", f"--directory={tmp_path}", *options])
        with pytest.raises(SystemExit, match=f"^error: {message}$"):
            train.main()
    assert left.exists()


def test_the_error_without_ray_is_one_line(tmp_path, monkeypatch):
    for name in ("matplotlib", "tensorboard", "tqdm"):
        pytest.importorskip(name)
    import train

    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--actors=2", f"--directory={tmp_path}"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r'^error: --actors needs Ray: pip install "ray') as stopped:
        train.main()
    requirement = str(stopped.value).split('"')[1]
    assert f'ray = ["{requirement}"]' in (ROOT / "pyproject.toml").read_text()


def test_a_cluster_that_does_not_answer_is_an_error(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    for name in ("matplotlib", "tensorboard", "tqdm"):
        pytest.importorskip(name)
    import train

    def init(*_, **__):
        raise ConnectionError("Could not find any running Ray instance.\nPlease specify the one to connect to.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--actors=2", "--ray=auto", f"--directory={tmp_path}"])
    expected = (
        "^error: --ray auto is not a Ray cluster that answers: ConnectionError: Could not find any .* connect to.$"
    )
    with pytest.raises(SystemExit, match=expected):
        train.main()


def episode(length, seed):
    generator = np.random.default_rng(seed)
    return Episode(
        observations=list(generator.random((length, 4), dtype=np.float32)),
        legal_actions=[np.ones(2, dtype=bool)] * length,
        actions=generator.integers(2, size=length).tolist(),
        rewards=generator.random(length).tolist(),
        search_policies=list(generator.random((length, 2), dtype=np.float32)),
        search_values=generator.random(length).tolist(),
        terminated=bool(seed % 2),
    )


def test_a_new_keeper_has_all_acknowledged_episodes(tmp_path):
    """After each call, another keeper (the actor that owns the replay buffer) is created from the same file.

    A repeated call adds nothing. The ring buffer wraps around.
    """
    pytest.importorskip("ray")
    from actors import Keeper

    configuration = Configuration(replay_capacity=100, minimum_replay=10)
    begin = functools.partial(Keeper, configuration, str(tmp_path / "replay.sqlite"))
    keeper = begin()
    for call in range(30):
        episodes = [episode(3 + call % 7, seed=2 * call + i) for i in range(2)]
        size = keeper.add(str(call), episodes)
        other = begin()
        assert other.add(str(call), episodes) == size == other.size()
        for name, array in vars(keeper.buffer).items():
            np.testing.assert_array_equal(array, getattr(other.buffer, name), err_msg=f"{name} after {call}")
    assert keeper.buffer.num_added > 300
    assert len(keeper.file.execute("SELECT call FROM added").fetchall()) < 30


@pytest.fixture(scope="module")
def begin():
    ray = pytest.importorskip("ray")
    from actors import ActorTraining

    configuration = Configuration(**SMALL, actors=2, training_steps=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{EXAMPLE}")  # Ray's processes look in the script's folder
        yield lambda directory: ActorTraining(configuration, directory, "local")
        ray.shutdown()


def learn(training, steps):
    last = training.learner_steps + steps
    while training.learner_steps < last:
        training.step()


@pytest.mark.slow
def test_killed_actors_are_replaced(begin, tmp_path):
    import ray

    training = begin(tmp_path)
    learn(training, 4)
    ray.kill(training.players[0], no_restart=False)
    learn(training, 8)
    replaced = training.players[0].play.remote(training.weights, training.replay.keeper)
    acknowledged = ray.get(replaced, timeout=PATIENCE)[2]
    ray.kill(training.replay.keeper, no_restart=False)
    assert ray.get(training.replay.keeper.size.remote(), timeout=PATIENCE) >= acknowledged > 30
    before = training.network.state_dict()["value.0.weight"].clone()
    learn(training, 8)
    assert not torch.equal(before, training.network.state_dict()["value.0.weight"])

    training.save(tmp_path / "checkpoint.pt")
    size = ray.get(training.replay.keeper.size.remote())
    for actor in (*training.players, training.replay.keeper):
        ray.kill(actor)
    resumed = begin(tmp_path)
    resumed.load(tmp_path / "checkpoint.pt")
    assert len(resumed.replay) >= size
    assert resumed.learner_steps == training.learner_steps
    learn(resumed, 2)


@pytest.mark.slow
def test_a_damaged_replay_buffer_is_an_error(begin, tmp_path):
    from configuration import RunError

    path = tmp_path / "replay.0.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(RunError, match=rf"^{path} cannot be read as a replay buffer: .*file is not a database"):
        begin(tmp_path)
