"""`GradientMonitor` for Lightning. Importing this module needs Lightning."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from .._remedies import INSTALL
from ._runs import can_write
from .monitor import GradientMonitor


def _callback_class() -> Any:
    """`Callback` of `lightning` or `pytorch_lightning`, whichever the program has imported."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    for name in names:
        try:
            __import__(name)
        except ImportError:
            continue
        return sys.modules[name].Callback
    raise ImportError(f"GradientMonitorCallback needs Lightning: {INSTALL} lightning")


def _experiment(logger: Any) -> Any:
    """The object that a logger writes to; for MLflow, whose experiment is a client, the run."""
    experiment: Any = getattr(logger, "experiment", None)
    return experiment.get_run(logger.run_id) if hasattr(experiment, "log_batch") else experiment


class GradientMonitorCallback(_callback_class()):  # type: ignore[misc]
    """Attaches a `GradientMonitor` to each optimizer of a `fit`, and closes it at the end.

    It writes to the first logger that a monitor can write to, such as `TensorBoardLogger`, `WandbLogger` and
    `MLFlowLogger`; without one the numbers are kept for `history` and `plot` of `monitors`. With several optimizers,
    tags begin with "optimizer0/" and so on.

    Args:
        **options: keyword arguments of `GradientMonitor`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.monitors: list[GradientMonitor] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach a monitor to each optimizer."""
        experiments = map(_experiment, trainer.loggers)
        writer = next((experiment for experiment in experiments if can_write(experiment)), None)
        several = len(trainer.optimizers) > 1
        self.monitors = [
            GradientMonitor(
                pl_module,
                optimizer,
                **{
                    "writer": writer,
                    "first_step": trainer.global_step,
                    "prefix": f"optimizer{index}/" if several else "",
                    **self.options,
                },
            )
            for index, optimizer in enumerate(trainer.optimizers)
        ]

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Write what is left, and detach."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write what is left, and detach."""
        self._close()

    def _close(self) -> None:
        with contextlib.ExitStack() as closings:  # all are closed, even if the writer of one raises
            for monitor in reversed(self.monitors):
                closings.callback(monitor.close)
