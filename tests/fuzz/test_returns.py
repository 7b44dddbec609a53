"""Returns: every size, dtype, layout, form of the coefficients, NaN and inf, against the reference.

The reference is compared with loops in Python's numbers here, and with definitions in tests/test_returns.py. The
targets of MuZero are compared with their definition.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from test_returns import CLIPS, FLAGS, FUNCTIONS, call, inputs_of
from trajectories import looped, muzero_row, random_data

import gradscale_ext as gs

from .budget import fuzz
from .strategies import SEEDS, Described, Watched, laid_out, precise, product
from .strategies import random as random_of

Tensor = torch.Tensor
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
COEFFICIENTS = ("discount", "lambda_", "ratios")
LARGEST_LOOP = 1000  # steps that the loops in Python's numbers take


@dataclass(frozen=True)
class Case(Described):
    function: str = "lambda_returns"
    batch: int = 3
    steps: int = 9
    batch_first: bool = True
    observations: bool = False
    """True if `values` includes the value of the last observation: its shape is `[B, T + 1]`."""
    flags: str = "all"
    """Which of the flags are given: "all", "none", or the name of one flag."""
    ends: float = 0.1
    """The share of steps that are terminated, and of steps that are truncated."""
    discount: str = "full"
    lambda_: str = "full"
    n: int = 3
    clip: float | None = 1.0
    special: str = "none"
    """Special numbers. "inputs": some rewards and values are NaN or inf, some ratios inf, some coefficients 0.
    "coefficients": some coefficients are also NaN. "at blocks": as "inputs", mostly near multiples of 256 steps."""
    dtypes: tuple[torch.dtype, ...] = (F32,)
    """The tensors of a call get these dtypes in turn, and the layouts likewise."""
    layouts: tuple[str, ...] = ("contiguous",)
    create_graph: bool = False
    seed: int = 0

    def tensors(self) -> dict[str, Any]:
        """The arguments of a call."""
        data = random_data(self.seed, self.batch, self.steps, self.ends, self.ends / 2)
        self._spoil(data, torch.Generator().manual_seed(self.seed))
        if self.observations:
            data["values"] = torch.nn.functional.pad(data["values"], (0, 1), value=0.5)
        for index, (name, value) in enumerate(data.items(), self.seed):
            layout = self.layouts[index % len(self.layouts)]
            if name in FLAGS:
                layout = layout if layout != "negative" else "rows"
            else:
                value = value.to(self.dtypes[index % len(self.dtypes)])
            data[name] = laid_out(value if self.batch_first else value.T, layout)
        data |= {flag: None for flag in FLAGS if self.flags not in ("all", flag)}
        if self.observations:
            data |= {"next_values": None, "truncated": None}
        return data | {name: self._form(data[name], getattr(self, name)) for name in ("discount", "lambda_")}

    def _spoil(self, data: dict[str, Tensor], generator: torch.Generator) -> None:
        if self.special == "none":
            return
        steps, share = torch.arange(self.steps), torch.tensor(0.02)
        if self.special == "at blocks":
            share = torch.where(((steps + 2) % 256 < 4) | ((-steps) % 256 < 3), 0.1, 0.002)
        for name in ("rewards", "values", "next_values", *COEFFICIENTS):
            drawn = torch.rand(data[name].shape, generator=generator)
            if name not in COEFFICIENTS or self.special == "coefficients":
                data[name] = torch.where(drawn < share / 2, torch.nan, data[name])
            if name not in COEFFICIENTS[:2]:
                data[name] = torch.where((drawn > 0.5) & (drawn < 0.5 + share / 2), torch.inf, data[name])
            if name in COEFFICIENTS:
                data[name] = torch.where(drawn > 1 - 5 * share, 0, data[name])

    def _form(self, value: Tensor, form: str) -> Any:
        rows, steps = (slice(None), slice(1)) if self.batch_first else (slice(1), slice(None))
        return {
            "full": value,
            "rows": value[rows, steps],
            "steps": value[steps, rows],
            "one": value[:1, :1],
            "float32": torch.tensor(0.3),
            "float64": torch.tensor(0.3, dtype=F64),
        }.get(form, float(form) if form[0] in "-01" else None)

    def options(self) -> dict[str, Any]:
        clip = self.clip if self.steps < 20 or self.clip is not None else 1.0  # products of ratios would overflow
        options: dict[str, Any] = {
            name: clip and clip * (index + 1) for index, name in enumerate(CLIPS.get(self.function, ()))
        }
        options["batch_first"] = self.batch_first
        return options | ({"n": self.n} if self.function == "n_step_returns" else {})


def by_loops(case: Case, data: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """The results of the documentation's recurrences, in Python's numbers."""
    rewards = data["rewards"]
    defaults: dict[str, Any] = {"terminated": False, "truncated": False, "mask": True, "values": 0, "ratios": 1}
    wide = {}
    for name in ("rewards", "values", "next_values", *COEFFICIENTS, *FLAGS):
        value = defaults.get(name) if data.get(name) is None else data[name]
        if name == "next_values" and value is None:
            value = data["values"].narrow(1 if case.batch_first else 0, 1, case.steps)
        elif name == "values" and case.observations:
            value = value.narrow(1 if case.batch_first else 0, 0, case.steps)
        tensor = torch.as_tensor(value, dtype=torch.bool if name in FLAGS else F64).expand(rewards.shape)
        wide[name] = tensor.detach() if case.batch_first else tensor.detach().T
    clips = [options.get(name) for name in CLIPS.get(case.function, ())]
    results = looped(case.function, wide, case.n, clips)
    return tuple(result if case.batch_first else result.T for result in results)


_sizes = product(
    dict,
    batch=(3, 0, 1, 2, 5, 20, 70),
    steps=(9, 0, 1, 5, 16, 17, 21, 40, 47, 130, 300, 520),  # longer rows: test_returns.py and test_cuda.py
    batch_first=(True, False),
    observations=(False, False, True),
    flags=("all", "all", "none", *FLAGS),
    ends=(0.1, 0.0, 0.01),
    special=("none", "none", "inputs", "coefficients", "at blocks"),
    seed=SEEDS,
)
_coefficients = ("full", "full", "full", "rows", "steps", "one", "float32", "float64", "0", "1", "0.3")
_layouts = (
    ("contiguous",),
    ("columns", "transposed", "rows"),
    ("expanded", "contiguous", "contiguous"),
    ("contiguous", "all_expanded", "numpy", "offset", "negative"),
)
_others = product(
    dict,
    function=tuple(FUNCTIONS),
    discount=(*_coefficients, "-1"),
    lambda_=_coefficients,
    n=(3, 1, 2, 7, 16, 40, 10**12),
    clip=(1.0, 0.5, 1.7, 0.0, None),
    create_graph=(False, False, True),
    dtypes=((F32,), (F64,), (F32, F64, BF16, F16), (BF16, F16), (F32, BF16)),
    layouts=_layouts,
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    case = Case(**draw(_sizes), **draw(_others))
    n = min(case.n, 40) if case.steps > 300 else case.n  # the reference takes n steps for each result
    observations = case.observations and case.function != "retrace"
    return dataclasses.replace(case, n=n, observations=observations)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    finite = expected[expected.isfinite()]
    largest = max(1.0, finite.abs().max().item() if finite.numel() else 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


@fuzz(cases(), examples=120)
def test_returns(case: Case) -> None:
    data, options = case.tensors(), case.options()
    names = [name for name in inputs_of(case.function) if data[name] is not None]
    names += ["values"] * (case.observations and "values" not in names)
    wide = {name: value.double() if _is_floating(value) else value for name, value in data.items()}
    given = [data[name] for name in ("rewards", "values", "next_values", "discount", *FUNCTIONS[case.function][0])]
    watched = Watched(*data.values())
    results = []
    for arguments, module in ((data, gs), (wide, gs.reference)):
        arguments |= {name: arguments[name].detach().requires_grad_() for name in names}
        results.append(call(case.function, arguments, module, **options))
    is_double = any(_is_floating(value) and value.dtype == F64 for value in given)
    tolerance = 1e-9 if is_double else 3e-5
    for found, expected in zip(*results, strict=True):
        assert found.dtype == (F64 if is_double else F32)
        assert found.is_contiguous()
        assert_near(found.detach(), expected.detach(), tolerance)
    if case.batch * case.steps <= LARGEST_LOOP:
        for result, expected in zip(results[1], by_loops(case, data, case.options()), strict=True):
            assert_near(result.detach(), expected, 1e-9)
    watched.check(case.function)
    if case.special == "coefficients" or not case.batch * case.steps:
        return  # a coefficient that is NaN may reach a gradient, or not
    weights = [torch.linspace(-1, 2, found.numel()).reshape(found.shape).double() for found in results[0]]
    if case.special != "none":
        bad = torch.rand(weights[0].shape, generator=torch.Generator().manual_seed(case.seed)) < 0.02
        weights[0] = torch.where(bad, torch.nan, weights[0])
    gradients = []
    for arguments, outputs in zip((data, wide), results, strict=True):
        grad_outputs = [weight.to(output.dtype) for weight, output in zip(weights, outputs, strict=True)]
        leaves = [arguments[name] for name in names]
        options = {"create_graph": case.create_graph, "materialize_grads": True}
        gradients.append(torch.autograd.grad(outputs, leaves, grad_outputs, **options))
    for name, found, expected in zip(names, *gradients, strict=True):
        assert found.dtype == data[name].dtype
        info, found, expected = torch.finfo(found.dtype), found.detach(), expected.detach()
        overflows = (expected.abs() > 0.99 * info.max) & (found.abs() > 0.98 * info.max)  # of half types
        assert_near(found, torch.where(overflows, found.double(), expected), max(tolerance, info.eps))
    watched.check(case.function)


@fuzz(cases(), examples=30)
def test_n_step_transitions(case: Case) -> None:
    n = min(case.n, max(1500 // max(case.steps, 1), 1))  # the reference takes n steps for each result
    case = dataclasses.replace(case, function="n_step_returns", observations=False, n=n)
    data, options = case.tensors(), case.options()
    given = {name: data[name] for name in ("rewards", "discount", *FLAGS)}
    watched = Watched(*given.values())
    found = []
    for module in (gs, gs.reference):
        wide = {name: value.double() if _is_floating(value) else value for name, value in given.items()}
        arguments = given if module is gs else wide
        arguments = arguments | {"rewards": arguments["rewards"].detach().requires_grad_()}
        parts = module.n_step_transitions(**arguments, **options)
        weights = torch.linspace(-1, 2, parts.steps.numel()).view(parts.steps.shape).to(parts.rewards.dtype)
        gradients = torch.autograd.grad(parts.rewards, arguments["rewards"], weights) if parts.steps.numel() else ()
        found.append((*parts, *gradients))
    is_double = any(_is_floating(given[name]) and given[name].dtype == F64 for name in ("rewards", "discount"))
    assert [part.dtype for part in found[0][:3]] == [F64 if is_double else F32] * 2 + [torch.int64]
    tolerance = 1e-9 if is_double else 3e-5
    for ours, expected in zip(*found, strict=True):
        eps = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
        assert_near(ours.detach(), expected.detach().double(), max(tolerance, eps))
    assert torch.equal(found[0][2], found[1][2])
    watched.check("n_step_transitions")


@dataclass(frozen=True)
class WindowCase(Described):
    rows: int = 3
    moves: int = 6
    unroll_steps: int = 4
    td_steps: int = 3
    horizons: str = "number"
    """The form of `td_steps`: "number", "rows", or "entries" (of rows and unroll steps). Tensors hold numbers around
    it, and some of less than 1."""
    batch_first: bool = True
    has_lengths: bool = True
    player_dtype: torch.dtype | None = None
    wrong: str = "nothing"
    """What is wrong in the last row: "nothing", its "length", or a third "player" at the last entry that is read."""
    discount: str = "number"
    horizon: int = 0
    """0: rewards are not summed."""
    has_root_reward: bool = False
    dtypes: tuple[torch.dtype, ...] = (F32,)
    layout: str = "contiguous"
    check: bool = False
    seed: int = 0

    def rows_of_arguments(self) -> dict[str, np.ndarray]:
        """Tensor arguments, `[B, ...]`. Entries that no target reads are NaN, or players of -1."""
        g = random_of("windows", self.seed)
        lengths = g.integers(0, self.moves + 1, self.rows) if self.has_lengths else np.full(self.rows, self.moves)
        over = g.random(self.rows) < 0.5
        index, last = np.arange(self.moves + 1), (lengths - over)[:, None]
        rewards = np.where(index[:-1] < lengths[:, None], g.standard_normal((self.rows, self.moves)), np.nan)
        root_values = np.where(index <= last, g.standard_normal((self.rows, self.moves + 1)), np.nan)
        arrays = {"rewards": rewards, "root_values": root_values, "terminated": over}
        if self.player_dtype is not None and not self.horizon:
            behind = 0 if self.player_dtype == torch.bool else -1
            players = np.where(index <= last, g.integers(0, 2, root_values.shape), behind)
            end = min(last[-1, 0], self.unroll_steps + self.td_steps)
            if self.wrong == "player" and self.player_dtype != torch.bool and end > 1:
                players[-1, [0, 1, end]] = [0, 1, 2]
            arrays["to_play"] = players
        if self.has_lengths:
            lengths[-1] = (self.moves + 1, -1, 2**60)[self.seed % 3] if self.wrong == "length" else lengths[-1]
            arrays["lengths"] = lengths
        if self.has_root_reward:
            arrays["root_reward"] = g.standard_normal(self.rows)
        if self.discount == "rows":
            arrays["discount"] = g.uniform(-1, 1, (self.rows, 1))
        if self.horizons != "number":
            shape = (self.rows, self.unroll_steps + 1) if self.horizons == "entries" else (self.rows,)
            arrays["td_steps"] = g.integers(-1, 3, shape) + self.td_steps
            arrays["td_steps"][-1] = self.td_steps  # the row with a third player
        return arrays

    def tensors(self) -> dict[str, Any]:
        """The arguments of a call, except numbers of steps."""
        given: dict[str, Any] = {"discount": {"0": 0, "0-dim": torch.tensor(0.75)}.get(self.discount, 0.75)}
        for index, (name, array) in enumerate(self.rows_of_arguments().items()):
            dtype = self.player_dtype if name == "to_play" else self.dtypes[index % len(self.dtypes)]
            tensor = torch.from_numpy(array)
            tensor = tensor.to(dtype) if name == "to_play" or tensor.is_floating_point() else tensor
            layout = "contiguous" if tensor.dtype == torch.bool and self.layout == "negative" else self.layout
            given[name] = laid_out(tensor if self.batch_first or tensor.dim() == 1 else tensor.T, layout)
        return given

    def is_wrong(self, given: dict[str, Any]) -> bool:
        return (self.wrong == "length" and self.has_lengths) or (
            "to_play" in given and bool((given["to_play"] == 2).any())
        )

    def by_definition(self, given: dict[str, Any]) -> list[Tensor]:
        exact = {name: precise(x) if isinstance(x, Tensor) else np.array(x) for name, x in given.items()}
        exact = {name: x if self.batch_first or x.ndim < 2 else x.T for name, x in exact.items()}
        rows = []
        for b in range(self.rows):
            row = {name: x[b] if x.ndim else x for name, x in exact.items()}
            length, gamma = int(row.get("lengths", self.moves)), float(row["discount"].item())
            n = np.minimum(row.get("td_steps", self.td_steps), self.moves + 1)
            own = (row.get("to_play"), self.horizon, row.get("root_reward"))
            over = bool(row["terminated"])
            rows.append(muzero_row(row["rewards"], row["root_values"], length, over, self.unroll_steps, n, gamma, *own))
        return [torch.from_numpy(np.stack(field)) for field in zip(*rows, strict=True)]


_windows = product(
    dict,
    rows=(3, 1, 17),
    moves=(6, 1, 11, 0),
    unroll_steps=(4, 0, 1, 12),
    td_steps=(3, 1, 7, 10**12),
    horizons=("number", "rows", "entries"),
    batch_first=(True, False),
    has_lengths=(True, True, False),
    player_dtype=(None, torch.int64, torch.int8, torch.bool),
    wrong=("nothing", "nothing", "length", "player"),
    discount=("number", "0-dim", "rows", "0"),
    horizon=(0, 0, 3),
    has_root_reward=(False, True),
)
_window_details = product(
    dict,
    dtypes=((F32,), (F64,), (BF16, F16), (F32, F64)),
    layout=("contiguous", "transposed", "columns", "rows", "negative", "offset"),
    check=(False, True),
    seed=SEEDS,
)


@st.composite
def window_cases(draw: st.DrawFn) -> WindowCase:
    return WindowCase(**draw(_windows), **draw(_window_details))


@fuzz(window_cases(), examples=120)
def test_muzero_targets(case: WindowCase) -> None:
    given = case.tensors()
    steps: dict[str, Any] = {"num_unroll_steps": case.unroll_steps}
    steps |= {"td_steps": case.td_steps} if case.horizons == "number" else {}
    steps |= {"reward": "value_prefix", "prefix_horizon": case.horizon} if case.horizon else {}
    watched = Watched(*given.values())
    is_double = any(_is_floating(value) and value.dtype == F64 for value in given.values())
    for module in (gs, gs.reference):
        options = {**given, **steps, "batch_first": case.batch_first, "check": case.check}
        if case.is_wrong(given):
            with pytest.raises(ValueError, match=r"^muzero_targets: (lengths|to_play) must "):
                module.muzero_targets(**options)
            continue
        results = module.muzero_targets(**options)
        for found, expected in zip(results, case.by_definition(given), strict=True):
            assert found.dtype == (torch.bool if expected.dtype == torch.bool else F64 if is_double else F32)
            assert_near(
                (found if case.batch_first else found.T).double(), expected.double(), 1e-12 if is_double else 1e-5
            )
    watched.check("muzero_targets")


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
