"""Recorded steps: statistics that are being copied to the host, and their charts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ..statistics.gradients import BIN_EDGES, GradientStatistics
from ._clippings import select_columns

# Charts allow no infinite edge, so their outer bins are as wide as the others.
FINITE_EDGES = (BIN_EDGES[1] - 1, *BIN_EDGES[1:-1], BIN_EDGES[-2] + 1)

FEW_PARAMETERS = 10
"""A model with at most this number of parameters has all of them written by default."""

WORST = 5
"""Number of parameters that are written by default for a larger model."""

USUAL_RATIO = 1e-3
"""Update-to-weight ratio of a parameter that trains as most do."""


class Layout:
    """Names of the parameters shared by model and optimizer, and of the modules that hold them."""

    def __init__(self, model: torch.nn.Module, held: frozenset[int]) -> None:
        """Find the parameters with these ids. A tied one has its first name, and belongs to all modules around it."""
        self.parameters: dict[str, torch.Tensor] = {}
        self.names: dict[int, str] = {}
        self.modules: dict[str, dict[str, None]] = {}
        for path, parameter in _under_all_names(model):
            if id(parameter) in held:
                path = public_name(path)
                name = self.names.setdefault(id(parameter), path)
                self.parameters[name] = parameter
                for module in parents(path):
                    self.modules.setdefault(module, {})[name] = None


def _under_all_names(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters under every path. TorchRL's `named_parameters` lacks the argument that keeps duplicates."""
    arguments = inspect.signature(model.named_parameters).parameters.values()
    if any(argument.name == "remove_duplicate" or argument.kind is argument.VAR_KEYWORD for argument in arguments):
        return model.named_parameters(remove_duplicate=False)
    return torch.nn.Module.named_parameters(model, remove_duplicate=False)


def public_name(path: str) -> str:
    """The path without the wrapper module that `torch.compile` puts around a model."""
    return path.replace("_orig_mod.", "")


def parents(path: str) -> Iterator[str]:
    """Paths of the modules around a parameter or module, the outermost first."""
    parts = path.split(".")[:-1]
    return (".".join(parts[: depth + 1]) for depth in range(len(parts)))


@dataclass(frozen=True)
class Histogram:
    """Counts of elements whose log2 |g| is between one edge and the next."""

    counts: list[int]
    edges: list[float]


@dataclass(frozen=True)
class Charts:
    """Numbers of one step by tag."""

    step: int
    scalars: dict[str, float]
    histograms: dict[str, Histogram]

    def few(self) -> Charts:
        """If there are many parameters, keep only the charts of a few.

        These are the parameters with update-to-weight ratios farthest from the usual one; without ratios, those with
        the largest gradient norms.
        """
        norms = {tag.partition("/")[2]: norm for tag, norm in self.scalars.items() if tag.startswith("gradient_norm/")}
        if len(norms) <= FEW_PARAMETERS:
            return self
        ratios = {name: self.scalars.get(f"update_to_weight_ratio/{name}") for name in norms}
        if set(ratios.values()) == {None}:
            oddness = norms
        else:
            oddness = {name: 0.0 if ratio is None else _oddness(ratio) for name, ratio in ratios.items()}
        worst = set(sorted(norms, key=oddness.__getitem__, reverse=True)[:WORST])

        def stays(tag: str) -> bool:
            chart, _, name = tag.partition("/")
            return not chart.startswith(("gradient_norm", "gradient_histogram", "update_")) or not name or name in worst

        return Charts(
            self.step,
            {tag: value for tag, value in self.scalars.items() if stays(tag)},
            {tag: histogram for tag, histogram in self.histograms.items() if stays(tag)},
        )


def _oddness(ratio: float) -> float:
    """How many times an update is larger or smaller than usual, as a logarithm."""
    return abs(math.log(ratio / USUAL_RATIO)) if 0 < ratio < math.inf else math.inf


@dataclass(frozen=True)
class Selection:
    """Names of the modules that have charts (None: all), and True if histograms are written."""

    modules: tuple[str, ...] | None
    histograms: bool

    def has(self, name: str) -> bool:
        """Return True for a selected parameter or module, and for anything inside a selected module."""
        return self.modules is None or any(name == module or name.startswith(module + ".") for module in self.modules)


@dataclass
class Record:
    """One recorded step, in tensors that a device may still be computing; `to_host` copies them."""

    step: int
    modules: dict[str, dict[str, None]]
    """Names of the parameters in each module."""
    gradients: GradientStatistics
    before_clipping: list[tuple[dict[int, str], GradientStatistics]]
    """Statistics from before each clipping, with the columns and names of the parameters that it clipped first."""
    clip_rate: torch.Tensor | None = None
    updates: tuple[list[str], torch.Tensor] | None = None
    """Names `[N]`, and norms `[2, N]` of the parameters and of their updates."""
    activations: tuple[list[str], torch.Tensor] | None = None
    """Names `<module>/<call>`, and norms `[N]`."""
    scale: torch.Tensor | None = None
    was_called: bool = False
    """True if the optimizer's hooks ran in this step."""
    skipped: torch.Tensor | None = None
    """Nonzero if the step was skipped because of NaN or inf."""
    skipped_steps: torch.Tensor | None = None
    """Number of skipped steps since this number was last recorded."""
    copied: list[torch.cuda.Event] = field(default_factory=list)

    def to_host(self) -> Record:
        """The same record on the host, complete once the events in `copied` have happened."""
        devices: set[torch.device] = set()

        def sent(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.is_cpu:
                    return value
                if value.is_cuda:
                    devices.add(value.device)
                return value.to("cpu", non_blocking=True)
            if isinstance(value, list | tuple):
                return [sent(part) for part in value]
            if isinstance(value, GradientStatistics):
                return replace(value, **{name: sent(part) for name, part in vars(value).items()})
            return value

        record = Record(*(sent(getattr(self, part.name)) for part in fields(self)))
        for device in devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            record.copied.append(event)
        return record

    def charts(self, selection: Selection) -> Charts | None:
        """The numbers to write, if any; a step that was not taken has no norms."""
        for event in self.copied:
            event.synchronize()
        charts = Charts(self.step, {}, {})
        skipped = self.skipped is not None and bool(self.skipped.item())
        if self.was_called and not skipped:
            self._add_norms(charts, selection)
        if (self.was_called or skipped) and (nonfinite := self._nonfinite()):
            charts.scalars["nonfinite_gradients"] = nonfinite
        if self.skipped_steps is not None and (count := self.skipped_steps.item()):
            charts.scalars["skipped_steps"] = count
        return charts if charts.scalars else None

    def _add_norms(self, charts: Charts, selection: Selection) -> None:
        scale = self.unscaled_by()
        _add(charts, "", [self.gradients], self.modules, selection, scale)
        if self.before_clipping:
            _add(charts, "_before_clipping", self._before_clipping(), self.modules, selection, scale)
        if self.clip_rate is not None:
            charts.scalars["clip_rate"] = self.clip_rate.item()
        if self.updates is not None:
            names, (weights, updates) = self.updates[0], self.updates[1].tolist()
            for name, weight, update in zip(names, weights, updates, strict=True):
                if weight > 0 and f"gradient_norm/{name}" in charts.scalars:
                    charts.scalars[f"update_to_weight_ratio/{name}"] = update / weight
        if self.activations is not None:
            calls, norms = self.activations[0], self.activations[1].tolist()
            charts.scalars.update(
                {f"activation_gradient_norm/{call}": norm for call, norm in zip(calls, norms, strict=True)}
            )

    def _before_clipping(self) -> list[GradientStatistics]:
        return [select_columns(names, statistics) for names, statistics in self.before_clipping]

    def unscaled_by(self) -> float:
        """Loss scale still in the gradients, where the optimizer itself unscales them."""
        return 1.0 if self.scale is None else self.scale.item()

    def _nonfinite(self) -> int:
        """Number of NaN and inf before clipping, which may spread or remove them."""
        counts: dict[str, int] = {}
        for statistics in [self.gradients, *self._before_clipping()]:
            counts.update(zip(statistics.names, (statistics.nans + statistics.infs).tolist(), strict=True))
        return sum(count for name, count in counts.items() if name)


def _add(
    charts: Charts,
    when: str,
    parts: list[GradientStatistics],
    modules: dict[str, dict[str, None]],
    selection: Selection,
    scale: float,
) -> None:
    """Add norms and histograms of parameters, modules and the total; `parts` share no parameter."""
    p = parts[0].norm_type
    norms: dict[str, float] = {}
    for part in parts:
        for name, norm, missing in zip(part.names, part.norm.tolist(), part.missing.tolist(), strict=True):
            if name and not missing:
                norms[name] = norm / scale
    chosen = [name for name in norms if selection.has(name)]
    charts.scalars.update({f"gradient_norm{when}/{name}": norms[name] for name in chosen})
    for module, names in modules.items():
        present = [norms[name] for name in names if name in norms]
        if present and selection.has(module):
            charts.scalars[f"module_gradient_norm{when}/{module}"] = norm_of(present, p)
    charts.scalars[f"gradient_norm_total{when}"] = norm_of([part.total_norm.item() / scale for part in parts], p)
    if selection.histograms:
        rows = {name: row for part in parts for name, row in counts_by_name(part)}
        histograms = ((name, histogram_of(rows[name], scale)) for name in chosen if name in rows)
        charts.histograms.update(
            {f"gradient_histogram{when}/{name}": histogram for name, histogram in histograms if histogram is not None}
        )


def counts_by_name(statistics: GradientStatistics) -> list[tuple[str, list[int]]]:
    """Names and counts by bin of the gradients of a part that has histograms."""
    if statistics.histogram is None:
        return []
    columns = zip(statistics.names, statistics.missing.tolist(), statistics.histogram.tolist(), strict=True)
    return [(name, row) for name, missing, row in columns if not missing]


def norm_of(norms: Sequence[float], p: float) -> float:
    """Norm of one vector made of parts with these norms."""
    if p == 2:
        return math.hypot(*norms)
    largest = max(norms)
    if not 0 < largest < math.inf or math.isinf(p):
        return largest
    return largest * float(sum((norm / largest) ** p for norm in norms) ** (1 / p))


def histogram_of(counts: list[int], scale: float = 1.0) -> Histogram | None:
    """Bins from the first to the last with an element; None where all elements are 0."""
    filled = [index for index, count in enumerate(counts) if count]
    if not filled:
        return None
    first, last = filled[0], filled[-1] + 1
    shift = math.log2(scale)
    return Histogram(counts[first:last], [edge - shift for edge in FINITE_EDGES[first : last + 1]])
