"""The backward graph of a loss: its nodes, the gradients through them, and where a gradient is lost."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from .._distributed import whole
from .fsdp import Sharded

#: Name of the nodes of `torch.utils.checkpoint.CheckpointFunction` and of its copies in other libraries.
_REENTRANT = "CheckpointFunctionBackward"
#: Number of nodes up to which a graph can be freed by recursion.
DEEP = 5000
_FREED = "backward through the graph a second time"


def gradient_function(tensor: torch.Tensor) -> Node | None:
    """`tensor.grad_fn`; None for views where autograd raises."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def leaf_of(node: Node) -> torch.Tensor | None:
    """The leaf whose gradient a node adds up; None for a node in the middle of a graph."""
    return node.variable if node.name() == "torch::autograd::AccumulateGrad" else None  # type: ignore[attr-defined]


def metadata(node: Node) -> dict[Any, Any]:
    """Python data attached to a node, which lives as long as the graph."""
    return node.metadata  # type: ignore[return-value]


def walk(root: Node | None, stop: Callable[[Node], bool] = lambda node: False) -> list[Node]:
    """Nodes that are reachable from the root, each after all nodes that send it a gradient; the root is the first.

    The search does not continue behind a node for which `stop` is true, except behind the root.
    """
    finished: list[Node] = []
    seen = set() if root is None else {root}
    path = [] if root is None else [(root, iter(root.next_functions))]
    while path:
        node, edges = path[-1]
        following = next((n for n, _ in edges if n is not None and n not in seen), None)
        if following is None:
            finished.append(node)
            path.pop()
        else:
            seen.add(following)
            path.append((following, iter(() if stop(following) else following.next_functions)))
    if len(finished) > DEEP:
        free_without_recursion(finished)
    return finished[::-1]


def free_without_recursion(nodes: Iterable[Node]) -> None:
    """Make nodes of a graph of any depth safe to free, whichever of its tensors lives longest."""
    for node in nodes:
        if not is_freed_without_recursion(node):
            metadata(node)[_Behind] = _Behind([following for following, _ in node.next_functions if following])


def is_freed_without_recursion(node: Node) -> bool:
    """Return True if `free_without_recursion` was called for the node."""
    return _Behind in metadata(node)


class _Orphans(threading.local):
    """Nodes that a thread is about to release."""

    nodes: list[Node] | None = None


class _Behind:
    """Metadata of a node: keeps the next nodes alive until the node is freed, and then releases them one by one.

    PyTorch recursively frees nodes that Python has accessed, and overflows the stack at a depth of some 10 000.
    """

    __slots__ = ("nodes",)
    _orphans = _Orphans()

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    def __del__(self) -> None:
        orphans = self._orphans
        if orphans.nodes is not None:
            orphans.nodes += self.nodes
            return
        orphans.nodes = self.nodes
        while orphans.nodes:
            orphans.nodes.pop()
        orphans.nodes = None


def is_reentrant(node: Node) -> bool:
    """Return True for a node whose backward pass records and differentiates a graph of its own."""
    return _REENTRANT in node.name()


def leaves(nodes: Iterable[Node]) -> list[torch.Tensor]:
    """The leaf tensors of a graph."""
    return [leaf for node in nodes if (leaf := leaf_of(node)) is not None]


class Amount(NamedTuple):
    """Size of the gradient at one place."""

    largest: float
    """Largest magnitude; NaN where an element is."""
    numel: int
    tiny: float
    """Smallest normal number of the dtype."""


#: Amount of a gradient that is None. The amount of an empty tensor has another `tiny`.
NOTHING = Amount(0.0, 0, 0.0)


def amount(gradient: torch.Tensor | None) -> Amount:
    """Measure a gradient. Waits for its device."""
    if gradient is None:
        return NOTHING
    values = whole(gradient.detach())
    if values.layout != torch.strided:
        values = values.coalesce().values()
    largest = values.abs().amax().item() if values.numel() else 0.0
    return Amount(largest, gradient.numel(), torch.finfo(values.dtype).tiny)


class Hop(NamedTuple):
    """One node's effect on a gradient, along one of its edges."""

    node: Node
    """The node that the gradient came through."""
    edge: int
    """Index in `node.next_functions` of the node that it was sent to."""
    arrived: list[Amount]
    """Gradients of the node's results."""
    sent: Amount
    """Gradient sent along the edge."""

    @property
    def is_zero(self) -> bool:
        """True if the gradient was zero when it arrived."""
        return self.sent.largest == 0 and all(arrived.largest == 0 for arrived in self.arrived)

    @property
    def cancelled(self) -> bool:
        """True if nonzero elements added up to zero, as for a bias before a normalization."""
        reduces = self.edge in _ADDING_UP.get(operation(self.node), ())
        return reduces and self.sent.largest == 0 and self.sent.numel < sum(arrived.numel for arrived in self.arrived)

    @property
    def other_factors(self) -> list[torch.Tensor]:
        """Leaves by which the node multiplies the operand at `edge`: the other operand, or its factors."""
        edges = _FACTORS.get(operation(self.node), ())
        others = [
            origin
            for edge in (edges if self.edge in edges else ())
            if edge != self.edge and (origin := _origin(self.node.next_functions[edge][0])) is not None
        ]
        products = [
            origin
            for node in others
            for edge in _FACTORS.get(operation(node), ())
            if (origin := _origin(node.next_functions[edge][0])) is not None
        ]
        return leaves([*others, *products])


def _saved_result(node: Node) -> torch.Tensor | None:
    """The saved result of a ReLU; None for other functions, and where reading it would recompute it."""
    try:
        return getattr(node, "_saved_result", None)
    except RuntimeError:
        return None


class Stop(NamedTuple):
    """Node of a function with a flat side, such as ReLU, that let no gradient through for some units."""

    node: Node
    units: torch.Tensor
    """True for units that sent no gradient on although one arrived, and for units of a ReLU whose results are all 0."""
    samples: int
    """Number of times that each unit was computed."""


def _origin(node: Node | None) -> Node | None:
    """The leaf, or operation on several operands, behind views, casts, activations and other unary operations."""
    while node is not None and leaf_of(node) is None:
        operands = [operand for operand, _ in node.next_functions if operand is not None]
        if len(operands) != 1:
            return node
        node = operands[0]
    return node


class Flow:
    """Gradients that each node receives and sends on in a backward pass that runs in this context."""

    def __init__(self, nodes: list[Node], unit_counts: Container[int] = ()) -> None:
        """Watch the nodes of a graph. Dimensions whose size is in `unit_counts` are taken as the units of a layer."""
        self._unit_counts = unit_counts
        self._stops: dict[Node, list[Stop]] = {}
        self._order = {node: position for position, node in enumerate(nodes)}
        self._leaves = {id(leaf): node for node in nodes if (leaf := leaf_of(node)) is not None}
        self._sources: dict[Node, list[tuple[Node, int]]] = {node: [] for node in nodes}
        for node in nodes:
            for edge, (following, _) in enumerate(node.next_functions):
                if following is not None:
                    self._sources[following].append((node, edge))
        self._arrived: dict[Node, list[Amount]] = {}
        self._sent: dict[Node, list[Amount]] = {}
        self.is_freed = False
        """True if `backward()` had already freed the graph, so that nothing was observed."""

    def __enter__(self) -> Flow:
        inner = self._order.keys() - self._leaves.values()
        self._hooks = [node.register_hook(functools.partial(self._note, node)) for node in inner]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(
        self, node: Node, sent: tuple[torch.Tensor | None, ...], arrived: tuple[torch.Tensor | None, ...]
    ) -> None:
        self._arrived[node] = [amount(gradient) for gradient in arrived]
        self._sent[node] = [amount(gradient) for gradient in sent]
        if operation(node) in _FLAT_ON_ONE_SIDE:
            self._stops[node] = list(self._stops_at(node, sent[0], arrived[0]))

    def _stops_at(self, node: Node, sent: torch.Tensor | None, arrived: torch.Tensor | None) -> Iterator[Stop]:
        if type(sent) is not torch.Tensor or type(arrived) is not torch.Tensor or sent.shape != arrived.shape:
            return
        result = _saved_result(node)
        for dim in range(1, sent.dim()):
            if sent.shape[dim] in self._unit_counts:
                others = [other for other in range(sent.dim()) if other != dim]
                stopped = arrived.ne(0).any(others)
                if result is not None:  # a square after the ReLU sends no gradient to results of 0
                    stopped |= result.eq(0).all(others)
                yield Stop(node, stopped & sent.eq(0).all(others), sent.numel() // sent.shape[dim])

    def reaches(self, leaf: torch.Tensor) -> bool:
        """Return True if the graph leads to a leaf. A reentrant checkpoint hides the leaves used within it."""
        return id(leaf) in self._leaves

    def _hops(self, leaf: torch.Tensor, goes_on: Callable[[Hop], bool]) -> list[Hop]:
        """Hops on the gradient's way to a leaf, root first.

        The search continues from a hop towards the root if `goes_on(hop)`.
        """
        return self._hops_to([self._leaves[id(leaf)]], goes_on) if self.reaches(leaf) else []

    def _hops_to(self, waiting: list[Node], goes_on: Callable[[Hop], bool]) -> list[Hop]:
        hops: list[Hop] = []
        seen = set(waiting)
        while waiting:
            for source, edge in self._sources[waiting.pop()]:
                if source in self._sent:
                    hops.append(Hop(source, edge, self._arrived[source], self._sent[source][edge]))
                    if source not in seen and goes_on(hops[-1]):
                        seen.add(source)
                        waiting.append(source)
        return sorted(hops, key=lambda hop: self._order[hop.node])

    def losses(self, leaf: torch.Tensor) -> list[Hop]:
        """For a leaf whose gradient is exactly zero: the hops at which it became zero."""
        return [hop for hop in self._hops(leaf, lambda hop: hop.is_zero) if not hop.is_zero]

    def nonfinite_origin(self, leaf: torch.Tensor) -> Node | None:
        """The first node on the way to a leaf that made NaN or inf of finite gradients."""

        def passes_it_on(hop: Hop) -> bool:
            return not math.isfinite(hop.sent.largest) and not all(math.isfinite(a.largest) for a in hop.arrived)

        hops = self._hops(leaf, passes_it_on)
        made = (hop.node for hop in hops if not math.isfinite(hop.sent.largest) and not passes_it_on(hop))
        return next(made, None)

    def stops(self, leaf: torch.Tensor) -> list[Stop]:
        """Stops on the gradient's way to a layer's weight `leaf`, with one unit for each row of the weight."""
        takes_it = self._hops(leaf, lambda hop: operation(hop.node) in _SAME_VALUES)
        products = [hop.node for hop in takes_it if operation(hop.node) in _PRODUCTS]
        hops = self._hops_to(products, lambda hop: operation(hop.node) in _BY_UNIT)
        nodes = dict.fromkeys(hop.node for hop in hops if hop.node in self._stops)
        return [stop for node in nodes for stop in self._stops[node] if len(stop.units) == len(leaf)]

    def arrived_near(self, leaf: torch.Tensor) -> float:
        """Largest finite gradient that arrived at operations on a leaf, or on its values in another shape or dtype."""
        hops = self._hops(leaf, lambda hop: operation(hop.node) in _SAME_VALUES)
        return max((a.largest for hop in hops for a in hop.arrived if math.isfinite(a.largest)), default=0.0)


def operation(node: Node) -> str:
    """Name of the operation of a node: `Relu` for ReluBackward0."""
    return node.name().rpartition("Backward")[0]


#: Operations that repeat the values of their one operand in another shape, layout or dtype.
_SAME_VALUES = {
    "T", "Transpose", "Permute", "View", "Reshape", "ReshapeAlias", "UnsafeView", "Unsqueeze", "Squeeze", "Expand",
    "Clone", "ToCopy", "Alias", "Slice", "Select", "Split", "SplitWithSizes", "Chunk", "Unbind", "Repeat", "AsStrided",
}  # fmt: skip
#: Operations that multiply by the weight of a layer.
_PRODUCTS = {
    "Mm", "Addmm", "Bmm", "Baddbmm", "Linear", "MkldnnLinear", "Convolution", "MkldnnConvolution", "CudnnConvolution",
}  # fmt: skip
#: Operations that do not mix units.
_BY_UNIT = _SAME_VALUES | {
    "Add", "Sub", "Mul", "Div", "NativeBatchNorm", "CudnnBatchNorm", "NativeDropout", "MaxPool2DWithIndices",
    "AvgPool2D",
}  # fmt: skip
#: Functions with a flat side, where they let no gradient through.
_FLAT_ON_ONE_SIDE = {"Relu", "Threshold", "Hardtanh", "Clamp", "ClampMin", "ClampMax", "Hardswish", "Hardsigmoid"}
#: Operations that may broadcast an operand, whose gradient is then a sum, and the edges of such operands.
_ADDING_UP = {
    "Add": (0, 1), "Sub": (0, 1), "Addmm": (0,), "Addmv": (0,), "Baddbmm": (0,), "Expand": (0,), "Repeat": (0,),
    "Convolution": (2,), "MkldnnConvolution": (2,), "CudnnConvolution": (2,), "Linear": (2,), "MkldnnLinear": (2,),
    "NativeBatchNorm": (2,), "CudnnBatchNorm": (2,), "NativeLayerNorm": (2,), "NativeGroupNorm": (2,),
}  # fmt: skip
#: Operations that multiply operands, and the edges of these operands.
_FACTORS = {
    "Mul": (0, 1), "Mm": (0, 1), "Bmm": (0, 1), "Mv": (0, 1), "Dot": (0, 1), "Linear": (0, 1), "MkldnnLinear": (0, 1),
    "Convolution": (0, 1), "MkldnnConvolution": (0, 1), "CudnnConvolution": (0, 1), "PreluKernel": (0, 1),
    "NativeBatchNorm": (0, 1), "CudnnBatchNorm": (0, 1), "NativeLayerNorm": (0, 1), "NativeGroupNorm": (0, 1),
    "FusedRmsNorm": (0, 1), "Addmm": (1, 2), "Addmv": (1, 2), "Addbmm": (1, 2), "Baddbmm": (1, 2), "Addcmul": (1, 2),
}  # fmt: skip


# ---- Computing gradients, and leaving everything as it was ----------------------------------------------------------


def gradients(
    loss: torch.Tensor, wanted: list[torch.Tensor], model: torch.nn.Module, sharded: Sequence[Sharded] = ()
) -> tuple[list[torch.Tensor | None], Flow]:
    """Differentiate the loss once more, and leave the leaves, the model, the random numbers and the graph as they are.

    Args:
        loss: one real number.
        wanted: leaves that require a gradient, whether the graph leads to them or not.
        model: the module whose buffers may change when checkpointed blocks run again.
        sharded: parameters of FSDP2, whose leaves are among `wanted`.

    Returns:
        The gradients, None for leaves that the graph does not reach, and the flow. If the graph has been freed:
        `.grad`, and a flow in which nothing was observed.

    Raises:
        ValueError: the graph has been freed, and there is no `.grad` either.
        RuntimeError: the loss cannot be differentiated.
    """
    nodes = walk(loss.grad_fn)
    flow = Flow(nodes, {len(leaf) for leaf in wanted if not torch.nn.parameter.is_lazy(leaf) and leaf.dim() > 1})
    if loss.grad_fn is None:
        return [torch.ones_like(leaf) if leaf is loss else None for leaf in wanted], flow
    hides = any(map(is_reentrant, nodes))
    reached = [leaf for leaf in wanted if flow.reaches(leaf)]
    shards = {id(parameter.leaf): parameter.shard for parameter in sharded}
    try:
        if sharded and _is_freed(nodes):  # FSDP2 does not recover from a pass that raises
            raise RuntimeError(_FREED)
        with _as_it_was(model, nodes, sharded), flow, torch.autograd.set_detect_anomaly(False):
            if hides:
                return _by_backward(loss, [*leaves(nodes), *wanted], wanted, shards), flow
            # Autograd would raise if `reached` were empty.
            found = torch.autograd.grad(loss, reached, retain_graph=True, allow_unused=True) if reached else ()
    except RuntimeError as error:
        if _FREED not in str(error):
            raise RuntimeError(f"diagnose_gradients: the loss cannot be differentiated: {error}") from error
        missing = [_grad(leaf, shards) is None for leaf in (wanted if hides else reached)]
        if all(missing) or (any(missing) and not hides):
            raise ValueError(
                "diagnose_gradients: loss must have a graph, or the parameters must have gradients, but backward() has "
                "freed the graph and .grad is None; call it between the forward pass and backward()"
            ) from error
        flow = Flow(nodes)
        flow.is_freed = True
        return [_grad(leaf, shards) if hides or flow.reaches(leaf) else None for leaf in wanted], flow
    by_leaf = dict(zip(map(id, reached), found, strict=True))
    return [by_leaf.get(id(leaf)) for leaf in wanted], flow


def _is_freed(nodes: Iterable[Node]) -> bool:
    """True if `backward()` has freed a tensor that a node saved.

    Tensors that saved-tensor hooks packed are not read, because unpacking may recompute them: their `data` is not None.
    """
    for node in nodes:
        for name in dir(node):
            if name.startswith("_raw_saved_") and getattr(getattr(node, name), "data", node) is None:
                try:
                    getattr(node, name.replace("_raw", ""))
                except RuntimeError:
                    return True
    return False


def _grad(leaf: torch.Tensor, shards: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """`.grad` of a leaf, or of its shard once FSDP2 has reduced it."""
    return leaf.grad if leaf.grad is not None or id(leaf) not in shards else shards[id(leaf)].grad


def _by_backward(
    loss: torch.Tensor, touched: list[torch.Tensor], wanted: list[torch.Tensor], shards: Mapping[int, torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients that `loss.backward()` adds to `.grad`, the only way that reentrant checkpointing supports."""
    touched = [*touched, *shards.values()]
    before = [(leaf, leaf.grad) for leaf in touched]
    hooks = [registered for leaf in touched if (registered := getattr(leaf, "_post_accumulate_grad_hooks", None))]
    silenced = [(registered, dict(registered)) for registered in hooks]
    for registered in hooks:
        registered.clear()
    try:
        for leaf in touched:
            leaf.grad = None
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return [_grad(leaf, shards) for leaf in wanted]
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient
        for registered, entries in silenced:
            registered.update(entries)


@contextlib.contextmanager
def _as_it_was(model: torch.nn.Module, nodes: list[Node], sharded: Sequence[Sharded]) -> Iterator[None]:
    """Restore retained `.grad`, and random numbers and buffers, which a checkpointed block changes by running again."""
    retained = [(tensor, tensor.grad) for tensor in _retaining(set(nodes))]
    accumulated = [(parameter.leaf, parameter.leaf.grad) for parameter in sharded]
    buffers: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not torch.nn.parameter.is_lazy(buffer)
    ]
    tensors = [*model.parameters(), *(buffer for _, _, buffer, _ in buffers)]
    try:
        for leaf, _ in accumulated:
            leaf.grad = None  # FSDP2 would reduce it at the end of the pass
        with contextlib.ExitStack() as stack:
            for kind in ("cuda", "xpu"):
                devices = sorted({tensor.device.index for tensor in tensors if tensor.device.type == kind})
                stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
            yield
    finally:
        for tensor, gradient in retained + accumulated:
            tensor.grad = gradient
        for owner, name, buffer, value in buffers:
            owner[name] = buffer
            if not torch.equal(buffer, value):
                # Autograd counts no change made through .data, so that saved tensors stay valid.
                buffer.data.copy_(value)


def _retaining(nodes: set[Node]) -> list[torch.Tensor]:
    """Results of these nodes that retain their gradient. Only the garbage collector can list them."""
    with torch._C.DisableTorchFunction():
        tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
        return [tensor for tensor in tensors if tensor.retains_grad and gradient_function(tensor) in nodes]
