"""Writing charts: to TensorBoard as one event a step, to a run, or to anything that has `add_scalar`."""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise
from typing import Any

from ._charts import Charts, Histogram


def write(writer: Any, charts: Charts, prefix: str) -> None:
    """Write the numbers of a step, and histograms where the writer has `add_histogram_raw`."""
    if hasattr(writer, "write_charts"):
        writer.write_charts(charts, prefix)
        return
    if _is_summary_writer(writer):
        writer._get_file_writer().add_summary(_summary(charts, prefix), charts.step)
        return
    for tag, value in charts.scalars.items():
        writer.add_scalar(prefix + tag, value, charts.step)
    if hasattr(writer, "add_histogram_raw"):
        for tag, histogram in charts.histograms.items():
            writer.add_histogram_raw(prefix + tag, **raw(histogram), global_step=charts.step)


def raw(histogram: Histogram) -> dict[str, Any]:
    """Arguments of `add_histogram_raw`, with every element moved to the middle of its bin."""
    edges, counts = histogram.edges, histogram.counts
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    sums = [count * middle for count, middle in zip(counts, middles, strict=True)]
    return {
        "min": edges[0],
        "max": edges[-1],
        "num": sum(counts),
        "sum": sum(sums),
        "sum_squares": sum(total * middle for total, middle in zip(sums, middles, strict=True)),
        "bucket_limits": edges[1:],
        "bucket_counts": counts,
    }


def _is_summary_writer(writer: Any) -> bool:
    """Check without importing TensorBoard, which a SummaryWriter has done already."""
    module = sys.modules.get("torch.utils.tensorboard.writer")
    return module is not None and isinstance(writer, module.SummaryWriter)


def _summary(charts: Charts, prefix: str) -> Any:
    """One message for all numbers of a step: SummaryWriter's own calls make an event of each, at ten times the cost."""
    proto: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    summary = proto.Summary()
    for tag, value in charts.scalars.items():
        summary.value.add(tag=prefix + tag, simple_value=value)
    for tag, histogram in charts.histograms.items():
        fields = raw(histogram)
        limits, counts = fields.pop("bucket_limits"), fields.pop("bucket_counts")
        summary.value.add(tag=prefix + tag, histo=proto.HistogramProto(**fields, bucket_limit=limits, bucket=counts))
    return summary
