"""Statistics of gradients, and clipping by their total norm. fuzz/test_tensors.py checks both against formulas."""

from __future__ import annotations

import itertools
import json
import math
import re
import types
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import gradscale_ext as gs
from gradscale_ext import reference
from gradscale_ext.capture.graphs import seeming_to_capture
from gradscale_ext.statistics import gradients as module
from gradscale_ext.statistics import operators, passes

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NORMS = (1.0, 2.0, 3.14, math.inf)
SIZES = (1, 2, 3, 31, 33, 601, 2047, 2048, 2049, 16384, 16385, 40001)


def numbers(size, seed, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.fixture
def rounding(request):
    """Allowed relative error of norms of elements narrower than float64.

    The CUDA kernels add up the squares of each 16 bytes in float32, with at most three roundings of 2^-24. The square
    root halves this error. All other sums are in float64.
    """
    return 9e-8 if request.config.getoption("--simulated-kernels") else 1e-12


def assert_same(tensors, p=2.0, rounding=1e-12):
    """Compare with the reference.

    The error of a mean is relative to the mean magnitude, because elements may cancel. It may be twice the error of a
    norm, because the square root halves that error.
    """
    result, expected = module._C.tensor_statistics(tensors, p), reference.tensor_statistics(tensors, p)
    sums, counts = reference.tensor_statistics(tensors, 1.0)
    magnitudes = sums[0] / (counts[0] - counts[2] - counts[3]).clamp(min=1)
    narrow = torch.tensor([tensor.dtype != torch.float64 and p in (2.0, math.inf) for tensor in tensors])
    relative = torch.where(narrow, rounding, 1e-12)
    norm, largest, mean = (result[0] - expected[0]).abs()
    assert (norm <= relative * expected[0][0] + 1e-300).all()
    assert (largest <= 1e-12 * expected[0][1]).all()
    assert (mean <= torch.where(narrow, 2 * rounding, 1e-12) * magnitudes + 1e-300).all()
    assert torch.equal(result[1], expected[1])


def with_gradients(gradients):
    parameters = []
    for gradient in gradients:
        parameters.append(torch.zeros(()) if gradient is None else torch.zeros_like(gradient.to_dense()))
        parameters[-1].grad = gradient
    return parameters


# ---- Statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", NORMS)
def test_statistics(dtype, p, rounding):
    """Sizes close to the sizes of blocks and chunks, and views with several offsets."""
    tensors = [
        numbers(size + 5, size, dtype, 10.0 ** (size % 7 - 3))[offset : size + offset]
        for size in SIZES
        for offset in (0, 1, 5)
    ]
    for tensor in tensors[3:20:2]:
        tensor[::3] = 0
    tensors[9][0], tensors[10][1], tensors[13][-1] = math.nan, math.inf, -math.inf
    tensors[14].fill_(math.nan)
    tensors[-1][-1] = math.inf  # in the last of three chunks
    assert_same(tensors, p, rounding)


def test_reference_by_hand():
    tensor = torch.tensor([3.0, -4.0, 0.0, math.nan, math.inf, -math.inf, 0.0], dtype=torch.float64)
    values, counts = reference.tensor_statistics([tensor, None], 2.0)
    torch.testing.assert_close(values[:, 0], torch.tensor([5.0, 4.0, -0.25], dtype=torch.float64))
    assert counts.tolist() == [[7, 0], [2, 0], [1, 0], [2, 0], [0, 1]]
    edges = list(module.BIN_EDGES)
    histogram = reference.histograms([tensor, None], counts)
    assert histogram[0].nonzero().flatten().tolist() == [edges.index(1), edges.index(2)]
    assert not histogram[1].any()


OCTAVES = [1e-45, 2.0**-41, 2.0**-40, 0.75, 1.0, -1.99, 2.0, 2.0**21, 2.0**22, -3e38]
"""Numbers, and the first bin, the bins next to it and so on."""
BINS = [0, 0, 1, 40, 41, 41, 42, 62, 63, 63]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bins_of_a_histogram(dtype):
    """Edges belong to the bin above them. Zeros, NaN and inf are in none, and what float16 cannot store is one of them.
    If subnormal numbers are flushed to zero, they are zeros."""
    tensor = torch.tensor([*OCTAVES, 0.0, -0.0, math.nan, math.inf, -math.inf], dtype=torch.float64).to(dtype)
    expected = torch.zeros(64, dtype=torch.int64)
    for element, octave in zip(tensor[: len(BINS)].tolist(), BINS, strict=True):
        expected[octave] += element != 0 and math.isfinite(element)
    for flushes in (False, True):
        try:
            torch.set_flush_denormal(flushes)
            found = gs.gradient_statistics([tensor, None, tensor[:0], -tensor[::2]], histogram=True)
        finally:
            torch.set_flush_denormal(False)
        assert found.histogram.dtype == torch.int64
        assert torch.equal(found.histogram[0, flushes:], expected[flushes:])
        assert not found.histogram[1:3].any()
        assert torch.equal(found.histogram.sum(1), found.numel - found.zeros - found.nans - found.infs)
    edges = found.bin_edges
    assert edges[0] == -math.inf
    assert edges[1:-1].tolist() == list(range(-40, 23))
    assert edges[-1] == math.inf


def test_the_histogram_of_any_memory():
    """Views, moduli of complex numbers, and elements that a sparse tensor does not store."""
    x = numbers((6, 4), 0)
    z = torch.complex(x[:3], x[3:])
    sparse = torch.sparse_coo_tensor([[1, 3, 1]], numbers((3, 4), 1), (5, 4))
    tensors = [
        x.t(),
        x[:, 1],
        x[:1].expand(3, 4),
        z,
        z.conj(),
        z.conj().imag,
        sparse,
        sparse.to_dense().to_sparse_csr(),
    ]
    found = gs.gradient_statistics(tensors, histogram=True)
    for row, tensor in zip(found.histogram, tensors, strict=True):
        assert torch.equal(row, gs.gradient_statistics([tensor.to_dense().abs().clone()], histogram=True).histogram[0])
        assert row.sum() == (tensor.to_dense() != 0).sum()
    large = torch.tensor([3e38 + 3e38j], dtype=torch.complex64)
    assert gs.gradient_statistics([large], histogram=True).histogram[0, -1] == 1


def test_a_histogram_needs_little_memory():
    """Two integers of four bytes for each element, one after the other."""
    x = torch.ones(1000)
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.untyped_storage().nbytes())
            return result

    with Watch():
        reference.octaves_of(x, x.device)
    assert max(sizes) == 4000


def test_only_a_call_that_asks_for_it_has_a_histogram():
    p = with_gradients([torch.tensor([3.0, 4.0])])
    for statistics in (gs.gradient_statistics(p), gs.clip_gradients_(p, 1.0), gs.clip_gradients_(p, adaptive=1.0)):
        assert statistics.histogram is None
        assert not {"histogram", "bin_edges"} & statistics.to_dict().keys()
    with pytest.raises(TypeError, match="histogram must be True or False, but it is of type int"):
        gs.gradient_statistics(p, histogram=1)


def test_no_tensors():
    statistics = gs.gradient_statistics([], histogram=True)
    assert statistics.norm.shape == (0,)
    assert statistics.histogram.shape == (0, 64)
    assert statistics.total_norm.item() == 0
    assert gs.clip_gradients_([], 1.0).total_norm.item() == 0


def test_sparse_gradients():
    embedding = torch.nn.Embedding(50, 7, sparse=True)
    embedding(torch.tensor([3, 4, 3, 9])).square().sum().backward()
    sparse = embedding.weight.grad
    assert sparse.is_sparse
    assert not sparse.is_coalesced()
    dense = sparse.to_dense()
    compressed = dense.to_sparse_csr()
    result = gs.gradient_statistics([sparse, compressed, dense], histogram=True)
    for field in ("numel", "norm", "abs_max", "mean", "zeros", "histogram"):
        values = getattr(result, field).double()
        torch.testing.assert_close(values[0], values[2], rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(values[1], values[2], rtol=1e-6, atol=1e-12)
    assert result.zeros[0] == 47 * 7


def test_many_tensors(rounding):
    """There are more tensors than fit into the arguments of a launch."""
    assert_same([numbers(i % 97, i, DTYPES[i % 4]) for i in range(700)], 2.0, rounding)


@pytest.mark.cpu_kernels
def test_the_same_bits_with_any_number_of_threads():
    tensors = [numbers(size, size) for size in (3, 300_000, 50_000, 7)]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(module._C.tensor_statistics(tensors, 2.0))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_names_tables_and_dictionaries():
    statistics = gs.gradient_statistics(
        [torch.tensor([3.0, -4.0]), None], names=["layer.weight", "layer.bias"], histogram=True
    )
    lines = str(statistics).splitlines()
    assert lines[1].split()[:4] == ["layer.weight", "2", "5", "4"]
    assert lines[2].split() == ["layer.bias", "no", "gradient"]
    assert lines[3] == "total norm: 5"
    read = json.loads(json.dumps(statistics.to_dict()))
    assert read["norm"] == [5.0, 0.0]
    assert read["missing"] == [False, True]
    assert read["names"] == ["layer.weight", "layer.bias"]
    assert read["total_norm"] == 5.0
    assert len(read["bin_edges"]) == len(read["histogram"][0]) + 1
    assert gs.gradient_statistics(torch.ones(3)).names == ["0"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            ([torch.ones(2), "x"],),
            TypeError,
            r"tensors\[1\] must be a floating or complex tensor, but it is of type str",
        ),
        (([torch.ones(2).long()],), TypeError, r"tensors\[0\] .* torch.int64"),
        (([torch.ones(2)], ["a", "b"]), ValueError, "expected one name for each of 1 tensors, but got 2"),
    ],
)
def test_errors(arguments, error, words):
    with pytest.raises(error, match=words):
        gs.gradient_statistics(*arguments)


def test_other_contexts_use_the_reference(rounding):
    tensors = [numbers(100, 0), numbers((3, 5), 1)]
    expected = gs.gradient_statistics(tensors).norm
    with torch.inference_mode():
        torch.testing.assert_close(gs.gradient_statistics(tensors).norm, expected, rtol=rounding, atol=0)
    result = torch.func.vmap(lambda x: gs.gradient_statistics([x]).norm)(torch.stack([tensors[0], tensors[0]]))
    torch.testing.assert_close(result, expected[0].expand(2, 1), rtol=rounding, atol=0)

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: gs.gradient_statistics([x]).norm * 2, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tensors[0]), 2 * expected[:1], rtol=rounding, atol=0)


# ---- Inputs: parameters, which stand for their gradients, or other tensors -------------------------------------------


def layers():
    """The first weight has the gradient (3, 4), the bias has none, and the second weight is frozen."""
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 1), "second": torch.nn.Linear(1, 1, bias=False)})
    model["first"].weight.grad = torch.tensor([[3.0, 4.0]])
    model["second"].requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(100.0)
    return model


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (lambda model: model, ["first.weight", "first.bias", "second.weight"]),
        (lambda model: model.named_parameters(), ["first.weight", "first.bias", "second.weight"]),
        (lambda model: model.parameters(), ["0", "1", "2"]),
        (lambda model: list(model.parameters()), ["0", "1", "2"]),
    ],
    ids=["module", "pairs", "generator", "list"],
)
def test_parameters_stand_for_their_gradients(given, names):
    """A frozen parameter counts as a parameter: its values never appear as gradients."""
    statistics = gs.gradient_statistics(given(layers()))
    assert statistics.names == names
    assert statistics.norm.tolist() == [5.0, 0.0, 0.0]
    assert statistics.missing.tolist() == [False, True, True]
    assert statistics.is_gradient == [True, True, True]
    lines = str(statistics).splitlines()
    assert lines[0].startswith("gradient of  ")
    assert [line.split() for line in lines[2:4]] == [[names[1], "no", "gradient"], [names[2], "no", "gradient"]]


def test_statistics_and_clipping_use_the_same_gradients():
    model = layers()
    model.requires_grad_(True)
    for given in (model, list(model.parameters()), dict(model.named_parameters()).items()):
        statistics, clipped = gs.gradient_statistics(given), gs.clip_gradients_(given, math.inf)
        for field in ("norm", "abs_max", "mean", "zeros", "missing", "total_norm"):
            assert torch.equal(getattr(statistics, field), getattr(clipped, field))
        assert statistics.names == clipped.names
        assert str(statistics) == str(clipped)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([6.0, 8.0]),
        torch.nn.Parameter(torch.tensor([6.0, 8.0])).detach(),
        torch.nn.Parameter(torch.tensor([6.0, 8.0])).data,
        torch.tensor([3.0, 4.0], requires_grad=True) * 2,
        torch.tensor([6.0, 8.0]).to_sparse(),
    ],
    ids=["plain", "detached", "data", "result", "sparse"],
)
def test_other_tensors_are_measured_themselves(tensor):
    for given in (tensor, [tensor], [("t", tensor)]):
        statistics = gs.gradient_statistics(given)
        assert statistics.norm.tolist() == [10.0]
        assert statistics.is_gradient == [False]
        assert str(statistics).startswith("tensor  ")
    assert statistics.names == ["t"]


def test_leaves_that_require_grad_are_parameters():
    leaf = torch.tensor([6.0, 8.0], requires_grad=True)
    assert gs.gradient_statistics(leaf).missing.tolist() == [True]
    leaf.grad = torch.tensor([3.0, 4.0])
    assert float(gs.gradient_statistics(leaf)) == 5.0
    assert float(gs.gradient_statistics(leaf.detach())) == 10.0
    (leaf**3).sum().backward(create_graph=True)
    assert leaf.grad.requires_grad
    assert gs.gradient_statistics([leaf.grad]).is_gradient == [False]
    leaf.grad = None


def test_within_torch_func_leaves_are_measured_themselves():
    """Leaves are the inputs of torch.func.grad, which never sets their `grad`; a penalty needs their own norm."""
    norms = []

    def penalty(x):
        norms.append(gs.gradient_statistics([x]).norm.sum().item())
        return x.square().sum()

    torch.func.grad(penalty)(torch.tensor([3.0, 4.0]))
    assert norms == [5.0]


def test_mixed_input_is_labelled_row_by_row():
    weight = torch.nn.Parameter(torch.tensor([100.0]))
    weight.grad = torch.tensor([5.0])
    statistics = gs.gradient_statistics([("weight", weight), torch.tensor([6.0, 8.0]), None, ("frozen", None)])
    assert statistics.names == ["weight", "1", "2", "frozen"]
    assert statistics.norm.tolist() == [5.0, 10.0, 0.0, 0.0]
    assert statistics.is_gradient == [True, False, False, False]
    labels = [line.split("  ")[0] for line in str(statistics).splitlines()[:-1]]
    assert labels == ["tensor", "gradient of weight", "1", "2", "frozen"]
    assert statistics.to_dict()["is_gradient"] == [True, False, False, False]


def test_given_names_replace_the_names_of_a_module():
    model = layers()
    assert gs.gradient_statistics(model, names=["a", "b", "c"]).names == ["a", "b", "c"]
    assert gs.gradient_statistics(model, names=(name for name in "abc")).names == ["a", "b", "c"]
    with pytest.raises(ValueError, match="expected one name for each of 3 tensors, but got 1"):
        gs.gradient_statistics(model, names=["a"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([1, 2, 3], r"names\[0\] must be a string, .* type int"),
        ("abc", "names must be a sequence of strings, .* type str"),
    ],
)
def test_names_are_strings(names, words):
    with pytest.raises(TypeError, match=f"^gradient_statistics: {words}"):
        gs.gradient_statistics(layers(), names=names)


def test_statistics_are_a_number_like_the_result_of_clip_grad_norm():
    statistics = gs.gradient_statistics([torch.full((4,), 2.0)])
    assert torch.isfinite(statistics)
    results = [statistics * 2, 2 * statistics, statistics / 2, 8 / statistics, torch.tensor(8.0) / statistics]
    assert [result.item() for result in results] == [8, 8, 2, 2, 2]
    assert torch.stack([statistics, torch.ones((), dtype=torch.float64)]).tolist() == [4, 1]
    assert round(statistics) == 4
    assert isinstance(round(statistics), int)
    assert round(gs.gradient_statistics([torch.ones(2)]), 2) == 1.41


def test_statistics_compare_by_identity():
    first, second = (gs.gradient_statistics([torch.ones(2)]) for _ in range(2))
    assert first == first
    assert len({first, second}) == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (gs.gradient_statistics, "gradient_statistics: tensors"),
        (lambda given: gs.clip_gradients_(given, 1.0), "clip_gradients_: parameters"),
    ],
)
def test_mappings_and_groups_of_an_optimizer_are_rejected(call, words):
    model = torch.nn.Linear(2, 2)
    argument = words.split()[-1]
    remedy = re.escape(f"{argument}.values()")
    with pytest.raises(TypeError, match=f"^{words} must be .*, but it is a mapping of type dict; write {remedy}$"):
        call(dict(model.named_parameters()))
    groups = torch.optim.SGD(model.parameters(), lr=0.1).param_groups
    with pytest.raises(
        TypeError, match=rf"^{words} must be .*, but {argument}\[0\] is a group of an optimizer; write"
    ) as found:
        call(groups)
    written = str(found.value).partition("; write ")[2]
    call(eval(written, {"optimizer": types.SimpleNamespace(param_groups=groups)}))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (gs.gradient_statistics, "gradient_statistics: tensors"),
        (lambda given: gs.clip_gradients_(given, 1.0), "clip_gradients_: parameters"),
    ],
)
def test_none_is_rejected(call, words):
    with pytest.raises(TypeError, match=f"^{words} must be a module or tensors, but it is of type NoneType"):
        call(None)


# ---- As a number -----------------------------------------------------------------------------------------------------


def test_statistics_convert_to_a_number_as_the_norm_of_pytorch_does():
    p = with_gradients([torch.tensor([3.0, 4.0])])
    norm = gs.clip_gradients_(p, 1.0)
    assert float(norm) == norm.item() == 5.0
    assert f"{norm:.2f}|{norm:8.1f}" == "5.00|     5.0"
    assert f"{norm}" == str(norm)
    assert f"{norm}".startswith("gradient of")
    assert math.isfinite(norm)
    assert norm > 4
    assert norm >= 5
    assert norm < torch.tensor(6.0)
    assert norm <= 5
    assert not norm > 5
    assert isinstance(norm > 4, torch.Tensor)  # no synchronization with the device
    infinite = gs.clip_gradients_(with_gradients([torch.tensor([math.inf])]), 1.0)
    assert float(infinite) == math.inf


# ---- Clipping --------------------------------------------------------------------------------------------------------


def test_nonfinite_gradients_are_named():
    gradients = [numbers(5, 0), numbers((3, 3), 1)]
    gradients[1][1, 1] = math.nan
    parameters = with_gradients([g.clone() for g in gradients])
    with pytest.raises(
        RuntimeError, match=r"NaN or inf in the gradients of 1 \(1 of 9 elements\); no gradient has been"
    ):
        gs.clip_gradients_(parameters, 1.0, nonfinite="error")
    for mine, before in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(mine.grad, before, rtol=0, atol=0, equal_nan=True)


def test_a_norm_beyond_float64_is_named():
    largest = torch.full((4,), 1.5e308, dtype=torch.float64)
    model = torch.nn.ParameterDict({"small": torch.zeros(1), "large": torch.zeros(4, dtype=torch.float64)})
    model["small"].grad, model["large"].grad = torch.ones(1), largest.clone()
    with pytest.raises(
        RuntimeError, match=r"beyond float64, with elements up to 1.5e\+308 in the gradient of large; no gradient"
    ):
        gs.clip_gradients_(model, 1.0, nonfinite="error")
    assert torch.equal(model["large"].grad, largest)


def test_forms_in_which_parameters_are_accepted():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    model[1].weight = model[1].weight
    names, numbers = list(dict(model.named_parameters())), ["0", "1", "2", "3"]
    named = list(model.named_parameters())
    for given, expected_names in ((model, names), (model.parameters(), numbers), (named, names), (iter(named), names)):
        model.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        statistics = gs.clip_gradients_(given, 0.1)
        assert statistics.total_norm.item() == pytest.approx(expected.item(), rel=1e-6)
        after = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        assert after.item() == pytest.approx(0.1, rel=1e-4)
        assert statistics.names == expected_names
    twice = list(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    assert gs.clip_gradients_([*twice, *twice], 1.0).names == ["0", "1", "2", "3"]
    one = torch.nn.Parameter(torch.zeros(2))
    one.grad = torch.tensor([3.0, 4.0])
    assert gs.clip_gradients_(one, 1.0).total_norm == 5


def test_a_gradient_shared_by_two_parameters_is_scaled_once():
    shared = torch.tensor([3.0, 4.0])
    a, b = torch.zeros(2), torch.zeros(2)
    a.grad = b.grad = shared
    gs.clip_gradients_([a, b], 1.0)
    torch.testing.assert_close(shared, torch.tensor([3.0, 4.0]) / math.sqrt(50))


class Named(torch.Tensor):
    """A subclass that PyTorch's functions keep."""


def _parameters_of_many_kinds() -> list[torch.Tensor]:
    gradients = [
        numbers((6, 4), 0),
        None,
        numbers(3, 1, torch.float16),
        torch.complex(numbers(4, 2), numbers(4, 3)).conj(),
        torch.sparse_coo_tensor([[1, 3]], numbers((2, 2), 4), (5, 2)),
        torch.zeros(0),
    ]
    parameters = []
    for gradient in gradients:
        parameters.append(torch.nn.Parameter(torch.zeros(2) if gradient is None else gradient.to_dense().clone()))
        parameters[-1].grad = gradient
    shared = torch.zeros(6, 4)
    shared.grad = parameters[0].grad
    return [*parameters, shared]


@pytest.mark.parametrize("max_norm", [0.5, 1e9, torch.tensor(0.5)])
def test_clipping_in_one_step_and_in_passes(max_norm):
    """The usual call is one step in C++; other calls are passes with steps of Python in between."""

    def clipped(parameters: list[torch.Tensor], given: Any, **options: Any) -> tuple[Any, ...]:
        statistics = gs.clip_gradients_(given, max_norm, **options)
        gradients = [None if p.grad is None else p.grad.to_dense().resolve_conj().tolist() for p in parameters]
        return gradients, statistics.names, statistics.clipping.tolist(), statistics.to_dict()

    def run(change: Callable[[list[torch.Tensor]], Any] = list, **options: Any) -> tuple[Any, ...]:
        parameters = _parameters_of_many_kinds()
        return clipped(parameters, change(parameters), **options)

    wanted = run()
    assert wanted == run(nonfinite="error")
    assert wanted == run(nonfinite="skip")
    assert wanted == run(lambda parameters: [*parameters, parameters[2], parameters[0]])
    assert wanted[0] == run(lambda parameters: [*parameters[:-1], _with_gradient_of(parameters[-1])])[0]
    watched = _parameters_of_many_kinds()
    with gs.GradientMonitor(torch.nn.ParameterList(watched[:-1]), torch.optim.SGD(watched[:-1], 0.1)):
        assert wanted == clipped(watched, watched)


def _with_gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    subclass = parameter.detach().as_subclass(Named)
    subclass.grad = parameter.grad
    return subclass


def test_a_tensor_that_is_no_leaf_has_no_gradient_and_pytorch_says_so():
    leaf = torch.ones(2, requires_grad=True)
    result = leaf * 2
    result.sum().backward()
    with pytest.warns(UserWarning, match="not a leaf Tensor"):
        statistics = gs.clip_gradients_([leaf, result], 0.1)
    assert statistics.missing.tolist() == [False, True]


def test_gradients_of_any_layout():
    """Sparse, strided and conjugate gradients are modified in place."""
    base = numbers((6, 8), 0)
    conjugate = torch.complex(numbers(4, 1), numbers(4, 2))
    gradients = [
        base.clone()[:, ::2],
        base.clone().T,
        conjugate.clone().conj(),
        torch.sparse_coo_tensor([[1, 3, 1]], numbers((3, 2), 3), (5, 2)),
        base.clone().to_sparse_csr(),
    ]
    dense = [gradient.to_dense().clone().resolve_conj() for gradient in gradients]
    norm = torch.cat([torch.view_as_real(d).flatten() if d.is_complex() else d.flatten() for d in dense]).norm()
    parameters = []
    for gradient in gradients:
        like = gradient if gradient.layout == torch.sparse_csr else gradient.to_dense()
        parameters.append(torch.zeros_like(like))
        parameters[-1].grad = gradient
    addresses = [p.grad.data_ptr() for p in parameters[:3]]
    statistics = gs.clip_gradients_(parameters, 1.0)
    assert statistics.total_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    for parameter, before in zip(parameters, dense, strict=True):
        torch.testing.assert_close(parameter.grad.to_dense().resolve_conj(), before / norm)
    assert addresses == [p.grad.data_ptr() for p in parameters[:3]]


# ---- Launches on a GPU -----------------------------------------------------------------------------------------------


def names_of_launches(call):
    names = []
    module._C.record_kernels(lambda file, name: names.append(name.split("<")[0]))
    try:
        call()
    finally:
        module._C.record_kernels(None)
    return names


@pytest.mark.parametrize(
    ("count", "size", "lists", "has_parts"),
    [(1000, 1000, 1, False), (1001, 1000, 2, False), (3, 65536, 1, False), (3, 65537, 1, True)],
    ids=["one list", "two lists", "one block each", "two blocks each"],
)
def test_launches(count, size, lists, has_parts):
    """The arguments of a launch hold the pointers to its tensors, so that no launch only copies them."""
    parameters = [torch.zeros(size, requires_grad=True) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.zeros(size)
    gradients = [parameter.grad for parameter in parameters]
    statistics = lists * ["chunk_statistics"] + has_parts * ["tensor_statistics"]
    assert names_of_launches(lambda: gs.gradient_statistics(gradients)) == statistics
    clipping = [*statistics, "find_clipping", *lists * ["scaled_units"]]
    assert names_of_launches(lambda: gs.clip_gradients_(parameters, 1.0)) == clipping
    assert names_of_launches(lambda: gs.l2_loss(parameters)) == [*lists * ["sums_of_squares"], "squares_total"]


def test_only_the_stored_elements_of_a_sparse_gradient_are_changed():
    memory = torch.ones(100)
    gradient = torch.sparse_coo_tensor([[1, 3]], memory[:4].view(2, 2), (20, 2), is_coalesced=True)
    assert gradient._values().data_ptr() == memory.data_ptr()
    parameter = torch.zeros(20, 2)
    parameter.grad = gradient
    gs.clip_gradients_([parameter], 1.0)
    assert memory.tolist() == pytest.approx([0.5] * 4 + [1.0] * 96, rel=1e-6)


either = pytest.mark.parametrize("limit", [{"max_norm": 1.0}, {"adaptive": 0.1}], ids=str)


@either
def test_expanded_gradients_are_rejected_before_any_write(limit):
    first, second = torch.zeros(2), torch.zeros(3)
    first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor(1.0).expand(3)
    with pytest.raises(RuntimeError, match="is an expanded tensor"):
        gs.clip_gradients_([first, second], **limit)
    assert first.grad.tolist() == [3.0, 4.0]


@either
def test_clipping_is_seen_by_autograd(limit):
    """The version counter of a gradient that autograd has saved increases."""
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    (x**2).sum().backward(create_graph=True)
    second = (x.grad**2).sum()
    gs.clip_gradients_([x], **limit)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    x.grad = None


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"max_norm": -1.0}, ValueError, "max_norm must be at least 0, but it is -1.0"),
        ({"max_norm": math.nan}, ValueError, "max_norm must be at least 0, but it is nan"),
        ({"max_norm": "x"}, TypeError, "max_norm must be a number, but it is of type str"),
        ({"max_norm": True}, TypeError, "max_norm must be a number, but it is of type bool"),
        ({"max_norm": np.bool_(True)}, TypeError, "max_norm must be a number, but it is of type bool"),
        ({"max_norm": torch.tensor(True)}, TypeError, "max_norm must be real, but it is a tensor of dtype torch.bool"),
        (
            {"max_norm": torch.tensor(1j)},
            TypeError,
            "max_norm must be real, but it is a tensor of dtype torch.complex64",
        ),
        (
            {"max_norm": torch.tensor([1.0])},
            ValueError,
            r"max_norm must be a real number or a tensor without dimensions, but it has shape \[1\]",
        ),
        ({"max_norm": torch.tensor(-1.0)}, ValueError, "max_norm must be at least 0, but it is -1.0"),
        ({"max_norm": torch.tensor(math.nan)}, ValueError, "max_norm must be at least 0, but it is nan"),
        ({"norm_type": 0}, ValueError, "norm_type must be greater than 0, but it is 0.0"),
        ({"norm_type": True}, TypeError, "norm_type must be a number, but it is of type bool"),
        ({"norm_type": "max"}, TypeError, "norm_type must be a number, but it is of type str"),
        ({"nonfinite": "drop"}, ValueError, "nonfinite must be 'propagate', 'skip' or 'error', but it is 'drop'"),
        (
            {"process_group": 3},
            TypeError,
            "process_group must be a torch.distributed.ProcessGroup or None, but it is of type int",
        ),
        (
            {"parameters": [1.0]},
            TypeError,
            r"parameters\[0\] must be a floating or complex tensor, but it is of type float",
        ),
    ],
)
def test_errors_of_clipping(change, error, words):
    p = with_gradients([torch.tensor([3.0, 4.0])])
    with pytest.raises(error, match=words):
        gs.clip_gradients_(**{"parameters": p, "max_norm": 1.0, **change})
    assert p[0].grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    "max_norm", [2, 2.0, 2.5, np.float32(2.5), np.array(2.0), Decimal(2), Fraction(5, 2), math.inf]
)
def test_numbers_that_are_limits(max_norm):
    p = with_gradients([torch.tensor([3.0, 4.0])])
    clipping = gs.clip_gradients_(p, max_norm).clipping
    factor = min(1, float(max_norm) / (5 + 1e-6))
    assert clipping.tolist() == [5.0, factor, factor != 1]
    torch.testing.assert_close(p[0].grad, torch.tensor([3.0, 4.0]) * factor)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64], ids=str)
@pytest.mark.parametrize("limit", [0, 2, 1000])
@pytest.mark.parametrize("norm_type", [2.0, "inf"])
def test_the_limits_and_norms_that_pytorch_accepts(dtype, limit, norm_type):
    ours, theirs, numbers = (with_gradients([torch.tensor([3.0, 4.0]), torch.tensor([12.0])]) for _ in range(3))
    found = gs.clip_gradients_(ours, torch.tensor(limit, dtype=dtype), norm_type=norm_type)
    by_number = gs.clip_gradients_(numbers, float(limit), norm_type=float(norm_type))
    total = torch.nn.utils.clip_grad_norm_(theirs, torch.tensor(limit, dtype=dtype), norm_type=norm_type)
    assert found.total_norm.item() == total.item() == (12.0 if norm_type == "inf" else 13.0)
    assert found.norm_type == float(norm_type)
    assert torch.equal(found.clipping, by_number.clipping)
    for ours_, theirs_, by_number_ in zip(ours, theirs, numbers, strict=True):
        assert torch.equal(ours_.grad, by_number_.grad)
        torch.testing.assert_close(ours_.grad, theirs_.grad)


def test_a_limit_that_requires_grad_gets_no_gradient():
    p, limit = with_gradients([torch.tensor([3.0, 4.0])]), torch.tensor(1.0, requires_grad=True)
    assert not gs.clip_gradients_(p, limit).clipping.requires_grad
    torch.testing.assert_close(p[0].grad, torch.tensor([0.6, 0.8]))


def test_a_negative_limit_on_a_device_gives_nan():
    values, counts = module._C.tensor_statistics([torch.tensor([3.0, 4.0])], 2.0)
    for library, limit in itertools.product((module._C, reference), (2.0, -1.0, math.nan, math.inf)):
        factor = library.clipping_of(values, counts, 2.0, torch.tensor(limit), False)[1].item()
        assert factor == pytest.approx(min(1, limit / 5) if limit >= 0 else math.nan, nan_ok=True)


EMPTY = {
    "clip_gradients_: parameters": lambda given: gs.clip_gradients_(given, 1e-3).total_norm,
    "gradient_statistics: tensors": lambda given: gs.gradient_statistics(given).total_norm,
    "l2_loss: parameters": lambda given: gs.l2_loss(given),
}


@pytest.mark.parametrize("argument", EMPTY)
def test_an_iterator_that_was_used_up_before_causes_a_warning(argument):
    """A list that is empty does not."""
    model = torch.nn.Linear(2, 1)
    parameters = model.parameters()
    torch.optim.SGD(parameters, lr=0.1)
    for given in (
        parameters,
        iter([]),
        filter(None, []),
        ((name, p) for name, p in model.named_parameters() if not name),
    ):
        with pytest.warns(
            UserWarning, match=f"^{argument} is an iterator without elements.* pass the model or a"
        ) as caught:
            assert EMPTY[argument](given) == 0
        assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert EMPTY[argument]([]) == EMPTY[argument](()) == EMPTY[argument](torch.nn.Tanh()) == 0
        assert EMPTY[argument](iter([torch.zeros(2)])) == 0


def test_reference_clips_the_same():
    """Other devices and contexts use the reference."""
    gradients = [
        numbers(40, 0),
        torch.sparse_coo_tensor([[1, 3]], numbers((2, 2), 3), (5, 2)),
        numbers(3, 1, torch.float16),
    ]
    for skip, bad in ((False, None), (True, None), (True, math.nan)):
        ours = [gradient.clone() for gradient in gradients]
        if bad is not None:
            ours[0][3] = bad
        theirs = [gradient.clone() for gradient in ours]
        for library, tensors in ((module._C, ours), (reference, theirs)):
            values, counts = library.tensor_statistics(tensors, 2.0)
            library.clip_units(tensors, library.clipping_of(values, counts, 2.0, 0.5, skip)[1:2], False, skip)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.to_dense(), b.to_dense())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_number_with_an_infinite_part_is_infinite(dtype):
    """The modulus is infinite for any value of the other part."""
    gradient = torch.tensor([complex("inf+nanj"), complex("nan+0j"), 3 + 4j], dtype=dtype)
    for statistics in (gs.gradient_statistics([gradient]), gs.gradient_statistics([gradient.conj()])):
        assert (statistics.infs.item(), statistics.nans.item(), statistics.norm.item()) == (1, 1, 5.0)


def test_a_gradient_that_the_kernels_do_not_accept_is_named_once():
    gs._context.say_once.cache_clear()
    x = torch.tensor([3.0, 4.0])
    words = r"^gradient_statistics: a gradient is not a plain torch.Tensor \(it is Float of shape \[2\] on cpu\)"
    with pytest.warns(UserWarning, match=words) as caught:
        found = gs.gradient_statistics([TwoTensor(x, x)])
    assert caught[0].filename == __file__
    assert torch.equal(found.norm.a, torch.tensor([5.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gs.gradient_statistics([TwoTensor(x, x)])
        torch.func.vmap(lambda row: gs.gradient_statistics([row]).norm)(x[None])


# ---- Gradients on several devices ------------------------------------------------------------------------------------

ON_SEVERAL_DEVICES = {
    "gradient_statistics": lambda parameters: gs.gradient_statistics(parameters),
    "histogram": lambda parameters: gs.gradient_statistics(parameters, histogram=True),
    "clip_gradients_": lambda parameters: gs.clip_gradients_(parameters, 1.0),
    "adaptive": lambda parameters: gs.clip_gradients_(parameters, adaptive=0.1),
}


def parameters_on(*devices):
    parameters = [torch.nn.Parameter(torch.ones(3, device=device)) for device in devices]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


@pytest.mark.parametrize("name", ON_SEVERAL_DEVICES)
def test_gradients_on_the_cpu_are_refused_while_a_graph_is_captured(name):
    """The CPU's part of the statistics is not computed again at a replay, which would copy it from reused memory.

    The meta device stands for a GPU."""
    with seeming_to_capture():
        ON_SEVERAL_DEVICES[name](parameters_on("meta", "meta"))
        with pytest.raises(ValueError, match="all gradients must be on meta while a CUDA graph is captured, but some"):
            ON_SEVERAL_DEVICES[name](parameters_on("meta", "cpu"))


class Copies(TorchDispatchMode):
    """Collects the destination and the non_blocking of all copies between devices."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default:
            self.found.append((kwargs["device"].type, kwargs.get("non_blocking", False)))
        return function(*args, **kwargs)


def test_the_host_waits_for_results_that_it_reads():
    """A copy from a GPU that the host does not wait for is in pinned memory, and not there yet when it is read."""
    with FakeTensorMode(), Copies() as copies:
        result = torch.zeros(3, device="cuda")
        assert passes.moved_to(result.device, result) is result
        passes.moved_to(result.device, passes.moved_to(torch.device("cpu"), result))
    assert copies.found == [("cpu", False), ("cuda", True)]


@pytest.mark.parametrize("rows", [False, True])
def test_shapes_of_the_operators_without_values(rows):
    """The functions that allocate the results give their shapes to tracers."""
    found = []
    for device in ("cpu", "meta"):
        gradients = [torch.ones(3, 4, device=device), None, torch.ones(5, device=device)]
        values, counts, norms = operators.tensor_statistics(gradients, 2.0, gradients, rows)
        clipping = operators.clipping_of(values, counts, 2.0, 1.0, False)
        factors = operators.unit_factors(norms, clipping, 0.1, 1e-3, False)
        given = [gradient for gradient in gradients if gradient is not None]
        operators.clip_units(given, factors[0], rows, False)
        found.append([(x.shape, x.stride(), x.dtype) for x in (values, counts, norms, clipping, *factors)])
    assert found[1] == found[0]
    assert found[0][2][0] == (2, 4 if rows else 2)
    for operator in ("tensor_statistics", "clipping_of", "unit_factors", "clip_units"):
        assert torch._library.simple_registry.singleton.find(f"gradscale_ext::{operator}").fake_impl.kernel is None
