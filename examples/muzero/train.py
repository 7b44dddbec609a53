"""Trains a small MuZero on a game, evaluates it, and times its search and its learner step.

Interrupted (Ctrl-C) and started again with the same options, it continues from its last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import games
import gradscale_ext as gs
from configuration import Configuration, RunError, add_options, check_option, from_options
from learner import hidden_state_gradients, make_loss, time_learner_step
from parallel import Ranks
from plot import plot_hidden_state_gradients, plot_learning_curve
from search import time_search
from self_play import evaluate
from training import SHARED, Training, one_line

TIMED_STEPS = 200
TIMED_SEARCHES = 20
STEPS_PER_CHECKPOINT = 250
STEPS_PER_LOG = 10
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended


class Interruption:
    """Delays Ctrl-C until a step is complete; a second Ctrl-C ends the program immediately."""

    def __init__(self) -> None:
        """Nothing is requested yet."""
        self.requested = False

    def __enter__(self) -> Interruption:
        """Install the handler."""
        self.default_handler = signal.signal(signal.SIGINT, self.request)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handler."""
        signal.signal(signal.SIGINT, self.default_handler)

    def request(self, _signal: int, _frame: FrameType | None) -> None:
        """Record this Ctrl-C, and let the next one through."""
        self.requested = True
        signal.signal(signal.SIGINT, self.default_handler)


def main() -> int:
    """Train or continue training, then report. Returns the exit status."""
    options = parse_options()
    # The networks are so small that handing work to a second thread costs more than it saves.
    torch.set_num_threads(1)
    ranks = Ranks()
    if ranks.rank > 0:  # only rank 0 prints
        sys.stdout = None
    directory = options.directory
    try:
        configuration = checked_configuration(options, ranks)
        directory /= f"{configuration.game}-seed{configuration.seed}"
        with alone_in(directory, ranks):
            return run(options, configuration, directory, ranks)
    except RunError as error:
        sys.exit(f"error: {error}")
    except (OSError, sqlite3.Error) as error:
        sys.exit(f"error: {directory} cannot be written: {one_line(error)}")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        sys.exit(f"error: the run needs more memory than there is: use smaller numbers. {one_line(error)}")


def run(options: argparse.Namespace, configuration: Configuration, directory: Path, ranks: Ranks) -> int:
    """Train or continue training, then report. Returns the exit status."""
    start = time.perf_counter()
    checkpoint = directory / "checkpoint.pt"
    if options.fresh:
        ranks.agree(remove_run(directory))  # no rank reads files that are being removed
    training = begin(options, configuration, directory, ranks)
    if ranks.from_first(checkpoint.exists()):
        try:
            training.load(checkpoint)
        except RunError as error:
            raise RunError(f"{error}. Use another --directory, or --fresh to delete this run.") from error
    try:
        train(training, checkpoint, 60 * options.max_minutes, options.monitor)
        if ranks.rank > 0:
            return 0
        if not training.learner_steps:
            raise RunError("the run ended before its first learner step, so there is nothing to report")
        report(training, directory)
        if options.monitor:
            report_gradients(training, directory)
    except KeyboardInterrupt:
        print(f"interrupted; the same command continues from {checkpoint}")
        return INTERRUPTED
    print(f"time: training {training.seconds:.0f} s since it began, this command {time.perf_counter() - start:.0f} s")
    return 0


@contextlib.contextmanager
def alone_in(directory: Path, ranks: Ranks) -> Iterator[None]:
    """Make the folder of a run, and keep other runs out of it. The system releases the lock of a run that is killed.

    Raises:
        RunError: another run is in progress in this folder, or it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        problem = ""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if ranks.rank == 0:
                lock = stack.enter_context(open(directory.with_suffix(".lock"), "w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"another run is in progress in {directory}: wait for its end, or use another --directory"
        except OSError as error:
            problem = f"--directory must be a folder that can be written: {error}"
        ranks.agree(problem)
        yield


def checked_configuration(options: argparse.Namespace, ranks: Ranks) -> Configuration:
    """The configuration of a run that this many processes can begin.

    Raises:
        RunError: an option makes no sense, or Ray is missing.
    """
    check_option("--max-minutes", options.max_minutes, ("above 0", lambda minutes: minutes > 0))
    configuration = from_options(options)
    configuration.share(0, ranks.size, *SHARED)
    configuration.share(0, max(configuration.actors, 1) * ranks.size, "num_environments")
    if configuration.actors and importlib.util.find_spec("ray") is None:
        raise RunError('--actors needs Ray: pip install "ray>=2.40,<3"')
    if options.ray != "local" and not configuration.actors:
        raise RunError("--ray needs --actors, which run on the cluster")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RunError(
            "--device cuda needs a GPU, and a PyTorch that was built for it; torch.cuda.is_available() is False"
        )
    if ranks.size > 1 and (options.device == "cuda" or options.captured):
        raise RunError("--device cuda and --captured train in one process: leave them out under torchrun")
    return configuration


def begin(options: argparse.Namespace, configuration: Configuration, directory: Path, ranks: Ranks) -> Training:
    """A run in this process, or with actors on Ray."""
    if not configuration.actors:
        return Training(configuration, ranks, options.device, options.captured)
    from actors import ActorTraining

    return ActorTraining(configuration, directory, options.ray, ranks, options.device, options.captured)


def parse_options() -> argparse.Namespace:
    """Parse the command line. The game determines the defaults of the other options."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--game", choices=games.names(), default=Configuration.game)
    name = first.parse_known_args()[0].game
    try:
        game = games.load(name)
    except ModuleNotFoundError as error:
        first.error(str(error))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory",
        type=folder,
        default=Path("runs/muzero"),
        help="folder for the checkpoints, logs and pictures of runs, each in its <game>-seed<N> (default: %(default)s)",
    )
    parser.add_argument(
        "--max-minutes",
        type=float,
        default=game.max_minutes,
        metavar="X",
        help="training ends after this many minutes, even if steps remain (default: %(default)s)",
    )
    parser.add_argument(
        "--ray", default="local", metavar="ADDRESS", help="the Ray cluster that --actors run on (default: this machine)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the learner step runs (default: %(default)s)"
    )
    parser.add_argument(
        "--captured", action="store_true", help="run the learner step as one CUDA graph; on a CPU it is called as it is"
    )
    parser.add_argument("--monitor", action="store_true", help="log and draw gradients as well")
    parser.add_argument("--fresh", action="store_true", help="delete the files of an earlier run, and start again")
    add_options(parser, name)
    return parser.parse_args()


def folder(path: str) -> Path:
    """The folder of an option."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{error} It begins with ~ and a name that is no user's.") from None


def remove_run(directory: Path) -> str:
    """Delete the files that an earlier run wrote, and nothing else. Returns an error message, or an empty one."""
    pictures = ("learning_curve.png", "hidden_state.png")
    for pattern in ("checkpoint.*", "replay.*.sqlite*", "events.out.tfevents.*", *pictures):
        for path in directory.glob(pattern):
            try:
                path.unlink(missing_ok=True)  # another rank may have deleted it first
            except OSError as error:
                return f"--fresh cannot delete {path}: {error.strerror}. Delete it, or use another --directory."
    return ""


def train(training: Training, checkpoint: Path, max_seconds: float, monitor: bool) -> None:
    """Train to the end of the run, to the time limit, or to Ctrl-C, which is raised after the checkpoint is written."""
    total = training.configuration.training_steps
    begun, interrupted, is_first = training.step_number, False, training.ranks.rank == 0
    if training.finished or training.seconds >= max_seconds:
        print(f"this run has finished, after {begun} steps of the games; evaluating it again (--fresh starts it anew)")
        return
    # The number of steps, the time or a solved game ends the run: the bar shows the one that is closest to its end.
    interval = 0.5 if sys.stderr.isatty() else 20
    form = "{percentage:3.0f}%|{bar:20}| {desc}"
    with contextlib.ExitStack() as stack:
        interruption = stack.enter_context(Interruption())  # before libraries that swallow exceptions
        print(f"continuing from step {begun} of the games" if begun else "starting a run", f"in {checkpoint.parent}")
        bar = stack.enter_context(
            tqdm(total=1.0, mininterval=interval, miniters=0, bar_format=form, disable=not is_first)
        )
        writer = stack.enter_context(logs(checkpoint.parent, begun)) if is_first else None
        if monitor and writer:
            stack.enter_context(monitored(training, writer))
        while not training.finished:
            requests = training.ranks.gather((interruption.requested, training.seconds >= max_seconds))
            interrupted, late = (any(flags) for flags in zip(*requests, strict=True))
            if interrupted or late:
                break
            scalars = training.step()
            progress = training.progress(max_seconds)
            bar.set_description_str(", ".join(progress), refresh=False)
            bar.update(min(max(progress.values()), 1.0) - bar.n)
            if writer and (training.step_number % STEPS_PER_LOG == 0 or "self_play/return" in scalars):
                for tag, value in scalars.items():
                    writer.add_scalar(tag, value, training.step_number)
            if training.step_number % STEPS_PER_CHECKPOINT == 1:
                training.save(checkpoint)
        training.save(checkpoint)
    if interrupted:
        raise KeyboardInterrupt
    if training.solved:
        print(
            f"solved after {training.step_number} steps of the games and {training.learner_steps} learner steps: mean "
            f"return {training.mean_return:.0f} over the latest episodes"
        )
    elif not training.finished:
        print(
            f"time is up after {training.step_number} of {total} steps of the games and {training.learner_steps} "
            "learner steps (--max-minutes)"
        )


@contextlib.contextmanager
def logs(directory: Path, begun: int) -> Iterator[SummaryWriter]:
    """TensorBoard's logs. Its writer raises errors of its thread, which does not need to print them too."""
    print_error = threading.excepthook
    threading.excepthook = lambda error: None if issubclass(error.exc_type, OSError) else print_error(error)
    try:
        # After a crash the logs may be ahead of the checkpoint; `purge_step` hides steps that will be written again.
        with SummaryWriter(directory, purge_step=begun) as writer:
            yield writer
    finally:
        threading.excepthook = print_error


def monitored(training: Training, writer: SummaryWriter) -> gs.GradientMonitor:
    """Log the gradients, by the number of the learner step."""
    return gs.GradientMonitor(training.network, training.optimizer, writer=writer, first_step=training.learner_steps)


def report(training: Training, directory: Path) -> None:
    """Evaluate, time the learner step, draw the plot, and print the results."""
    settings, game, self_play = training.share, training.game, training.self_play
    print(f"evaluating: {game.evaluation_episodes} episodes in parallel ...", flush=True)
    evaluation = evaluate(training.acting_network, settings)
    picture = directory / "learning_curve.png"
    title = f"MuZero on {game.title}, seed {settings.seed}"
    ylabel = "return" if game.players == 1 else "return of the first player"
    plot_learning_curve(picture, title, ylabel, training.curve, training.environment_steps, evaluation)
    seconds = time_search(
        TIMED_SEARCHES,
        training.acting_network,
        self_play.observation,
        self_play.game.legal_actions(),
        settings.num_simulations,
        settings.signed_discount,
    )
    generator = np.random.default_rng(settings.seed)
    batches = [training.replay.sample(settings.batch_size, generator).to(training.device) for _ in range(20)]
    print(f"timing the learner step: {TIMED_STEPS} times with each implementation of the loss ...", flush=True)
    median = time_learner_step(
        training.network, batches, settings.learning_rate, settings.weight_decay, repetitions=TIMED_STEPS
    )
    print(
        f"trained: {training.environment_steps} environment steps, {training.learner_steps} learner steps, "
        f"{training.processor_seconds:.0f} s of processor time in this process"
    )
    for player, returns in evaluation.items():
        print(f"evaluation: {len(returns)} episodes, {summary(game, returns)}: {player}")
    simulations, num_games = settings.num_simulations, settings.num_environments
    print(
        f"search: {simulations} simulations in each of {num_games} games in {1e3 * seconds:.1f} ms, "
        f"{1e6 * seconds / (simulations * num_games):.1f} us a simulation (median)"
    )
    print(
        f"learner step: {median['fused']:.2f} ms with the fused loss, {median['reference']:.2f} ms with the reference, "
        f"{median['reference'] / median['fused']:.2f} times as long (medians)"
        + (f"; captured {median['captured']:.2f} ms" if "captured" in median else "")
    )
    print(f"picture: {picture}")
    print(f"logs: tensorboard --logdir {directory}")


def summary(game: type[games.Game], returns: games.Floats) -> str:
    """Summary statistics of returns."""
    if game.players == 1:
        return f"mean return {returns.mean():.1f} (from {returns.min():.0f} to {returns.max():.0f})"
    return f"{(returns > 0).sum()} won, {(returns == 0).sum()} drawn, {(returns < 0).sum()} lost"


def report_gradients(training: Training, directory: Path) -> None:
    """Plot the gradient of the hidden state in one batch, with the paper's scaling and without."""
    settings = training.share
    batch = training.replay.sample(settings.batch_size, np.random.default_rng(settings.seed)).to(training.device)
    loss_function = make_loss(training.network.support, settings.loss)
    norms = {
        scale: hidden_state_gradients(training.network, loss_function, batch, settings.weight_decay, scale)
        for scale in (0.5, 1.0)
    }
    picture = directory / "hidden_state.png"
    plot_hidden_state_gradients(picture, norms)
    for scale, values in norms.items():
        print(f"gradient of the hidden state, hidden_scale {scale}: {' '.join(f'{value:.3g}' for value in values)}")
    print(f"picture: {picture}")


if __name__ == "__main__":
    sys.exit(main())
