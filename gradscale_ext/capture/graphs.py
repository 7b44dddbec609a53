"""CUDA graphs, as `CapturedStep` uses them. Tests replace `graphs_of` by a stand-in for a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

_WAITS = "called a synchronizing CUDA operation"


class Graph(torch.cuda.CUDAGraph):
    """The work of one captured call. Made with `keep_graph=True`."""

    def finish(self) -> None:
        """Count the nodes, and make the graph ready for its first replay."""
        count = ctypes.c_size_t()
        get_nodes = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes
        failed = get_nodes(ctypes.c_void_p(self.raw_cuda_graph()), None, ctypes.byref(count))
        self._launches = None if failed else count.value
        self.instantiate()

    def launches(self) -> int | None:
        """Number of nodes of the graph; None if it is not known."""
        return self._launches

    def memory(self) -> int:
        """Bytes that the pool holds, which all graphs of a step share."""
        snapshot = torch.cuda.memory.memory_snapshot(self.pool())  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in snapshot)


class Graphs:
    """Makes the graphs of one device, whose memory is in one pool."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream and the memory pool."""
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def side_by_side(self) -> Iterator[list[str]]:
        """In this context, work runs on the stream on which graphs are captured, after the current stream's work.
        Afterwards, the list has the lines that waited for the device, as far as they were noticed."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        waits: list[str] = []
        try:
            with torch.cuda.stream(self._stream), _noting_waits(waits):
                yield waits
        finally:
            current.wait_stream(self._stream)

    def capture(self, call: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Graph, Any]:
        """Capture the work of a call; nothing is executed. Returns the graph, and what the call returns."""
        graph, failure = Graph(keep_graph=True), None
        own = [generator for generator in generators if generator.device.type == "cuda"]
        for generator in own:
            graph.register_generator_state(generator)
        current = torch.cuda.current_stream(self._stream.device)
        try:
            # Work of other threads does not end the capture.
            with (
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
                _overriding_stale_streams(),
            ):
                try:
                    result = call()
                except BaseException as error:
                    failure = error  # ending the capture raises another error
                    raise
        except BaseException as error:
            # PyTorch stays on the other stream then, its generators stay in the state of a capture, and the allocator
            # of PyTorch 2.11 does, too (pytorch/pytorch#180395). Other versions raise, because it has ended already.
            torch.cuda.set_stream(current)
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            for generator in (torch.cuda.default_generators[self._stream.device.index], *own):
                generator.graphsafe_set_state(generator.clone_state())
            raise failure or error from None
        graph.finish()
        return graph, result


@contextlib.contextmanager
def _overriding_stale_streams() -> Iterator[None]:
    """In this context, graphs of autograd that modules keep, as torch.nn.utils.weight_norm does, may be captured."""
    override = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)  # since PyTorch 2.13
    if override is not None:
        override(True)
    try:
        yield
    finally:
        if override is not None:
            override(False)


@contextlib.contextmanager
def _noting_waits(waits: list[str]) -> Iterator[None]:
    """Note where the host waits for the device. Other warnings are issued afterwards."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", _WAITS)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if re.match(_WAITS, str(warning.message)):
            waits.append(f"{warning.filename}:{warning.lineno}")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def graphs_of(device: torch.device) -> Graphs | None:
    """What captures the steps of a device; None where steps are called as they are."""
    return Graphs(device) if device.type == "cuda" else None


@contextlib.contextmanager
def seeming_to_capture() -> Iterator[None]:
    """In this context, PyTorch answers questions about a capture as during one, also on a CPU."""

    def is_available() -> bool:
        asks = sys._getframe(1).f_code.co_names
        return was_available() or "is_current_stream_capturing" in asks or "_cuda_isCurrentStreamCapturing" in asks

    was_available = torch.cuda.is_available
    capturing = "_cuda_isCurrentStreamCapturing"
    with contextlib.ExitStack() as work:
        for owner, name, answer in (
            (torch.cuda, "is_available", is_available),
            (torch._C, capturing, lambda: True),
            (torch.cuda.graphs, capturing, lambda: True),
            (torch.cuda.Stream, "is_capturing", lambda stream: True),
            # Optimizers that count on the host raise during a capture. Those that are diagnosed have findings instead.
            (torch.optim.Optimizer, "_cuda_graph_capture_health_check", lambda self: None),
            (torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None),
        ):
            if hasattr(owner, name):
                work.enter_context(mock.patch.object(owner, name, answer))
        yield


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Turn off the cache of autocast, so that a graph and other code do not share converted weights."""
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()


@contextlib.contextmanager
def capturable(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Let fused optimizers be captured: their step counts are on the device, but PyTorch asks for `capturable`, too."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    wanting = [group for group in groups if group.get("fused") and group.get("capturable") is False]
    for group in wanting:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in wanting:
            group["capturable"] = False
