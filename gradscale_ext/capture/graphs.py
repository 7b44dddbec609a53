"""CUDA graphs, as `CapturedStep` uses them. Tests replace `graphs_of` by a stand-in for a CPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """The work of one captured call."""

    def replay(self) -> None:
        """Do the work again, on the current stream."""

    def launches(self) -> int | None:
        """Number of nodes of the graph; None if it is not known."""

    def memory(self) -> int:
        """Bytes that the pool holds, which all graphs of a step share."""

    def reset(self) -> None:
        """Free the graph."""


class Graphs(Protocol):
    """Makes graphs whose memory is in one pool."""

    def side_by_side(self) -> contextlib.AbstractContextManager[None]:
        """In this context, work runs on the stream on which graphs are captured, after the current stream's work."""

    def capture(self, call: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Graph, Any]:
        """Capture the work of a call; nothing is executed. Returns the graph, and what the call returns."""


class _CudaGraph:
    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._launches: int | None = None

    def replay(self) -> None:
        self.graph.replay()

    def finish(self) -> None:
        """Count the nodes, and make the graph ready for its first replay."""
        count = ctypes.c_size_t()
        get_nodes = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes
        failed = get_nodes(ctypes.c_void_p(self.graph.raw_cuda_graph()), None, ctypes.byref(count))
        self._launches = None if failed else count.value
        self.graph.instantiate()

    def launches(self) -> int | None:
        return self._launches

    def memory(self) -> int:
        snapshot = torch.cuda.memory.memory_snapshot(self.graph.pool())  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in snapshot)

    def reset(self) -> None:
        self.graph.reset()


class CudaGraphs:
    """Graphs of one device."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream and the memory pool."""
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Run work on the stream on which graphs are captured."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def capture(self, call: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Graph, Any]:
        """Capture the work of a call."""
        graph = _CudaGraph()
        for generator in generators:
            if generator.device.type == "cuda":
                graph.graph.register_generator_state(generator)
        # Work of other threads does not end the capture.
        with torch.cuda.graph(graph.graph, self._pool, self._stream, capture_error_mode="thread_local"):
            result = call()
        graph.finish()
        return graph, result


def graphs_of(device: torch.device) -> Graphs | None:
    """What captures the steps of a device; None where steps are called as they are."""
    return CudaGraphs(device) if device.type == "cuda" else None
