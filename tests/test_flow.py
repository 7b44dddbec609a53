"""scale_gradient and reverse_gradient: exact zeros, memory, arguments, structures.

test_matrix.py tests them under transforms, compilers and other contexts of PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from typing import NamedTuple

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import gradscale_ext as gs
from gradscale_ext.capture.graphs import seeming_to_capture

#: torch.compile does not trace all of Python's ways with classes.
IS_EARLIER = TorchVersion(torch.__version__) < "2.13.0a0"
SCALE = 1 / 3
WEIGHTS = torch.linspace(-2, 3, 5, dtype=torch.float64)
POINT = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)


def test_a_compiled_scale_of_zero_gives_exact_zeros():
    x, g = torch.zeros(4, requires_grad=True), torch.tensor([float("nan"), float("inf"), -0.0, 3.4e38])
    y = torch.compile(gs.scale_gradient, backend="aot_eager", fullgraph=True)(x, 0.0)
    assert torch.equal(torch.autograd.grad(y, x, g)[0], torch.zeros(4))


def test_forward_mode_under_no_grad_is_still_scaled():
    with torch.no_grad(), forward_ad.dual_level():
        dual = gs.scale_gradient(forward_ad.make_dual(POINT, WEIGHTS), SCALE)
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, WEIGHTS * SCALE)


@pytest.mark.parametrize("modified", ["result", "input"])
def test_in_place_with_a_later_graph_raises(modified):
    x = torch.zeros(5, dtype=torch.float64)
    y = gs.scale_gradient(x, SCALE)
    y.add_(1)  # nothing requires grad yet, so that y is an ordinary view of x
    assert torch.equal(x, torch.ones(5, dtype=torch.float64))
    source = POINT.clone().requires_grad_()

    def modify_and_use():
        (y if modified == "result" else x).copy_(source)
        (y * WEIGHTS).sum().backward()

    with pytest.raises(RuntimeError, match="modified inplace"):
        modify_and_use()


def test_in_place_on_the_result_invalidates_a_saved_input():
    x = POINT.clone().requires_grad_()
    a = x * 1
    saved = a * a
    y = gs.scale_gradient(a.detach(), SCALE)
    y.mul_(2)  # writes to the memory of `a`, which the backward pass of `saved` needs
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


# ---- The gradient's memory ------------------------------------------------------------------------------------------


def test_views_of_one_gradient_are_not_modified():
    x = torch.ones(8, requires_grad=True)
    halves = [gs.scale_gradient(x[:4], 0.5), x[4:]]
    joined = torch.cat(halves)
    joined.retain_grad()
    (joined * torch.arange(8.0)).sum().backward()
    assert torch.equal(joined.grad, torch.arange(8.0))
    assert torch.equal(x.grad, torch.arange(8.0) * torch.tensor([0.5] * 4 + [1.0] * 4))


def test_numpy_memory_is_not_modified():
    numpy = pytest.importorskip("numpy")
    memory = numpy.full(8, 3.0)

    class FromNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return torch.from_numpy(memory)

    x = torch.ones(8, dtype=torch.float64, requires_grad=True)
    FromNumpy.apply(gs.scale_gradient(x, 0.5)).sum().backward()
    assert (memory == 3.0).all()
    assert torch.equal(x.grad, torch.full((8,), 1.5, dtype=torch.float64))


# ---- Wrong arguments ------------------------------------------------------------------------------------------------


def test_arrays_as_arguments_say_how_to_convert_them():
    """Under torch.compile, NumPy scalars are arrays too."""
    numpy = pytest.importorskip("numpy")
    words = r"scale_gradient: scale must be a real number or tensor.*ndarray; convert scale: torch\.as_tensor\(scale\)"
    with pytest.raises(TypeError, match=words):
        gs.scale_gradient(torch.ones(2), numpy.ones(2))
    with pytest.raises(TypeError, match=r"norm_type must be a real number or tensor, but it is of type ndarray$"):
        gs.clip_gradient_norm(torch.ones(2), 1.0, norm_type=numpy.ones(2))
    x = torch.ones(2, requires_grad=True)
    compiled = torch.compile(lambda x, s: gs.scale_gradient(x, s) * 1, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        compiled(x, numpy.float64(0.5))
    convert = torch.compile(
        lambda x, s: gs.scale_gradient(x, torch.as_tensor(s)) * 1, backend="aot_eager", fullgraph=True
    )
    convert(x, numpy.float64(0.5)).sum().backward()
    assert x.grad.tolist() == [0.5, 0.5]


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"dtype is torch\.int32"):
        gs.scale_gradient(torch.ones(2, dtype=torch.int32), 0.5)
    with pytest.raises(TypeError, match=r"dtype is torch\.bool"):
        gs.scale_gradient(torch.ones(2, dtype=torch.bool), 0.5)
    with pytest.raises(TypeError, match=r"x\[0\] must be a tensor, or a structure.* but it is of type float"):
        gs.scale_gradient([1.0], 0.5)
    with pytest.raises(TypeError, match="type str"):
        gs.scale_gradient(torch.ones(2), "0.5")
    with pytest.raises(TypeError, match="type complex"):
        gs.scale_gradient(torch.ones(2), 0.5j)


def _nested(layout):
    return torch.nested.nested_tensor([torch.ones(4), torch.ones(2)], layout=layout)


KINDS = {
    "nested": (lambda: _nested(torch.strided), r"is a nested tensor; write torch\.nested\.to_padded_tensor"),
    "jagged": (lambda: _nested(torch.jagged), r"is a nested tensor; write torch\.nested\.to_padded_tensor"),
    "masked": (
        lambda: torch.masked.masked_tensor(torch.ones(4), torch.ones(4) > 0),
        r"MaskedTensor; give its get_data",
    ),
    "COO": (lambda: torch.eye(4).to_sparse(), r"layout is torch\.sparse_coo; write \.to_dense\(\)"),
    "CSR": (lambda: torch.eye(4).to_sparse_csr(), r"layout is torch\.sparse_csr; write \.to_dense\(\)"),
    "CSC": (lambda: torch.eye(4).to_sparse_csc(), r"layout is torch\.sparse_csc; write \.to_dense\(\)"),
    "BSR": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), r"layout is torch\.sparse_bsr; write \.to_dense\(\)"),
    "mkldnn": (lambda: torch.ones(4).to_mkldnn(), r"layout is torch\._mkldnn; write \.to_dense\(\)"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
        r"quantized; write \.dequant",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_tensors_that_are_rejected(kind):
    make, words = KINDS[kind]
    tensor = make()
    for operator, call in (
        ("scale_gradient", lambda x: gs.scale_gradient(x, 0.5)),
        ("reverse_gradient", lambda x: gs.reverse_gradient(x, torch.tensor([0.5]))),
        ("clip_gradient_norm", lambda x: gs.clip_gradient_norm(x, 1.0)),
        ("clip_gradient_norm", gs.ClipGradientNorm(1.0)),
        ("normalize_gradient", gs.normalize_gradient),
        ("clip_gradient_value", lambda x: gs.clip_gradient_value(x, -1.0, 1.0)),
    ):
        for argument, given in (("x", tensor), ("x['h']", {"h": tensor})):
            with pytest.raises(TypeError, match=f"^{operator}: {re.escape(argument)} .*{words}"):
                call(given)
    x = torch.ones(4, 4)
    for operator, argument, call in (
        ("scale_gradient", "scale", lambda: gs.scale_gradient(x, tensor)),
        ("reverse_gradient", "scale", lambda: gs.ReverseGradient(tensor)(x)),
        ("clip_gradient_norm", "max_norm", lambda: gs.clip_gradient_norm(x, tensor, batch_dims=2)),
        ("normalize_gradient", "norm", lambda: gs.normalize_gradient(x, tensor, batch_dims=2)),
        ("clip_gradient_value", "max", lambda: gs.clip_gradient_value(x, None, tensor)),
    ):
        with pytest.raises(TypeError, match=f"^{operator}: {argument} .*{words}"):
            call()


EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        *itertools.product(EIGHT_BITS, ["eager", "create_graph"]),
        pytest.param(torch.float8_e5m2, "compiled", marks=pytest.mark.compiled),
    ],
)
def test_gradients_of_eight_bits(dtype, way):
    """They are computed in float32, and rounded once."""
    torch._dynamo.reset()
    g = torch.tensor([3.0, -4.0, 0.0, 1.5])
    for operator, expected in (
        (lambda x: gs.scale_gradient(x, 0.3), 0.3 * g),
        (lambda x: gs.scale_gradient(x, 0.0), 0 * g.abs()),
        (lambda x: gs.scale_gradient(x, torch.tensor([0.3, 2.0, 0.0, -1.0])), g * torch.tensor([0.3, 2.0, 0.0, -1.0])),
        (lambda x: gs.reverse_gradient(x, torch.tensor(0.3)), -0.3 * g),
        (lambda x: gs.clip_gradient_norm(x, 2.0), g * 2 / g.norm()),
        (lambda x: gs.normalize_gradient(x, 20.0), g * 20 / g.norm()),
        (lambda x: gs.clip_gradient_value(x, -1.0, 0.3), g.clamp(-1, 0.3)),
    ):
        x = torch.tensor([1.0, -2.0, 0.5, 0.0]).to(dtype).requires_grad_()
        function = torch.compile(operator, backend="aot_eager", fullgraph=True) if way == "compiled" else operator
        for y, incoming in ((function(x), g.to(dtype)), (function(x).float(), g)):
            (found,) = torch.autograd.grad(y, x, incoming, create_graph=way == "create_graph")
            assert torch.equal(found.float(), expected.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
def test_dtypes_without_gradients_are_rejected(dtype):
    x = torch.zeros(4, dtype=torch.uint8).view(dtype)
    with pytest.raises(TypeError, match=rf"its dtype is {dtype}, which has no gradients; write \.float\(\)"):
        gs.scale_gradient(x, 0.5)


def test_limits_of_any_real_dtype():
    x = torch.zeros(2, 2, requires_grad=True)
    for dtype in (*EIGHT_BITS, torch.uint8, torch.uint16, torch.int64, torch.bfloat16):
        limit = torch.tensor([5.0, 1.0]).to(dtype)
        y = gs.clip_gradient_norm(x, limit, batch_dims=1)
        (found,) = torch.autograd.grad(y, x, torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        assert found.tolist() == [[3, 4], [0, 1]]
    for dtype in (torch.float4_e2m1fn_x2, torch.bits8):
        with pytest.raises(TypeError, match=f"must be real, but it is a tensor of dtype {dtype}"):
            gs.clip_gradient_norm(x, torch.zeros(2, dtype=torch.uint8).view(dtype), batch_dims=1)


def test_subclasses_are_preserved():
    class Subclass(torch.Tensor):
        pass

    x = torch.ones(2).as_subclass(Subclass).requires_grad_()
    y = gs.scale_gradient(x, 0.5)
    assert type(y) is Subclass
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 0.5))


def _kernels(function) -> tuple[list[str], str]:
    """The kernels that Inductor writes for forward and backward, and its complete output. The C++ is not compiled."""
    from torch._inductor.utils import get_code

    x = POINT.clone().requires_grad_()
    # get_code would leave graphs without code in the caches.
    with (
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        codes = get_code(torch.compile(function, fullgraph=True), x)
    return [line for code in codes for line in code.splitlines() if " = async_compile.cpp" in line], "\n".join(codes)


@pytest.mark.compiled
@pytest.mark.any_version
def test_inductor_fuses_scale_gradient_with_its_neighbours():
    """Forward and backward have as many kernels as without the operator, and do not call it by name."""
    plain, _ = _kernels(lambda x: ((x * x).sin() * WEIGHTS).sum())
    assert len(plain) >= 2
    for scale in (SCALE, torch.tensor(SCALE, dtype=torch.float64)):
        ours, code = _kernels(lambda x, scale=scale: (gs.scale_gradient(x * x, scale).sin() * WEIGHTS).sum())
        assert len(ours) == len(plain)
        assert "gradscale" not in code
        assert str(SCALE)[:6] in code or isinstance(scale, torch.Tensor)


# ---- Tensor scales --------------------------------------------------------------------------------------------------

TENSOR_SCALE = torch.tensor([0.5, 0.0, -2.0, 1.0, 0.25], dtype=torch.float64)


MAPPED = {
    "x and scale mapped": lambda: torch.func.grad(
        lambda x: (torch.func.vmap(gs.scale_gradient)(x * x, TENSOR_SCALE) * WEIGHTS).sum()
    )(POINT),
    "only the scale mapped": lambda: torch.func.grad(
        lambda x: (torch.func.vmap(gs.scale_gradient, (None, 0))(x * x, TENSOR_SCALE).diagonal() * WEIGHTS).sum()
    )(POINT),
}


@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap_over_scales(mapped):
    torch.testing.assert_close(MAPPED[mapped](), TENSOR_SCALE * 2 * WEIGHTS * POINT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("create_graph", [False, True])
def test_zeros_of_a_tensor_scale_are_exact(create_graph):
    """With create_graph=True, tensor operations compute the gradient, and their 0 * inf would be NaN."""
    x, g = torch.zeros(2, 4, requires_grad=True), torch.tensor([[float("nan"), float("inf"), -float("inf"), 3e38]] * 2)
    scaled = gs.scale_gradient(x, torch.tensor([[0.0], [1.0]]))
    (result,) = torch.autograd.grad(scaled, x, g, create_graph=create_graph)
    assert torch.equal(result[0], torch.zeros(4))
    torch.testing.assert_close(result[1], g[1], rtol=0, atol=0, equal_nan=True)


#: Operators with a tensor [4] or [4, 3] as argument.
WITH_TENSORS = {
    "scale_gradient": lambda x, a, b: gs.scale_gradient(x, b),
    "reverse_gradient": lambda x, a, b: gs.reverse_gradient(x, b),
    "clip_gradient_norm": lambda x, a, b: gs.clip_gradient_norm(x, a, batch_dims=1),
    "clip_gradient_value": lambda x, a, b: gs.clip_gradient_value(x, -b, b),
    "normalize_gradient": lambda x, a, b: gs.normalize_gradient(x, a, batch_dims=1),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("operator", WITH_TENSORS)
def test_arguments_made_in_inference_mode(operator, create_graph):
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    a, b = torch.rand(4, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)
    with torch.inference_mode():
        arguments = a.clone(), b.clone()
    results = []
    for given in ((a, b), arguments):
        y = WITH_TENSORS[operator](x * x, *given)
        (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=create_graph)
        results.append(torch.autograd.grad(gradient.square().sum(), x) if create_graph else gradient)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_tensor_scale_that_changes_before_the_backward_pass_raises():
    x = POINT.clone().requires_grad_()
    scale = TENSOR_SCALE.clone()
    y = gs.scale_gradient(x, scale).sum()
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_wrong_tensor_scales():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="requires grad"):
        gs.scale_gradient(x, torch.ones((), requires_grad=True))
    with pytest.raises(ValueError, match="requires grad"):
        gs.reverse_gradient(x, torch.ones((), requires_grad=True))
    with pytest.raises(ValueError, match=r"scale has a tangent of forward mode, .* detach\(\) it"):
        torch.func.jvp(lambda scale: gs.scale_gradient(x, scale), (torch.ones(()),), (torch.ones(()),))
    with pytest.raises(ValueError, match=r"broadcast to the shape of x, \[2, 3\], but its shape is \[2\]"):
        gs.scale_gradient(x, torch.ones(2))
    with pytest.raises(ValueError, match=r"\[1, 2, 3\]"):
        gs.scale_gradient(x, torch.ones(1, 2, 3))
    with pytest.raises(ValueError, match="on the device of x, cpu, but it is on meta"):
        gs.scale_gradient(x, torch.ones((), device="meta"))
    with pytest.raises(TypeError, match="complex64"):
        gs.scale_gradient(x, torch.ones((), dtype=torch.complex64))


# ---- Reversal, structures, modules ----------------------------------------------------------------------------------


class State(NamedTuple):
    hidden: torch.Tensor
    cell: torch.Tensor


class Doubled(State):
    def __new__(cls, hidden):
        return super().__new__(cls, hidden, 2 * hidden)


class Pair(tuple):
    def __new__(cls, hidden, cell):
        return super().__new__(cls, (hidden, cell))


class Items(list):
    def __init__(self, hidden, cell=None):
        super().__init__([hidden, cell])


class Named(dict):
    def __init__(self, hidden=None, **others):
        super().__init__(hidden=hidden, **others)


class Attributes(dict):
    """Entries and attributes are the same."""

    def __init__(self, *arguments, **entries):
        super().__init__(*arguments, **entries)
        self.__dict__ = self


class Output(OrderedDict):
    """Entries are attributes as well, as in the outputs of Transformers."""

    def __init__(self, hidden, cell):
        self["hidden"], self["cell"] = hidden, cell

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class Tagged(dict):
    __getattr__ = dict.get

    def __init__(self, hidden, cell):
        super().__init__(hidden=hidden, cell=cell)
        self.__dict__.update(first=hidden, tag="lstm")


class Defaults(defaultdict):
    def __init__(self, hidden, cell):
        super().__init__(list, hidden=hidden, cell=cell)


@dataclasses.dataclass
class Data:
    hidden: torch.Tensor
    cell: torch.Tensor


@dataclasses.dataclass(frozen=True)
class FrozenData:
    hidden: torch.Tensor
    cell: torch.Tensor

    def __post_init__(self):
        object.__setattr__(self, "total", self.hidden.sum() + self.cell.sum())


class Registered:
    def __init__(self, entries, tag):
        self.entries, self.tag = entries, tag


pytree.register_pytree_node(Registered, lambda x: (x.entries, x.tag), Registered)

#: Structures of two tensors, and functions that return the tensors of a structure.
STRUCTURES = {
    "tuple": (lambda a, b: (a, b), tuple),
    "namedtuple": (State, tuple),
    "namedtuple with a constructor": (lambda a, b: Doubled(a), tuple),
    "tuple with a constructor": (Pair, tuple),
    "list with a constructor": (Items, tuple),
    "dict": (lambda a, b: {"lstm": (a, b), "list": [a, [b]]}, lambda x: (*x["lstm"], x["list"][0], x["list"][1][0])),
    "dict with a constructor": (lambda a, b: Named(a, cell=b), lambda x: tuple(x.values())),
    "dict of attributes": (
        lambda a, b: Attributes(hidden=a, cell=b),
        lambda x: (x.hidden, x["hidden"], x.cell, x["cell"]),
    ),
    "dict with attributes": (Tagged, lambda x: (x.first, x["hidden"], x["cell"])),
    "OrderedDict": (lambda a, b: OrderedDict(z=a, y=b), lambda x: tuple(x.values())),
    "outputs": (Output, lambda x: (x.hidden, x["hidden"], x["cell"])),
    "defaultdict": (lambda a, b: defaultdict(list, x=a), lambda x: (x["x"],)),
    "defaultdict with a constructor": (Defaults, lambda x: tuple(x.values())),
    "dataclass": (Data, lambda x: (x.hidden, x.cell)),
    "frozen dataclass": (FrozenData, lambda x: (x.hidden, x.cell, x.total)),
    "registered node": (lambda a, b: Registered([a, (b,)], "lstm"), lambda x: (x.entries[0], x.entries[1][0])),
    "deque": (lambda a, b: deque([a, b]), tuple),
    "result of max": (lambda a, b: torch.return_types.max([a, b]), tuple),
    "nested": (
        lambda a, b: {"list": [Named(a), Data(b, (a,))]},
        lambda x: (x["list"][0]["hidden"], x["list"][1].hidden, x["list"][1].cell[0]),
    ),
}


WITH_ATTRIBUTES = {name for name in STRUCTURES if "constructor" in name or "attributes" in name} | {"outputs", "nested"}


def _check_structure(make, tensors, function):
    """The result has the type of the structure, and all its tensors have scaled gradients."""
    leaves = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    given = make(*leaves)
    result = function(given)
    assert type(result) is type(given)
    gradients = [
        torch.autograd.grad(sum(t.sum() for t in tensors(structure)), leaves, allow_unused=True, retain_graph=True)
        for structure in (given, result)
    ]
    for full, scaled in zip(*gradients, strict=True):
        assert (full is None and scaled is None) or torch.equal(scaled, 0.25 * full)
    return given, result


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_preserved(name, compiled):
    torch._dynamo.reset()
    function = lambda x: gs.scale_gradient(x, 0.25)
    if compiled:
        breaks = IS_EARLIER and name in WITH_ATTRIBUTES
        function = torch.compile(function, backend="aot_eager", fullgraph=not breaks)
    given, result = _check_structure(*STRUCTURES[name], function)
    if isinstance(given, dict):
        assert list(result) == list(given)
    if isinstance(given, defaultdict):
        assert result.default_factory is list
    assert getattr(result, "tag", None) == getattr(given, "tag", None)


def test_a_dict_of_attributes_stays_one():
    result = gs.scale_gradient(Attributes(hidden=torch.ones(2)), 0.5)
    result.cell = result.hidden
    assert result["cell"] is result["hidden"]


def test_tensordicts():
    tensordict = pytest.importorskip("tensordict")
    make = lambda a, b: tensordict.TensorDict({"h": a, "lstm": {"c": a * b[:2]}}, batch_size=[2])
    for compiled in (False, True):
        function = lambda x: gs.scale_gradient(x, 0.25)
        function = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
        given, result = _check_structure(make, lambda x: (x["h"], x["lstm", "c"]), function)
        assert result.batch_size == given.batch_size


class Slots(dict):
    __slots__ = ("tag",)


class Required(dict):
    def __new__(cls, size):
        return super().__new__(cls)


@dataclasses.dataclass
class Derived:
    hidden: torch.Tensor
    total: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.total = self.hidden.sum()


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (Slots(a=torch.ones(1)), "x is of type Slots, which cannot be built .*__slots__.*_pytree.register_pytree_node"),
        (Required({}), r"x is of type Required, .*missing 1 required positional argument: 'size'"),
        (Derived(torch.ones(1)), r"x is of type Derived, .*field total is declared with init=False"),
        ({"a": (Slots(),)}, r"scale_gradient: x\['a'\]\[0\] is of type Slots"),
        (types.SimpleNamespace(h=torch.ones(1)), "x must be a tensor, or a structure.* is of type SimpleNamespace"),
        (UserDict(h=torch.ones(1)), "x must be a tensor, or a structure.* is of type UserDict"),
        (torch.Size([2]), r"x\[0\] must be a tensor.* is of type int"),
        (Data(torch.ones(1), {"x": None}), r"x\.cell\['x'\] must be a tensor.* is of type NoneType"),
        ([torch.ones(1).numpy()], r"x\[0\] must be .* ndarray; convert x\[0\]: torch\.as_tensor\(x\[0\]\)"),
    ],
)
def test_other_structures_are_rejected(structure, words):
    with pytest.raises(TypeError, match=words):
        gs.scale_gradient(structure, 0.5)
    compiled = torch.compile(lambda x: gs.scale_gradient(x, 0.5), backend="eager")
    with pytest.raises(Exception, match=None if IS_EARLIER else words):
        compiled(structure)


def test_errors_name_the_entry():
    x = {"lstm": (torch.ones(2, 3), torch.ones(3))}
    with pytest.raises(ValueError, match=r"the shape of x\['lstm'\]\[1\], \[3\], but its shape is \[2, 1\]"):
        gs.scale_gradient(x, torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"number of dimensions of x\['lstm'\]\[1\], 1, but it is 2"):
        gs.clip_gradient_norm(x, 1.0, batch_dims=2)
    with pytest.raises(TypeError, match=r"scale_gradient: x\['x'\] must be a floating.* dtype is torch\.int32"):
        gs.scale_gradient({"x": torch.ones(1).int()}, 0.5)
    with pytest.raises(NotImplementedError, match="clip_gradient_norm: it changes"), forward_ad.dual_level():
        gs.clip_gradient_norm([forward_ad.make_dual(POINT, WEIGHTS)], 1.0)


def test_other_names_of_the_scale():
    for call in (gs.ReverseGradient, lambda **names: gs.reverse_gradient(POINT, **names)):
        for name in ("alpha", "lambda_"):
            with pytest.raises(
                TypeError, match=rf"(?i)reverse_?gradient: there is no argument '{name}'.* write scale="
            ):
                call(**{name: 0.5})
    assert gs.ReverseGradient(scale=0.5).scale == 0.5


# ---- torch.func.functionalize ---------------------------------------------------------------------------------------

G = torch.tensor([[3.0, -4.0, 1.0], [0.3, 0.4, 0.0]])
FUNCTIONALIZED = {
    "scale_gradient": lambda x: gs.scale_gradient(x, 0.5),
    "scale_gradient by a tensor": lambda x: gs.scale_gradient(x, torch.tensor([0.0, 2.0, 3.0])),
    "reverse_gradient": gs.reverse_gradient,
    "clip_gradient_norm": lambda x: gs.clip_gradient_norm(x, torch.tensor([0.5, 2.0]), batch_dims=1),
    "ClipGradientNorm": gs.ClipGradientNorm(0.5, batch_dims=1),
    "normalize_gradient": lambda x: gs.normalize_gradient(x, 2.0, norm_type=1.0),
    "clip_gradient_value": lambda x: gs.clip_gradient_value(x, -0.5, None),
}


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize("name", FUNCTIONALIZED)
def test_functionalize(name, remove):
    operator = FUNCTIONALIZED[name]
    functionalize = functools.partial(torch.func.functionalize, remove=remove)

    def loss(x):
        y = x * 1
        y.mul_(2)
        z = operator(y).clone()
        z.mul_(3)
        return (z * G).sum()

    x = torch.ones(2, 3, requires_grad=True)
    value = loss(x)
    (expected,) = torch.autograd.grad(value, x)
    for found in (
        torch.autograd.grad(functionalize(loss)(x), x)[0],
        torch.func.grad(functionalize(loss))(x),
        functionalize(torch.func.grad(loss))(x),
        torch.func.vmap(functionalize(torch.func.grad(loss)))(x.unsqueeze(0))[0],
        make_fx(functionalize(torch.func.grad(loss)))(x)(x),
    ):
        torch.testing.assert_close(found, expected)
    assert torch.equal(functionalize(loss)(x), value)


@pytest.mark.parametrize("name", FUNCTIONALIZED)
def test_tracers_after_autograd_drop_the_operators(name):
    """As docs/how_to/torch_compile.md says. Tracers before autograd, and a traced backward pass, keep them."""

    class Loss(torch.nn.Module):
        def forward(self, x):
            return (FUNCTIONALIZED[name](x * 1) * G).sum()

    def gradient(loss, x):
        return torch.autograd.grad(loss(x), x)[0]

    loss, x = Loss(), torch.ones(2, 3, requires_grad=True)
    expected = gradient(loss, x)
    assert not torch.allclose(expected, G)
    exported = torch.export.export(loss, (x,))
    for kept in (exported.module(), make_fx(loss, pre_dispatch=True)(x)):
        torch.testing.assert_close(gradient(kept, x), expected)
    torch.testing.assert_close(make_fx(lambda x: gradient(loss, x))(x)(x), expected)
    for lost in (exported.run_decompositions().module(), make_fx(loss)(x)):
        assert torch.equal(gradient(lost, x), G)


@pytest.mark.parametrize("modified", ["result", "input"])
def test_functionalize_with_a_later_change_in_place_raises(modified):
    def function(x):
        x = x * 1
        y = gs.scale_gradient(x, 0.5)
        (x if modified == "input" else y).mul_(2)
        return y

    with pytest.raises(RuntimeError, match="frozen"):
        torch.func.functionalize(function)(torch.ones(2))


# ---- Found by the fuzzer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    "operator", [lambda x: gs.scale_gradient(x, torch.ones(1)), lambda x: gs.reverse_gradient(x, -torch.ones(1))]
)
def test_a_tensor_of_ones_does_not_change_complex_gradients(operator, create_graph):
    gradient = torch.tensor([complex("inf+1j"), complex(1, -0.0), complex("2+nanj")], dtype=torch.complex64).conj()
    x = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    (result,) = torch.autograd.grad(operator(x), x, gradient, create_graph=create_graph)
    result, expected = (torch.view_as_real(g.detach().resolve_conj()) for g in (result, gradient))
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result.signbit(), expected.signbit())


@pytest.mark.parametrize("scale", [3e-6, torch.tensor(3e-6), torch.tensor([3e-6])], ids=["number", "tensor", "vector"])
@pytest.mark.parametrize("owned", [True, False])
def test_a_scale_keeps_its_digits_for_half_complex_gradients(scale, owned):
    x = torch.zeros(1, dtype=torch.complex32, requires_grad=True)
    y = gs.scale_gradient(x, scale)
    incoming = torch.tensor([complex(1000, torch.inf)], dtype=torch.complex32)
    (gradient,) = torch.autograd.grad(y.clone() if owned else y, x, incoming)
    real, imaginary = torch.view_as_real(gradient)[0].tolist()
    assert real == torch.tensor(3e-3).half().item()
    assert imaginary == torch.inf


def test_symbolic_trace_keeps_the_operators():
    traced = torch.fx.symbolic_trace(lambda x: gs.reverse_gradient({"h": gs.scale_gradient(x, 0.5)}, 3.0)["h"] * 2)
    x = torch.ones(2, requires_grad=True)
    traced(x).sum().backward()
    assert x.grad.tolist() == [-3.0, -3.0]
    traced = torch.fx.symbolic_trace(lambda x: gs.clip_gradient_value(x, -0.5, torch.tensor(2.0)))
    (gradient,) = torch.autograd.grad(traced(x), x, torch.tensor([-1.0, 3.0]))
    assert gradient.tolist() == [-0.5, 2.0]


COMPILED_AUTOGRAD = {
    "scale_gradient": lambda: lambda x: gs.scale_gradient(x, 0.5),
    "scale_gradient by a tensor": lambda: lambda x: gs.scale_gradient(x, torch.tensor([0.0, 2.0, 3.0])),
    "reverse_gradient": lambda: lambda x: gs.reverse_gradient(x, 0.5),
    "clip_gradient_norm": lambda: lambda x: gs.clip_gradient_norm(x, 0.5, batch_dims=1),
    "ClipGradientNorm": lambda: gs.ClipGradientNorm(0.5, batch_dims=1),
    "normalize_gradient": lambda: lambda x: gs.normalize_gradient(x, torch.tensor([0.5]), batch_dims=1, norm_type=1.0),
    "clip_gradient_value": lambda: lambda x: gs.clip_gradient_value(x, -0.1, torch.tensor([0.1, 0.2, 0.3])),
}


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in COMPILED_AUTOGRAD
        for dtype in (torch.float32, torch.bfloat16, torch.complex64)
        if not (dtype.is_complex and name == "clip_gradient_value")
    ],
)
def test_compiled_autograd(name, dtype):
    """Compiled autograd traces the backward passes of two eager calls, which get different gradients. While it traces,
    the gradient of an operation has no shape and no dtype."""
    torch._dynamo.reset()
    results = []
    for context in (contextlib.nullcontext, lambda: torch._dynamo.compiled_autograd._enable(_eager_backend())):
        operator = COMPILED_AUTOGRAD[name]()
        for seed in (0, 1):
            gradient = torch.randn(2, 3, dtype=dtype, generator=torch.Generator().manual_seed(seed))
            x = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
            y = operator(2 * operator(3 * x))
            with context():
                y.backward(gradient)
            results.append(x.grad)
    for expected, found in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(found, expected)


def _eager_backend():
    return torch.compile(backend="eager")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scale_keeps_its_digits_for_half_gradients_of_one_owner(dtype):
    """Which are scaled in place."""
    x = torch.zeros(1000, dtype=dtype, requires_grad=True)
    factor = torch.linspace(1, 2, 1000).to(dtype)
    (gs.scale_gradient(x, 1 / 3) * factor).sum().backward()  # nothing else has the gradient of the product
    assert torch.equal(x.grad, (factor.double() / 3).to(dtype))


# ---- Scalars on the CPU for tensors on a GPU -------------------------------------------------------------------------

WITH_SCALARS = {
    "scale": lambda x, value: gs.scale_gradient(x, value),
    "max_norm": lambda x, value: gs.clip_gradient_norm(x, value),
    "norm": lambda x, value: gs.normalize_gradient(x, value),
    "min": lambda x, value: gs.clip_gradient_value(x, value, None),
    "max": lambda x, value: gs.clip_gradient_value(x, -1.0, value),
}


class Seen(TorchDispatchMode):
    """Sees all operations, so that the operators do not read a scalar on the CPU at once."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("argument", WITH_SCALARS)
def test_a_scalar_on_the_cpu_is_refused_while_a_graph_is_captured(argument):
    """A graph would repeat the copy to the GPU at each replay, from an address that the host may have reused by then.

    The meta device stands for a GPU."""
    scalar = torch.tensor(0.5)
    x = torch.ones(3, device="meta", requires_grad=True)

    def step(value):
        WITH_SCALARS[argument](x, value).sum().backward()

    with Seen():
        step(scalar)
    with seeming_to_capture():
        step(scalar)  # is read as a number, and copied nowhere
    with Seen(), seeming_to_capture():
        step(0.5)
        step(torch.full((), 0.5, device="meta"))
        with pytest.raises(ValueError, match=rf"^\w+: {argument} must be a number or a tensor on meta while") as raised:
            step(scalar)
    assert f"write {argument} = {argument}.to('meta'), or {argument} = {argument}.item()" in str(raised.value)
    with Seen():
        y = WITH_SCALARS[argument](x, scalar)
    with seeming_to_capture():
        y.sum().backward()  # the saved scalar is read as a number, too


@pytest.mark.parametrize("argument", WITH_SCALARS)
def test_a_compiled_graph_refuses_a_scalar_on_the_cpu_while_a_graph_is_captured(argument):
    """Graphs of compilers have an operator for the copy to the GPU, which the meta device stands for."""

    def gradient(x, value):
        return torch.autograd.grad(WITH_SCALARS[argument](x, value).sum(), x)[0]

    x = torch.ones(3, device="meta", requires_grad=True)
    graph = make_fx(gradient)(x, torch.tensor(0.5))
    assert graph(x, torch.tensor(0.5)).is_meta
    with (
        seeming_to_capture(),
        pytest.raises(ValueError, match=rf"^\w+: {argument} must be a number or a tensor on meta"),
    ):
        graph(x, torch.tensor(0.5))
    on_device = make_fx(gradient)(x, torch.full((), 0.5, device="meta"))
    with seeming_to_capture():
        on_device(x, torch.full((), 0.5, device="meta"))


def test_the_copy_of_a_scalar_to_a_device():
    copy = torch.ops.gradscale_ext.to_device
    scalars = torch.tensor([0.5, 2.0])
    for mode in (contextlib.nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode:
            copied = copy(scalars[0], "scale_gradient", "scale", torch.device("meta"), torch.float64)
        assert (copied.device.type, copied.shape, copied.dtype) == ("meta", (), torch.float64)
    on_cpu = torch.func.vmap(lambda value: copy(value, "f", "a", torch.device("cpu"), torch.float64) * 2)(scalars)
    assert on_cpu.dtype == torch.float64
    assert on_cpu.tolist() == [1.0, 4.0]
