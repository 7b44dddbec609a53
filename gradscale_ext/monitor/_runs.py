"""Writing charts to a run of wandb or MLflow, by the library that the run comes from."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

from ._charts import Charts

RUNS = ("wandb.sdk.wandb_run", "mlflow.entities")
"""Modules whose `Run` can be written to."""

MOST_METRICS = 1000
"""The largest number of metrics that MLflow accepts in one call."""


def adapted(writer: Any) -> Any:
    """The writer to use: a run is wrapped in an object with `write_charts`, any other writer is returned unchanged."""
    if _is(writer, RUNS[0]):
        return _WandbRun(writer)
    return _MlflowRun(writer.info.run_id) if _is(writer, RUNS[1]) else writer


def can_write(writer: Any) -> bool:
    """Return True if charts can be written to the writer."""
    return any(_is(writer, module) for module in RUNS) or callable(getattr(writer, "add_scalar", None))


def _is(writer: Any, module: str) -> bool:
    """Return True for a `Run` of a module that the program has imported."""
    return isinstance(writer, getattr(sys.modules.get(module), "Run", ()))


class _WandbRun:
    """Charts have a step of their own: they come an interval late, and wandb accepts no step before its latest."""

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("gradients/*", step_metric="gradients/step")

    def write_charts(self, charts: Charts, prefix: str) -> None:
        histogram: Any = importlib.import_module("wandb").Histogram
        entries: dict[str, Any] = {f"gradients/{prefix}{tag}": value for tag, value in charts.scalars.items()}
        for tag, bins in charts.histograms.items():
            entries[f"gradients/{prefix}{tag}"] = histogram(np_histogram=(bins.counts, bins.edges))
        self._run.log({**entries, "gradients/step": charts.step})


class _MlflowRun:
    """Scalars only: MLflow has no histograms."""

    def __init__(self, run_id: str) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._run_id, self._client, self._metric = run_id, mlflow.MlflowClient(), mlflow.entities.Metric

    def write_charts(self, charts: Charts, prefix: str) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(prefix + tag, value, now, charts.step) for tag, value in charts.scalars.items()]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MOST_METRICS])
