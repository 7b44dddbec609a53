"""A learner step that is captured as a CUDA graph and replayed."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .. import _context, _numbers
from ..diagnosis.lines import LIBRARY_PATHS, Location, users_line
from ..monitor._kept import Rehearsal
from ..monitor.monitor import GradientMonitor
from . import graphs
from .arguments import (
    Arguments,
    Signature,
    each_tensor,
    flatten,
    like,
    read,
    result,
    text_of_signature,
    what_changes,
)
from .audit import AuditInfo, GraphInfo, beyond_noise, compare, is_written, next_audit
from .checks import Refusals, changed_argument, changed_option, hook_problems, kept_graph_problems, mark_kept_graphs
from .contents import Contents
from .diagnosis import diagnose_capture
from .guards import Guards
from .hooks import rehearsing, running
from .record import Record, differences
from .state import Item, State, memory_of, with_gradients

_SIGNATURES_PER_GRAPH = 4
"""How many signatures of calls, for each graph that is allowed, are remembered until they come again."""

_OFTEN = 3
"""How often something may be replaced between the calls without a warning."""


class _Refused(RuntimeError):
    """A call that no graph can make. If the step has run already, with its result."""

    def __init__(self, reason: object, *results: Any) -> None:
        super().__init__(f"CapturedStep: {reason}")
        self.results = results


@dataclass
class _Captured:
    """A graph, the memory of its arguments and results, and what it relies on."""

    signature: Signature
    inputs: list[torch.Tensor]
    graph: graphs.Graph
    result: Any
    """What the step returned, with the memory that a replay writes to."""
    guards: Guards
    state: list[Item]
    """The tensors of the state, without gradients."""
    written: list[Item]
    """The ones that steps may write to."""
    rehearsals: list[tuple[GradientMonitor, Rehearsal]]
    """Monitors, and what a replay adds to each."""
    record: Record
    """What the step did when it was captured. Keeps the memory that the graph reads."""
    number: int
    """Of this graph, over all graphs of the step."""
    next_audit: int
    replays: int = 0
    last_audit: int = 0
    """The last replay that agreed with a plain step; 0 if there was none."""


class CapturedStep:
    """A learner step that runs as one CUDA graph from its fourth call on, and is audited against the step.

    On a GPU the steps of reinforcement learning take most of their time to launch small kernels. A graph launches all
    of them at once. A replay runs no Python: prints, appends and counters stop. On a CPU the step is called as it is.

    1. *What is named is guarded at each call*: the arguments, the `state`, and the modes of PyTorch.
    2. *Everything else that the step's Python reads is a constant of the graph.* Pass what changes as an argument, or
       call `reset()` after a change. Tensors that the graph reads may be written to; the graph keeps their memory.
    3. *The graph is audited*: at its first `verify` replays, then at replays 3, 5, 11, 23, 47 and so on, and about
       every `audit`-th one, always at primes. An audit compares a plain step with a replay, from the same state on the
       same batch: the operators with their numbers, shapes and memory, then results and state. A difference raises, and
       the error names the line and the number. What the plain step did is kept.

    Each call trains once, on its own batch. The first `warmup` calls are plain calls, in which optimizers make their
    state. The next call is captured, which executes nothing, and replayed. Code that a graph cannot repeat raises an
    error, which names the line and what to write instead.

    Args:
        step: makes one learner step: forward pass, loss, `zero_grad`, backward pass, clipping, optimizer, target
            network. Arguments and results are tensors, numbers, strings, bools, None, dtypes and devices, in lists,
            tuples, dicts, dataclasses and registered pytree nodes.
        *state: what the step changes: modules, optimizers, schedulers, tensors, generators, and other objects with
            `state_dict` and `load_state_dict`; lists, tuples and dicts of them. Generators of the device are
            registered with the graph. Draw numbers of the CPU, NumPy and Python outside of the step.
        warmup: number of plain calls before the first capture, at least 1, and at least 11 with
            DistributedDataParallel.
        verify: number of first replays of each graph that are audited. 0: none.
        audit: the most replays between two audits. 0: none but the first ones.
        max_graphs: number of graphs. A call whose arguments have other shapes, dtypes, strides or constants, in another
            mode (`no_grad`, autocast), or with modules in another mode (`eval()`) has a graph of its own, after one
            plain call. All graphs share their memory.
        copy_outputs: whether results are copies, which belong to the caller. If False, the next call overwrites them.
        fallback: "eager": call the step as it is from now on, with a warning, where an error would be raised.
        hooks: "raise" an error for hooks on modules, parameters and optimizers, which a replay does not run, or
            "ignore" them. A `GradientMonitor` is allowed: the steps that it records are plain calls.

    Raises:
        TypeError, ValueError: an argument is wrong; tensors of the state are on several devices.
        RuntimeError: the step cannot be captured, or a replay would differ: see `diagnose_capture`, which finds the
            reasons without a GPU. A number in `param_groups` that changes raises, because a graph keeps the number
            that was captured: schedules need ``lr=torch.tensor(1e-3, device=device)``.

    Arguments are copied into the graph's memory: tensors of the device and pinned ones without waiting. Do not change a
    pinned tensor before the copy has been made. Capturing and verifying run the step's Python once more: its effects
    outside of `state`, such as a print, happen again. A gradient that was read from `p.grad` is overwritten by the next
    replay.

    Related names: CUDA graphs, `torch.cuda.graph`, `make_graphed_callables`, `CudaGraphModule` (TensorDict).

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.Adam(model.parameters(), fused=True)
    >>> def step(x):
    ...     loss = model(x).square().mean()
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    ...     return {"loss": loss}
    >>> update = CapturedStep(step, model, optimizer)
    >>> sorted(update(torch.ones(4, 2)))
    ['loss']
    """

    @_context.in_eager_mode("CapturedStep: make it outside of a function with fullgraph=True")
    def __init__(
        self,
        step: Callable[..., Any],
        *state: Any,
        warmup: int = 3,
        verify: int = 2,
        audit: int = 1024,
        max_graphs: int = 4,
        copy_outputs: bool = True,
        fallback: Literal["eager"] | None = None,
        hooks: Literal["raise", "ignore"] = "raise",
    ) -> None:
        """Keep the step. Nothing is called yet."""
        if not callable(step):
            raise TypeError(f"CapturedStep: step must be callable, but it is of type {type(step).__name__}")
        if fallback not in (None, "eager"):
            raise ValueError(f"CapturedStep: fallback must be None or 'eager', but it is {fallback!r}")
        if hooks not in ("raise", "ignore"):
            raise ValueError(f"CapturedStep: hooks must be 'raise' or 'ignore', but it is {hooks!r}")
        _numbers.check_flag("CapturedStep: copy_outputs", copy_outputs)
        options = {
            "warmup": _numbers.integer("CapturedStep: warmup", warmup, 1),
            "verify": _numbers.integer("CapturedStep: verify", verify, 0),
            "audit": _numbers.integer("CapturedStep: audit", audit, 0),
            "max_graphs": _numbers.integer("CapturedStep: max_graphs", max_graphs, 1),
            "copy_outputs": copy_outputs,
            "fallback": fallback,
            "hooks": hooks,
        }
        self.__setstate__({"step": step, "given": state, "options": options})
        if self._state.is_distributed() and warmup < 11:
            raise ValueError(
                "CapturedStep: warmup must be at least 11 with DistributedDataParallel, which sets up its buckets and "
                f"statistics in the first calls, but it is {warmup}"
            )
        _ = self._maker  # finds the device of the state, and raises an error if there are several

    def __getstate__(self) -> dict[str, Any]:
        return {"step": self._step, "given": self._given, "options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._step, self._given, self._options = state["step"], state["given"], state["options"]
        self._lock = threading.Lock()
        self._num_plain = 0
        self._known: dict[Signature, Any] = {}
        """By signature of a call: what had changed at the last plain call, compared with the newest graph."""
        self._captured: list[_Captured] = []
        self._replaced: Counter[str] = Counter()
        """How often something has been replaced, which has cost a graph."""
        self._warned: set[str] = set()
        self._waits: list[str] = []
        """Lines of the last plain call that waited for the device."""
        self._num_captured = 0
        self._audits: deque[AuditInfo] = deque(maxlen=100)

    # These are computed on demand: while an object that holds this step is copied or loaded, it has no attributes yet.

    @functools.cached_property
    def _state(self) -> State:
        return State("CapturedStep", self._given)

    @functools.cached_property
    def _device(self) -> torch.device:
        return self._state.device()

    @functools.cached_property
    def _maker(self) -> graphs.Graphs | None:
        return graphs.graphs_of(self._device)

    # ---- What it is --------------------------------------------------------------------------------------------------

    @property
    def is_captured(self) -> bool:
        """True if there is a graph. False on a CPU, and before the first capture."""
        return bool(self._captured)

    @property
    def graphs(self) -> list[GraphInfo]:
        """For each graph `signature` (shapes and dtypes of the arguments, and the constants), `launches` (kernels,
        copies and fills of a replay; None if not known) and `memory` (bytes of the pool, which all graphs share)."""
        return [
            GraphInfo(text_of_signature(one.signature), one.graph.launches(), one.graph.memory())
            for one in self._captured
        ]

    @property
    def audits(self) -> list[AuditInfo]:
        """The last 100 comparisons with a plain step: `graph`, `replay` and `largest_difference`."""
        return list(self._audits)

    def reset(self) -> None:
        """Free the graphs. The next call is captured again."""
        for captured in self._captured:
            captured.graph.reset()
        self._captured = []

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedStep:
        """Leave out the graphs. A step that is a function keeps its state; copying that would separate them."""
        copied = memo[id(self)] = object.__new__(type(self))
        step = copy.deepcopy(self._step, memo)
        given = self._given if step is self._step else copy.deepcopy(self._given, memo)
        copied.__setstate__({"step": step, "given": given, "options": self._options})
        return copied

    def __repr__(self) -> str:
        name = getattr(self._step, "__qualname__", type(self._step).__name__)
        return f"CapturedStep({', '.join([name, *self._state.roots])}, graphs={len(self._captured)})"

    # ---- Calls -------------------------------------------------------------------------------------------------------

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make one learner step. Inside of another captured step, this becomes a part of the other one's graph."""
        if self._maker is None or running.owner not in (None, self):
            return self._step(*args, **kwargs)
        return self._by_graph(args, kwargs)

    @_context.in_eager_mode("CapturedStep: call it outside of a function with fullgraph=True, and compile its modules")
    def _by_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._running():
            arguments = read(args, kwargs, self._device)
            try:
                return self._call(arguments)
            except _Refused as error:
                if self._options["fallback"] is None:
                    raise
                _warn(f"{error}\nfallback='eager': from now on the step is called as it is.")
                self.reset()
                self._maker = None
                if error.results:
                    return error.results[0]
                args, kwargs = arguments.build()
                return self._step(*args, **kwargs)

    def plain(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the step as it is. Allowed at any time: graphs and plain calls have one state."""
        if self._maker is None or running.owner not in (None, self):
            return self._step(*args, **kwargs)
        with self._running():
            return self._plain(read(args, kwargs, self._device))

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """The context of a call. Raises RuntimeError for another call in it, and for what no graph can do."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "CapturedStep: the step is already running, in another thread or because it calls itself"
            )
        before, running.owner = running.owner, running.owner or self
        try:
            yield
        except _Refused as error:
            raise RuntimeError(str(error)) from error.__cause__
        finally:
            running.owner = before
            self._lock.release()

    def _call(self, arguments: Arguments) -> Any:
        if self._options["hooks"] == "raise" and arguments.watcher:
            raise _Refused(
                f"{arguments.watcher} is active, but a replay makes no calls that it could see; inside of it, write "
                "update.plain instead of update"
            )
        captured, changed = self._matching(arguments.signature)
        if captured is None:
            if self._num_plain < self._options["warmup"] or self._known.get(arguments.signature) != changed:
                returned = self._plain(arguments)
                self._remember(arguments, changed)
                return returned
            captured = self._capture(arguments)
        if any(monitor._records_one_of(rehearsal.steps) for monitor, rehearsal in captured.rehearsals):
            return self._plain(arguments)
        if captured.replays + 1 == captured.next_audit:
            return self._audit(captured, arguments)
        returned = self._replay(captured, arguments)
        for monitor, rehearsal in captured.rehearsals:
            monitor._count_replay(rehearsal)
        return returned

    def _remember(self, arguments: Arguments, changed: Any) -> None:
        """Let the next call with this signature be captured. Warn, and forget, if too many have not come again."""
        if len(self._known) == _SIGNATURES_PER_GRAPH * self._options["max_graphs"]:
            what = what_changes(list(self._known)[-self._options["max_graphs"] :], arguments)
            text = (
                f"{len(self._known)} signatures of arguments came, and each needs a plain call and then a graph: {what}"
            )
            self._warn_once(text, key="signatures")
            self._known.clear()
        self._known[arguments.signature] = changed

    def _plain(self, arguments: Arguments) -> Any:
        if not self._num_plain:
            mark_kept_graphs(self._state)
        returned = self._run(arguments)
        self._num_plain += 1
        return returned

    def _run(self, arguments: Arguments, *contexts: contextlib.AbstractContextManager[Any]) -> Any:
        """Run the step next to the current stream."""
        assert self._maker is not None
        args, kwargs = arguments.build()
        with self._maker.side_by_side() as self._waits, contextlib.ExitStack() as work:
            for context in contexts:
                work.enter_context(context)
            returned = self._step(*args, **kwargs)
        flatten(returned, result)
        returned = self._owned(each_tensor(torch.Tensor.detach, returned))
        if name := arguments.changed_in((args, kwargs)):
            raise _Refused(changed_argument(name), returned)
        return returned

    def _owned(self, returned: Any) -> Any:
        """What the caller gets: copies, because later calls write to results that share memory with the state."""
        return each_tensor(torch.Tensor.clone, returned) if self._options["copy_outputs"] else returned

    def _replay(self, captured: _Captured, arguments: Arguments) -> Any:
        if captured.inputs:
            torch._foreach_copy_(captured.inputs, arguments.tensors, non_blocking=True)
        captured.graph.replay()
        captured.replays += 1
        captured.guards.compiled.set_results()
        return self._owned(captured.result)

    def _matching(self, signature: Signature) -> tuple[_Captured | None, Any]:
        """The graph for this signature and the state as it is; and what has changed, if another is needed."""
        candidates = [captured for captured in reversed(self._captured) if captured.signature == signature]
        for captured in candidates:
            if captured.guards.compiled.hold():
                return captured, None
        changed: list[Any] = []
        for captured in candidates:
            if not (changes := captured.guards.changes()):
                return captured, None
            for change in changes:
                if change.kind in ("number", "rate"):
                    raise _Refused(changed_option(change, self._state))
            if replaced := next((change.name for change in changes if change.kind == "identity"), None):
                self._drop(captured, replaced)
            else:
                changed += [(change.name, str(change.now)) for change in changes]
        return None, changed

    def _drop(self, captured: _Captured, replaced: str = "") -> None:
        """Free a graph. If something has been replaced, which it read, the next call is plain, and another graph is
        captured then."""
        captured.graph.reset()
        self._captured = [one for one in self._captured if one is not captured]
        if replaced:
            self._known.pop(captured.signature, None)
            self._replaced[replaced] += 1
            if self._replaced[replaced] == _OFTEN:
                self._warn_once(
                    f"{replaced} has been replaced between the calls {_OFTEN} times. Each time another graph is "
                    "captured, which is slower than plain calls; write to the same tensor with copy_()"
                )

    def _warn_once(self, message: str, key: str = "") -> None:
        if (key or message) not in self._warned:
            self._warned.add(key or message)
            _warn(f"CapturedStep: {message}")

    # ---- Capturing ---------------------------------------------------------------------------------------------------

    def _capture(self, arguments: Arguments) -> _Captured:
        assert self._maker is not None
        self._refuse_beforehand(arguments)
        inputs = [like(tensor) for tensor in arguments.tensors]
        args, kwargs = arguments.build(inputs)
        refusals = Refusals(self._step, self._state, arguments, inputs, (args, kwargs))
        before = refusals.before
        record = Record(inputs, (saved.item.value for saved in before.tensors))

        def step() -> Any:
            with graphs.seeming_to_capture(), record.recording():
                return self._step(*args, **kwargs)

        try:
            with (
                graphs.without_autocast_cache(),
                graphs.capturable(self._state.optimizers().values()),
                rehearsing(self._state) as rehearsals,
            ):
                graph, returned = self._maker.capture(step, self._state.generators())
            record.finish()
            flatten(returned, result)
            for problem in refusals.problems(record, returned):
                if problem.is_certain:
                    raise _Refused(problem)
                self._warn_once(str(problem), key=problem.cause.partition(" (")[0])
            gradients = before.gradients()
            # Some operators do not say what they write to.
            written = {memory_of(saved.alias) for saved in before.tensors if saved.is_written}
            written_keys = {*record.written, *(memory._cdata for memory in written if memory is not None)}
        except BaseException as error:
            before.restore()
            self.reset()  # a capture that fails leaves other states in PyTorch's generators
            if isinstance(error, _Refused | TypeError) or not isinstance(error, Exception) or _is_of_step(error):
                raise
            raise self._explained(error, arguments) from error
        before.restore()
        state = [saved.item for saved in before.tensors if saved.item.role != "gradient"]
        captured = _Captured(
            signature=arguments.signature,
            # The step may have called requires_grad_() on an argument, which a copy to it would not accept.
            inputs=[tensor.detach() for tensor in inputs],
            graph=graph,
            result=each_tensor(torch.Tensor.detach, returned),
            guards=Guards(before, gradients),
            state=state,
            written=[item for item in state if is_written(item, written_keys)],
            rehearsals=rehearsals,
            record=record,
            number=self._num_captured,
            next_audit=self._audit_after(0),
        )
        self._num_captured += 1
        self._captured.append(captured)
        return captured

    def _audit_after(self, replay: int) -> int:
        return next_audit(replay, self._options["verify"], self._options["audit"])

    def _refuse_beforehand(self, arguments: Arguments) -> None:
        if len(self._captured) == self._options["max_graphs"]:
            what = what_changes([one.signature for one in self._captured], arguments)
            count = "is 1 graph" if len(self._captured) == 1 else f"are {len(self._captured)} graphs"
            raise _Refused(f"there {count} already (max_graphs), and {what}, or raise max_graphs")
        if name := self._state.uninitialized():
            raise _Refused(f"{name} is uninitialized; call its lazy module once before")
        hooks = hook_problems(self._state) if self._options["hooks"] == "raise" else ()
        for problem in (*hooks, *kept_graph_problems(self._state)):
            raise _Refused(problem)
        if self._waits:  # known beforehand, because a capture that fails leaves traces in PyTorch
            raise _Refused(
                f"the step waits for the device at {', '.join(dict.fromkeys(self._waits))}, which cannot be captured"
                f"{self._diagnosed(arguments)}"
            )

    def _explained(self, error: Exception, arguments: Arguments) -> _Refused:
        line, message = _line_of(error), str(error).partition("\n")[0]
        at = f" at {line}: {line.source}" if line else ""
        return _Refused(f"the step cannot be captured{at}: {message}{self._diagnosed(arguments)}")

    def _diagnosed(self, arguments: Arguments) -> str:
        """What `diagnose_capture` finds, for an error message."""

        def step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._step(*args, **kwargs)

        step.__wrapped__ = self._step  # type: ignore[attr-defined]  # whose lines messages name
        try:
            diagnosis = diagnose_capture(step, [arguments.build()] * 2, *self._given)
        except Exception:  # the error that is being reported
            return ""
        return "" if diagnosis.ok else f"\n{diagnosis}"

    # ---- Audits ------------------------------------------------------------------------------------------------------

    def _audit(self, captured: _Captured, arguments: Arguments) -> Any:
        """Replay, and run a plain step on the same batch from the same state. Keeps what the plain step did."""
        copy_state = functools.partial(Contents, captured.written, self._state.generators())
        begin = copy_state()
        replayed = each_tensor(torch.Tensor.clone, self._replay(captured, arguments))
        after_replay = copy_state()
        begin.restore()
        record = Record(arguments.tensors, (item.value for item in with_gradients(captured.state)))
        try:
            with graphs.without_autocast_cache():
                returned = self._run(arguments, graphs.seeming_to_capture(), record.recording())
            record.finish()
        except BaseException:  # the replay did not raise
            self._drop(captured)
            raise
        captured.guards.keep_gradients()
        different = compare(replayed, returned, after_replay)
        largest = max(different.values(), default=0.0)
        self._audits.append(AuditInfo(captured.number, captured.replays, largest))
        wrong, replaced = self._difference(captured, record)
        if different and not wrong:
            end = copy_state()
            begin.restore()
            noise = compare(replayed, self._replay(captured, arguments), after_replay)
            captured.replays -= 1
            end.restore()
            if beyond := beyond_noise(different, noise):
                much = "" if beyond[1] == math.inf else f" by {beyond[1]:.3g}"
                wrong = f"in {beyond[0]}{much}"
        if wrong:
            self._drop(captured)
            found = self._diagnosed(arguments)
            last = f"replay {captured.last_audit} agreed" if captured.last_audit else "no replay of it agreed before"
            raise _Refused(
                f"replay {captured.replays} of this graph differs from a plain step, {wrong}; {last}; the plain step "
                "was kept. What a step reads apart from its arguments and state is a constant of the graph: pass what "
                f"changes as an argument, or call reset() after a change{found}",
                returned,
            )
        if replaced:
            self._drop(captured, replaced)
        captured.last_audit = captured.replays
        captured.next_audit = self._audit_after(captured.replays)
        return returned

    def _difference(self, captured: _Captured, record: Record) -> tuple[str, str]:
        """How the operators of a plain step differ from the captured ones, and which tensor has been replaced since the
        last audit, after which the graph is right only if the results are; each empty if there is nothing."""
        if reads := record.reads_of(captured.record):
            size = reads[0][1]
            return f"which reads a tensor of shape {list(size)} that the captured step made and left somewhere", ""
        found = list(differences(captured.record, record, self._device))
        if not found:
            return "", ""
        first = next((problem for problem in found if problem.code != "host_copy"), found[0])
        if first.key == "replaced" and captured.last_audit:
            return "", f"what the step reads at {first.location}"
        return f"because the step has changed since it was captured: {first.text}", ""


def _is_of_step(error: BaseException) -> bool:
    """True for errors that have nothing to do with the capture: the code of the user raises them, not PyTorch."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return not (isinstance(error, RuntimeError) or innermost.filename.startswith(LIBRARY_PATHS))


def _line_of(error: BaseException) -> Location | None:
    """The user's innermost line that an error passed."""
    own = [at for at in traceback.extract_tb(error.__traceback__) if not at.filename.startswith(LIBRARY_PATHS)]
    return Location(own[-1].filename, own[-1].lineno or 0) if own else None


def _warn(message: str) -> None:
    """Warn at the line of the user's call."""
    line = users_line() or Location("gradscale_ext", 0)
    warnings.warn_explicit(message, UserWarning, line.file, line.line)
