"""Charts of gradients before and after clipping, and of the updates they lead to."""

from __future__ import annotations

import contextlib
import numbers
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from .. import _context, _numbers
from ..statistics.gradients import GradientStatistics, gradient_statistics
from . import _open
from ._activations import Calls
from ._charts import Charts, Layout, Record, Selection, public_name
from ._clippings import Clipping, statistics_before, still_valid
from ._kept import Rehearsal, Sum, Weights
from ._runs import adapted, can_write
from ._tensorboard import write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HISTORY = 1000
"""Number of steps that a monitor remembers for `history` and `plot`."""


class GradientMonitor:
    """Charts the gradients of a model while it trains: attach it once, there is nothing else to call.

    Every `every`-th step of the optimizer is recorded, the first one too. Its numbers travel to the host while training
    goes on, and are written when the next one is recorded: a step never waits for them. Steps that a
    `torch.amp.GradScaler` skips, as gradients are NaN or inf, count as steps. Tags are:

    - `gradient_norm/<parameter>`, `module_gradient_norm/<module>`, `gradient_norm_total`, and the histogram
      `gradient_histogram/<parameter>` of ``log2 |g|``: what the optimizer sees.
    - `gradient_norm_before_clipping/<parameter>` and so on: the same before clipping, if a clipping ran. Norms have the
      `norm_type` of `clip_gradients_`. For `torch.nn.utils.clip_grad_norm_`, which Lightning and Accelerate use, only
      the total has its `norm_type`, and the others are 2-norms; for `torch.nn.utils.clip_grad_value_` all are 2-norms.
      With the `process_group` of `clip_gradients_`, histograms are of the part that this process has.
      If a step is clipped several times, a parameter's norm is the norm before its first clipping, and counts once in
      the totals.
    - `clip_rate`: the share of the steps since the last record at which a clipping changed the gradients.
    - `update_to_weight_ratio/<parameter>`: ``|p_after - p_before| / |p_before|`` of the step, usually about 1e-3. A
      recorded step copies the parameters for it; the copy's memory is kept for the next copy if `every` is below 10.
    - `activation_gradient_norm/<module>/<call>`: norm of the gradient of each call's output, in the last backward pass
      before the step. Calls are numbered in the order of the forward pass.
    - `nonfinite_gradients`: how many elements are NaN or inf (before clipping), where there are any. Norms leave
      these elements out; totals include them.
    - `skipped_steps`: how many steps the scaler has skipped since this tag was last written, where there are any. Each
      skipped step is recorded, with this number and `nonfinite_gradients` alone, whatever `every` is; a record that was
      due is made at the next step. An optimizer that skips by itself (`fused=True`) does so without the host knowing:
      its skipped steps are counted, and written with the next record, or by `close`.

    A clipping is discarded if something else writes to the gradients before they are clipped again, such as the
    backward pass after an abandoned step. Parameters without a gradient are absent. The monitor lives as long as the
    optimizer; one that is collected with it is closed, but writes nothing more. Neither gradients nor training change.
    Where parameters are sharded (DTensor), every rank needs a monitor, with the same `every`. To see skipped steps and
    PyTorch's clipping, three functions are replaced while monitors are open: `torch.amp.GradScaler.step`,
    `torch.nn.utils.clip_grad_value_`, and a function that `torch.nn.utils.clip_grad_norm_` calls. Scalers and clippings
    that do not call them are not seen, such as a `clip_grad_value_` that was imported by its name before.

    While a monitor is open, `torch.compile` breaks its graphs at steps of the optimizer, at clippings of watched
    parameters, and after modules in `activations`. A clipping that is compiled with ``fullgraph=True`` is not seen, and
    a warning says so once. Open a monitor with `activations` before the first call of a compiled model.

    Args:
        model: the parameters' names are taken from it.
        optimizer: the optimizer whose steps are recorded, or a wrapper with the attribute `optimizer`, such as
            Accelerate's and Lightning's. Parameters that only model or optimizer has are left out.
        writer: a `SummaryWriter` of TensorBoard, a run of wandb (``wandb.init()``; tags begin with "gradients/", and
            have "gradients/step" on their axis) or of MLflow (``mlflow.start_run()``; no histograms), or anything with
            ``add_scalar(tag, value, step)`` (and histograms, if it has `add_histogram_raw`). None: the numbers are kept
            for `history` and `plot` only, which always have all of them. If the writer raises, the step or `close`
            raises its error once. The step is still recorded, but what was being written is not written again.
        every: steps from one record to the next.
        histograms: whether to write histograms.
        updates: whether to compare the parameters with themselves before the step.
        modules: names of modules; only these, what is in them, and totals are charted. None: everything is.
        activations: names of modules whose outputs' gradients are charted.
        first_step: number of the optimizer's next step, for a run that is resumed.
        prefix: what all tags begin with, if several monitors have one writer.
        tags: "few": for a model with more than 10 parameters, the writer gets the tags of totals and modules, and at
            each recorded step the tags of the 5 worst parameters: their update-to-weight ratios are farthest from 1e-3
            or, without `updates`, their gradient norms are largest. "all": everything.

    Raises:
        TypeError: an argument has the wrong type, or an optimizer's steps run no hooks.
        ValueError: model and optimizer share no parameter, a number is out of range, or a named module does not exist.

    Related names: gradient logging, `wandb.watch`, `track_grad_norm` (Lightning 1).

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with GradientMonitor(model, optimizer, every=1) as monitor:
    ...     model(torch.tensor([3.0, 4.0])).backward()
    ...     optimizer.step()
    >>> monitor.history["gradient_norm/weight"]
    [(0, 5.0)]
    """

    @_context.in_eager_mode("GradientMonitor: open a monitor outside of a function with fullgraph=True")
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        writer: Any = None,
        every: int = 100,
        histograms: bool = True,
        updates: bool = True,
        modules: Sequence[str] | None = None,
        activations: Sequence[str] = (),
        first_step: int = 0,
        prefix: str = "",
        tags: Literal["few", "all"] = "few",
    ) -> None:
        _check_types(model, optimizer, writer)
        if tags not in ("few", "all"):
            raise ValueError(f"GradientMonitor: tags must be 'few' or 'all', but it is {tags!r}")
        self._model, self._writer, self._tags = model, adapted(writer), tags
        self._optimizer: torch.optim.Optimizer | None = (inner := _with_hooks(optimizer))
        _numbers.check_flag("GradientMonitor: histograms", histograms)
        _numbers.check_flag("GradientMonitor: updates", updates)
        if not isinstance(prefix, str):
            raise TypeError(f"GradientMonitor: prefix must be a string, but it is of type {type(prefix).__name__}")
        self._every = _integer("every", every, 1)
        self._first_step = _integer("first_step", first_step, 0)
        self._prefix = prefix
        known = {public_name(path): module for path, module in model.named_modules()}
        watched = _known("activations", activations, known)
        chosen = None if modules is None else tuple(_known("modules", modules, known))
        self._selection = Selection(chosen, histograms)
        self._held = _ids(inner)
        self._layout = Layout(model, self._held)
        if not self._layout.parameters:
            raise ValueError(
                f"GradientMonitor: optimizer must hold parameters of model, but none of its {len(self._held)} "
                f"is among the {len(list(model.parameters()))} of the model"
            )
        self._weights = Weights(keeps_memory=every < 10) if updates else None
        self._begin(watched)
        self._detach = _open.attach(self, inner, {name: known[name] for name in watched})

    def _begin(self, watched: Sequence[str]) -> None:
        """Set what changes from step to step."""
        self._taken = 0  # steps
        self._recorded = -1  # the last step with norms
        self._due = True  # True if the next step, or the one in progress, is recorded
        self._in_step = False
        self._step_scaler: torch.amp.GradScaler | None = None
        self._has_scaler = False  # if True, any step may be skipped, and is then recorded
        self._gradients: GradientStatistics | None = None
        self._calls = Calls(watched)
        self._clippings: list[Clipping] = []  # since the last step
        self._clip_results = Sum()  # since the last record
        self._skipped_steps = Sum()
        self._unwritten: list[Record] = []
        self._written: Record | None = None
        self._history: list[tuple[int, tuple[str, ...], array[float]]] = []

    @property
    def history(self) -> dict[str, list[tuple[int, float]]]:
        """Steps and values of each tag, as far as they have been written; at most 1000, thinned beyond that."""
        values: dict[str, list[tuple[int, float]]] = {}
        for step, tags, step_numbers in self._history:
            for tag, value in zip(tags, step_numbers, strict=True):
                values.setdefault(tag, []).append((step, value))
        return values

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw what has been recorded.

        Above, a row for each layer: its gradient norm over the steps as a heat map (black is 0), and the histogram of
        its elements at the last step. Below, over the steps: gradient norms, update-to-weight ratios of the parameters,
        and the clip rate; with `activations`, also the gradient norms of their outputs over the calls of a pass. The
        two lines that end highest and the two that end lowest are labelled.

        Args:
            path: where to save the picture as well, in the format of its suffix.

        Returns:
            The figure of matplotlib.

        Raises:
            ImportError: there is no matplotlib.
            ValueError: nothing has been written yet.
        """
        from .plot import draw

        if self._written is None:
            raise ValueError(
                "GradientMonitor.plot: two steps must have been recorded, or the monitor closed, "
                f"but it has seen {self._taken} steps, and records every {self._every}"
            )
        return draw(self.history, self._written, self._selection, path)

    def close(self) -> None:
        """Write what has not been written, flush the writer, and let go of model and optimizer."""
        if not self._detach.alive:
            return
        self._detach()
        with contextlib.ExitStack() as work:  # last added, first called; all are called, even if the writer raises
            work.callback(self._let_go)
            if hasattr(self._writer, "flush"):
                work.callback(self._writer.flush)
            work.callback(self._write_skipped_steps)
            for _ in self._unwritten:
                work.callback(self._write_oldest)

    def _write_skipped_steps(self) -> None:
        skipped = self._skipped_steps.take()
        if skipped is not None and (count := skipped.item()):
            self._put(Charts(self._first_step + self._taken - 1, {"skipped_steps": count}, {}))

    def _let_go(self) -> None:
        self._model, self._optimizer, self._weights, self._clippings = torch.nn.Module(), None, None, []
        self._layout = Layout(self._model, frozenset())

    def __enter__(self) -> GradientMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- Hooks ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._in_step = True
        if not self._due:
            return
        self._look_for_groups()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # A closure computes the gradients within the step: they are measured after it.
        self._gradients = None if closure is not None else self._statistics()
        if self._weights is not None:
            named = self._layout.parameters.items()
            self._weights.keep(
                {
                    name: parameter
                    for name, parameter in named
                    if self._selection.has(name) and (closure is not None or parameter.grad is not None)
                }
            )

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count and record the step, then write the one before."""
        try:
            self._finish_step(optimizer)
            if self._step_scaler is None:  # else the wrapper of `GradScaler.step` writes afterwards
                self._write_earlier()
        except BaseException:
            for monitor in _open.monitors_of(optimizer):  # PyTorch does not run their hooks after an error
                monitor._finish_step(optimizer)
            raise

    @torch.no_grad()
    def _finish_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step, and record it. Hooks run twice if `step` calls the `step` of its base class."""
        if not self._in_step:
            return
        self._in_step = False
        found_inf = getattr(optimizer, "found_inf", None)  # where the optimizer skips by itself
        try:
            self._add_up_events(found_inf)
            if self._due:
                self._unwritten.append(self._record(found_inf).to_host())
                self._due, self._recorded = False, self._taken
        finally:
            self._end_step()

    @torch.no_grad()
    def _after_skipping(self, found_inf: torch.Tensor | None) -> None:
        """Record a step that `GradScaler.step` skipped. `found_inf` is None if it skipped none."""
        if found_inf is None or not self._detach.alive:
            return
        try:
            self._add_up_events(found_inf)
            self._look_for_groups()
            self._unwritten.append(self._skipping_record(found_inf).to_host())
        finally:
            self._end_step()

    def _add_up_events(self, found_inf: torch.Tensor | None) -> None:
        if found_inf is not None:
            self._skipped_steps.add(found_inf.clamp(max=1))
        if self._clippings:
            results = [clipping.result for clipping in self._clippings]
            results = [result.to(results[0].device, non_blocking=True) for result in results]
            self._clip_results.add(results[0] if len(results) == 1 else torch.stack(results).amax(0))

    def _look_for_groups(self) -> None:
        """Notice parameters that were added to the optimizer."""
        if self._optimizer is None:
            return  # closed meanwhile
        held = _ids(self._optimizer)
        if held != self._held:
            self._held, self._layout = held, Layout(self._model, held)
            _open.listen()

    def _end_step(self) -> None:
        self._clippings = []
        self._calls.forget()
        self._count(1)

    def _count(self, steps: int) -> None:
        self._taken += steps
        self._due = self._due or self._taken % self._every == 0

    def _before_clipping(self) -> None:
        self._clippings = still_valid(self._clippings)

    def _after_clipping(
        self, parameters: list[torch.Tensor], result: torch.Tensor, statistics: GradientStatistics | None
    ) -> None:
        for clipping in self._clippings:
            clipping.accept_gradients()
        self._clippings.append(Clipping(parameters, result, statistics))

    def _after_call(self, name: str, output: Any) -> None:
        if self._due:
            self._calls.watch(name, output)

    # ---- Captured steps ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _rehearsing(self) -> Iterator[Rehearsal]:
        """In this context, steps are neither recorded nor counted: a CUDA graph captures them, or they are undone.
        Afterwards, what this yields has what they would have added."""
        names = ("_taken", "_every", "_due", "_in_step", "_clippings", "_clip_results", "_skipped_steps")
        before = {name: getattr(self, name) for name in names}
        self._due, self._every = False, sys.maxsize
        self._clip_results, self._skipped_steps = Sum(), Sum()
        rehearsal = Rehearsal()
        try:
            yield rehearsal
        finally:
            rehearsal.steps = self._taken - before["_taken"]
            rehearsal.clip_results, rehearsal.skipped_steps = self._clip_results.parts, self._skipped_steps.parts
            self.__dict__.update(before)

    def _records_one_of(self, steps: int) -> bool:
        """Return True if one of the next steps is recorded."""
        return self._due or -self._taken % self._every < steps

    def _count_replay(self, rehearsal: Rehearsal) -> None:
        """Count the steps of a graph that has been replayed; none of them is recorded."""
        if self._detach.alive:
            for part in rehearsal.clip_results:
                self._clip_results.add(part.clone())
            for part in rehearsal.skipped_steps:
                self._skipped_steps.add(part.clone())
            self._count(rehearsal.steps)

    # ---- Recording -----------------------------------------------------------------------------------------------

    def _statistics(self) -> GradientStatistics:
        parameters = self._layout.parameters
        return gradient_statistics(list(parameters.values()), list(parameters), histogram=True)

    def _record(self, skipped: torch.Tensor | None) -> Record:
        """Record of a step that was taken, or that the optimizer itself has `skipped`."""
        scale = getattr(self._optimizer, "grad_scale", None)  # where the optimizer unscales
        scaler = self._step_scaler
        return Record(
            step=self._first_step + self._taken,
            modules=self._layout.modules,
            gradients=self._gradients or self._statistics(),
            before_clipping=statistics_before(self._clippings, self._layout.names),
            updates=None if self._weights is None else self._weights.compare(),
            activations=self._calls.norms(
                scaler._get_scale_async() if scaler is not None and scaler.is_enabled() else scale
            ),
            scale=None if scale is None else torch.as_tensor(scale).clone(),
            was_called=True,
            skipped=None if skipped is None else skipped.clone(),
            # Last, because `take` resets the sums: if memory runs out above, nothing is lost.
            skipped_steps=self._skipped_steps.take(),
            clip_rate=self._take_clip_rate(),
        )

    def _take_clip_rate(self) -> torch.Tensor | None:
        results = self._clip_results.take()
        return None if results is None else results[2] / (self._taken - self._recorded)

    def _skipping_record(self, skipped: torch.Tensor) -> Record:
        """Record of a step for which the optimizer was not called."""
        return Record(
            step=self._first_step + self._taken,
            modules=self._layout.modules,
            gradients=self._statistics(),
            before_clipping=statistics_before(self._clippings, self._layout.names),
            skipped=skipped,
            skipped_steps=self._skipped_steps.take(),
        )

    def _write_earlier(self) -> None:
        """Write the records before the newest, whose numbers may still be copied to the host."""
        while len(self._unwritten) > 1:
            self._write_oldest()

    def _write_oldest(self) -> None:
        record = self._unwritten.pop(0)
        charts = record.charts(self._selection)
        if charts is None:
            return
        if "gradient_norm_total" in charts.scalars:
            self._written = record
        self._put(charts)

    def _put(self, charts: Charts) -> None:
        """Add charts to the history, and write them."""
        tags = tuple(charts.scalars)
        if self._history and self._history[-1][1] == tags:
            tags = self._history[-1][1]  # shared
        self._history.append((charts.step, tags, array("d", charts.scalars.values())))
        if len(self._history) > HISTORY:
            self._history = self._history[::2]
        if self._writer is not None:
            write(self._writer, charts if self._tags == "all" else charts.few(), self._prefix)


# ---- Checking --------------------------------------------------------------------------------------------------------


def _ids(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    return frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _check_types(model: Any, optimizer: Any, writer: Any) -> None:
    writes = writer is None or can_write(writer)
    for argument, value, is_right, expected in (
        ("model", model, isinstance(model, torch.nn.Module), "a torch.nn.Module"),
        ("optimizer", optimizer, isinstance(optimizer, torch.optim.Optimizer), "a torch.optim.Optimizer"),
        (
            "writer",
            writer,
            writes,
            "None, or have a method add_scalar(tag, value, step), or be a run of wandb or MLflow",
        ),
    ):
        if not is_right:
            raise TypeError(f"GradientMonitor: {argument} must be {expected}, but it is of type {type(value).__name__}")


def _with_hooks(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself, or the one that it wraps."""
    inner = _open.innermost(optimizer)
    if "_optimizer_step_pre_hooks" not in vars(inner):
        raise TypeError(
            f"GradientMonitor: optimizer is a {type(inner).__name__}, whose steps run no hooks; "
            "give the optimizer that it wraps"
        )
    return inner  # type: ignore[no-any-return]


def _integer(argument: str, value: Any, least: int) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"GradientMonitor: {argument} must be an integer, but it is of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"GradientMonitor: {argument} must be at least {least}, but it is {value}")
    return int(value)


def _known(argument: str, names: Any, modules: Mapping[str, torch.nn.Module]) -> list[str]:
    """Names of modules, which must exist."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(
            f"GradientMonitor: {argument} must be a sequence of module names, but it is of type {type(names).__name__}"
        )
    chosen = list(names)
    for name in chosen:
        if name not in modules:
            shown = ", ".join(repr(known) for known in list(modules)[1:11])
            more = ", ..." if len(modules) > 11 else ""
            raise ValueError(f"GradientMonitor: {argument} names {name!r}, but the model's modules are {shown}{more}")
    return chosen
