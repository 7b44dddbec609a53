"""Checks of the example agent's training by two ranks, which tests/test_muzero_processes.py starts."""

import contextlib
import copy
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "muzero"))
from configuration import Configuration, RunError
from learner import make_loss, make_optimizer, update_weights
from parallel import Ranks
from replay import Batch
from training import Training

SMALL = {"num_environments": 4, "num_simulations": 2, "minimum_replay": 30, "batch_size": 9}
CONFIGURATION = Configuration(**SMALL, training_steps=60)


class Joined(Ranks):
    """The ranks of the existing process group."""

    def __init__(self) -> None:
        self.rank, self.size, self.process_group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD


def after(steps: int, training: Training) -> Training:
    for _ in range(steps):
        training.step()
    return training


def weights_are_the_same_after_resuming(ranks: Ranks, checkpoint: Path) -> Training:
    """The weights are bitwise equal in both ranks, with and without an interruption."""
    whole = after(40, Training(CONFIGURATION, ranks))
    after(20, Training(CONFIGURATION, ranks)).save(checkpoint)
    ranks.gather("the checkpoint is written")
    resumed = Training(CONFIGURATION, ranks)
    resumed.load(checkpoint if ranks.rank == 0 else Path("on another machine"))
    after(20, resumed)
    assert whole.learner_steps > 0
    assert whole.curve == resumed.curve
    weights = [parameters_to_vector(training.network.parameters()).detach() for training in (whole, resumed)]
    for others in ranks.gather(weights):
        assert torch.equal(weights[0], others[0])
        assert torch.equal(weights[0], others[1])
    played = ranks.gather(whole.replay.observation)
    assert len(played) == 2
    assert not (played[0] == played[1]).all()
    return whole


def step_equals_that_of_the_whole_batch(ranks: Ranks, training: Training) -> None:
    """Ranks have the gradients of one process that learns from both batches."""
    batch = training.replay.sample(training.share.batch_size, training.generator, normalize=False)
    batches = ranks.gather(batch)
    assert [len(batch.index) for batch in batches] == [4, 5]
    alone = copy.deepcopy(training.network)
    training.learn(batch)
    batch = Batch(**{name: joined([vars(batch)[name] for batch in batches]) for name in vars(batch)})
    batch.importance_weights /= batch.importance_weights.max()
    loss_function = make_loss(alone.support, "fused")
    update_weights(alone, make_optimizer(alone, 0.0), loss_function, batch, CONFIGURATION.weight_decay)
    for ours, expected in zip(training.network.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-6)


def joined(values):
    if isinstance(values[0], dict):
        return {name: joined([value[name] for value in values]) for name in values[0]}
    return torch.cat([torch.as_tensor(value) for value in values])


def ranks_train_as_one(rank: int, checkpoint: Path) -> None:
    ranks = Joined()
    training = weights_are_the_same_after_resuming(ranks, checkpoint)
    step_equals_that_of_the_whole_batch(ranks, training)


@contextlib.contextmanager
def train_in(folder: Path, *options: str) -> Iterator[ModuleType]:
    """The module train.py, for a run of these ranks in a folder."""
    import train

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", f"--directory={folder}", *options])
        patch.setattr(sys, "stdout", sys.stdout)
        patch.setattr(train, "Ranks", Joined)
        yield train


def a_damaged_checkpoint_is_rejected(rank: int) -> None:
    """Only rank 0 has the file, and no other rank waits for its contents."""
    folder = Path(tempfile.mkdtemp())
    if rank == 0:
        (folder / "cartpole-seed0").mkdir()
        (folder / "cartpole-seed0" / "checkpoint.pt").write_bytes(b"damaged")
    expected = rf"^error: {folder}/\S+ cannot be read as a checkpoint: UnpicklingError: "
    with train_in(folder) as train, pytest.raises(SystemExit, match=expected):
        train.main()


def a_problem_of_one_rank_ends_both(rank: int) -> None:
    """A checkpoint that rank 0 cannot write, one whose share of rank 1 is incomplete, and a folder that is in use."""
    ranks = Joined()
    training = Training(CONFIGURATION, ranks)
    folder = Path(ranks.from_first(tempfile.mkdtemp()))
    path = folder / "cartpole-seed0" / "checkpoint.pt"
    with pytest.raises(RunError, match=rf"{path} cannot be written: .*No such file or directory"):
        training.save(path)
    if rank == 0:
        path.parent.mkdir()
    training.save(path)
    if rank == 0:
        state = torch.load(path, weights_only=False)
        del state["shares"][1]["replay"]
        torch.save(state, path)
    with pytest.raises(RunError, match=rf"{path} cannot be read as a checkpoint: KeyError: 'replay'"):
        training.load(path)
    expected = rf"^error: another run is in progress in {path.parent}: wait for its end"
    with train_in(folder) as train, train.alone_in(path.parent, ranks), pytest.raises(SystemExit, match=expected):
        train.main()


def ctrl_c_saves_a_checkpoint(rank: int) -> None:
    """Rank 1 receives the signal in its third step; all ranks save after that step, and end."""
    ranks = Joined()
    folder = Path(ranks.from_first(tempfile.mkdtemp()))
    step = Training.step

    def interrupted(training: Training) -> dict[str, float]:
        scalars = step(training)
        if training.ranks.rank == 1 and training.step_number == 3:
            signal.raise_signal(signal.SIGINT)
        return scalars

    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with train_in(folder, *options) as train, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "step", interrupted)
        assert train.main() == train.INTERRUPTED
    ranks.gather("the checkpoint is written")
    saved = torch.load(folder / "cartpole-seed0" / "checkpoint.pt", weights_only=False)
    assert saved["record"]["step_number"] == 3
    assert len(saved["shares"]) == 2
