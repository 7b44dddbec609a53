"""The multi-step loss: every head, form, dtype, layout, weight, mask, reduction and context, against the formulas."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import gradscale_ext as gs

from . import formulas
from .budget import fuzz
from .strategies import (
    LAYOUTS,
    REAL,
    REPEATING,
    SEEDS,
    Described,
    Watched,
    bits,
    check_close,
    eps_of,
    laid_out,
    precise,
    product,
    random,
)

Tensor = torch.Tensor
Array = np.ndarray

ROUNDED = 4.0
"""Units in the last place of the dtype in which a head computes, for each magnitude that enters a loss or gradient."""
SUMMED = 16.0
"""The same for a sum over heads, steps and samples, of up to 180 terms."""

SUPPORTS = (
    *(gs.Support(-2, 2, 5, "identity"), gs.Support(-5, 5, 11), gs.Support(-3, 4, 9, "symlog")),
    *(gs.Support(-4, 6, 9, "symlog", space="raw"), gs.Support(-1, 1, 2, "identity"), gs.Support(0, 20, 21)),
    *(gs.Support(-1, 1, 2, "symlog", space="raw"), gs.Support(0.1, 0.7, 4, "identity", space="raw")),
    *(gs.Support(-10, 10, 31, eps=1e-2, space="raw"), gs.Support(-6, 2, 17, eps=0.0), gs.Support.tdmpc2()),
    *(gs.Support(-20, 20, 40, "symlog"), gs.Support.muzero(10), gs.Support(-3, 3, 8, eps=1.0)),
    *(gs.Support(-7.3, 9.1, 33), gs.Support(-9.1, 7.3, 16), gs.Support(-7.3, 9.1, 15, "symlog", space="raw")),
)
WIDE_SUPPORTS = (gs.Support.muzero(), gs.Support.dreamer_v3(), gs.Support.tdmpc2(), gs.Support(-7.3, 9.1, 1025))


# ---- Heads ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadCase:
    """The description of a head with its prediction and target."""

    head: Any
    width: int
    """Width of a prediction, where the head has no support or choices; 0 for `[B]`."""
    classes: bool = False
    dtype: torch.dtype = torch.float32
    form: str = "list"
    layout: str = "contiguous"
    logits: str = "ordinary"
    target_form: str = "list"
    target_dtype: torch.dtype = torch.float32
    target_layout: str = "contiguous"
    targets: str = "ordinary"
    requires_grad: bool = True
    mixed: bool = False
    """True if fields have different forms, layouts and dtypes."""
    shared: bool = False
    """True if one `log_stds` is for all samples and steps."""
    fewer: bool = False
    """True if fields that are not needed are left out, and `log_stds` gets no gradient."""

    def wants_gradient(self, field: str) -> bool:
        return self.requires_grad and not (self.fewer and field == "log_stds")

    def is_class(self, field: str) -> bool:
        return self.classes or (field == "actions" and isinstance(self.head, gs.PolicyGradient))

    def form_of(self, field: str, form: str, index: int) -> str:
        """The form of a field by its index. `form` is the form of the first field."""
        if self.shared and field == "log_stds":
            return "shared"
        return FORMS[(FORMS.index(form) + index * self.mixed) % len(FORMS)]

    def dtype_of(self, dtype: torch.dtype, index: int) -> torch.dtype:
        """Fields with float64 all are of float64."""
        return dtype if dtype == torch.float64 else REAL[1 + (REAL.index(dtype) - 1 + index * self.mixed) % 3]

    def layout_of(self, layout: str, index: int, is_class: bool = False) -> str:
        layout = LAYOUTS[(LAYOUTS.index(layout) + index * self.mixed) % len(LAYOUTS)]
        if is_class and layout == "negative":
            return "rows"
        # An action of one choice may be out of range in another.
        is_one_of_several = is_class and getattr(self.head, "choices", None)
        return "expanded" if is_one_of_several and layout in REPEATING else layout

    def prediction_width(self) -> tuple[int, ...]:
        if hasattr(self.head, "support"):
            return (self.head.support.num_bins,)
        if isinstance(self.head, gs.CategoricalKL):
            return (2, self.width)
        width = sum(getattr(self.head, "choices", None) or [self.width])
        return (width,) if width else ()

    def prediction(self, batch: int, steps: int, generator: np.random.Generator) -> formulas.Fields:
        """`[B, T_h, ...]` by field."""
        if isinstance(self.head, gs.GaussianPolicyGradient):
            shape = (batch, steps, self.width)
            log_stds = generator.standard_normal(shape[2:] if self.shared else shape)
            log_stds = np.broadcast_to(log_stds * {"flat": 0.0, "sharp": 3.0}.get(self.logits, 0.5), shape)
            return {"means": self._numbers(shape, generator), "log_stds": np.array(log_stds)}
        return {"": self._numbers((batch, steps, *self.prediction_width()), generator)}

    def _numbers(self, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
        x = generator.standard_normal(shape)
        scale = {"flat": 0.0, "sharp": 60.0, "tiny": 1e-4}.get(self.logits, 2.0)
        x = x * scale + (300 if self.logits == "shifted" else 0)
        # Extreme targets have probabilities that are 0 in float32 but not in float64: only the true divergence from an
        # illegal action would be infinite.
        is_divergence = isinstance(self.head, gs.CategoricalKL) and self.targets != "outside"
        if self.logits == "illegal" and (
            is_divergence or isinstance(self.head, gs.SoftCrossEntropy | gs.PolicyGradient)
        ):
            illegal = generator.random(x.shape) < 0.3
            if len(shape) > 2:
                illegal[..., np.cumsum([0, *(getattr(self.head, "choices", None) or [])[:-1]])] = False
            x[illegal] = -np.inf if len(shape) > 2 else generator.choice([-np.inf, np.inf])  # log-probabilities
        return x

    def target(self, x: formulas.Fields, generator: np.random.Generator) -> formulas.Fields:
        if isinstance(self.head, gs.PerStepLoss):
            return {}
        if isinstance(self.head, gs.ClippedSquaredError):
            returns, values = (generator.standard_normal(x[""].shape) for _ in range(2))
            scale = {"outside": 1e4, "edges": 1e-3}.get(self.targets, 2.0) * (self.targets != "special")
            fields = {"returns": returns * scale, "values": x[""] + values * 0.3}
            if self.targets == "special":
                fields["values"][generator.random(x[""].shape) < 0.3] = generator.choice([np.inf, -np.inf])
            return {"returns": fields["returns"]} if self.fewer and self.head.clip is None else fields
        if isinstance(self.head, gs.PolicyGradient | gs.GaussianPolicyGradient):
            return self._policy_target(x, generator)
        return {"": self._plain_target(x[""], generator)}

    def _policy_target(self, x: formulas.Fields, generator: np.random.Generator) -> formulas.Fields:
        head, shape, fields = self.head, next(iter(x.values())).shape[:2], {}
        if "means" in x:
            fields["actions"] = x["means"] + np.exp(x["log_stds"]) * generator.standard_normal(x["means"].shape)
        elif x[""].ndim == 3:
            # Special actions may be illegal.
            allowed = [np.isfinite(logits) | (self.targets == "special") for logits in formulas.groups(head, x[""])]
            actions = [np.argmax(np.where(legal, generator.random(legal.shape), -1), -1) for legal in allowed]
            fields["actions"] = np.stack(actions, -1) if head.choices else actions[0]
        rows = [{name: field.reshape(-1, *field.shape[2:]) for name, field in each.items()} for each in (x, fields)]
        log_prob = formulas.action_log_probs(head, *rows)[0].reshape(shape)
        advantages = generator.standard_normal(shape)
        if self.targets == "outside":
            advantages = 1e4 * generator.uniform(-1, 1, shape)
        if self.targets in ("edges", "special"):
            advantages = generator.choice([0.0, -0.0, 1.0, -1.0], shape)
        fields["advantages"] = advantages
        names = ["log_probs"] if head.surrogate != "log" or not self.fewer else []
        for name in [*names, *(["reference_log_probs"] if head.kl_weight else [])]:
            other = np.where(np.isfinite(log_prob), log_prob, -1) + 0.3 * generator.standard_normal(shape)
            if self.targets == "special":
                other = np.where(
                    generator.random(shape) < 0.5, other, generator.choice([-np.inf, np.inf, -200.0], shape)
                )
            fields[name] = other
        return fields

    def _plain_target(self, x: Array, generator: np.random.Generator) -> Array:
        shape = x.shape[:2]
        if hasattr(self.head, "support"):
            support = self.head.support
            low, high = formulas.transformed_back(
                np.array([support.minimum, support.maximum], float), support.transform, support.eps
            )
            inside = formulas.transformed_back(
                generator.uniform(support.minimum, support.maximum, shape), support.transform, support.eps
            )
            centers = formulas.transformed_back(
                np.linspace(support.minimum, support.maximum, support.num_bins), support.transform, support.eps
            )
            return {
                "edges": lambda: generator.choice([low, high, 0.0, -0.0], shape),
                "outside": lambda: generator.choice([low * 3 - 1, high * 3 + 1, np.inf, -np.inf], shape),
                "special": lambda: generator.choice(centers, shape),
            }.get(self.targets, lambda: inside)()
        if isinstance(self.head, gs.SoftCrossEntropy):
            legal = np.isfinite(x) | np.isnan(x)
            if self.classes:
                return np.argmax(np.where(legal, generator.random(x.shape), -1), -1)
            t = generator.random(x.shape) * legal
            if self.targets == "special":  # not normalised, with zeros
                return t * (generator.random(x.shape) < 0.5)
            if self.targets == "edges":  # one-hot
                return np.eye(x.shape[-1])[np.argmax(t, -1)]
            return t / t.sum(-1, keepdims=True)
        if isinstance(self.head, gs.BinaryCrossEntropy):
            inside = generator.random(shape)
            return np.round(inside) if self.targets in ("edges", "special") else inside
        scale = {"outside": 1e4, "edges": 1e-3}.get(self.targets, 2.0) * (self.targets != "special")
        if isinstance(self.head, gs.QuantileHuber):
            return generator.standard_normal((*shape, 1 + (self.width * 7) % 45)) * scale
        if isinstance(self.head, gs.CategoricalKL):
            return generator.standard_normal(x.shape) * min(scale, 60.0)
        return generator.standard_normal(x.shape) * scale


def _kinds() -> st.SearchStrategy[dict[str, Any]]:
    weights = {"weight": (1.0, 0.25, 0.0, 3.0), "first_step": (0, 0, 0, 1)}
    smoothing = (0.0, 0.0, 0.1, 1.0)

    def with_support(head: type, **options: Any) -> Callable[..., dict[str, Any]]:
        return lambda support, **more: {"head": head(support, **more), "width": 0}

    def without(head: type) -> Callable[..., dict[str, Any]]:
        return lambda width=0, classes=False, **more: {"head": head(**more), "width": width, "classes": classes}

    supports = SUPPORTS * 3 + WIDE_SUPPORTS
    widths = (4, 2, 3, 8, 15, 16, 17, 33, 40)

    def policy(head: type) -> Callable[..., dict[str, Any]]:
        def build(surrogate: str, clip: Any, size: Any = 0, **more: Any) -> dict[str, Any]:
            own = {name: more.pop(name) for name in ("shared", "fewer") if name in more}
            more["clip"] = None if surrogate == "log" else clip if clip is not None or surrogate == "ppo" else (1, 4)
            more["dual_clip"] = more["dual_clip"] if surrogate == "ppo" else None
            more["entropy_weight"] = more["entropy_weight"] if size else 0.0
            if isinstance(size, tuple):
                more["choices"], size = size, 0
            return {"head": head(surrogate=surrogate, **more), "width": size, **own}

        return build

    of_policies = {
        **weights,
        "surrogate": ("ppo", "ppo", "log", "cispo"),
        "clip": (0.2, (0.1, 0.3), None, 0, (1.5, 0.5), 1e4),
        "dual_clip": (None, 1.5),
        "entropy_weight": (0.0, 0.3, -0.2),
        "kl_weight": (0.0, 0.0, 0.1),
        "fewer": (False, True),
    }
    several = ((3, 3), (2,), (3, 5, 2), (40, 1, 7, 40))
    return st.one_of(
        product(with_support(gs.TwoHot), **weights, label_smoothing=smoothing, support=supports),
        product(with_support(gs.HLGauss), **weights, sigma_ratio=(0.75, 0.1, 4.0, 1e-300, 1e6), support=supports),
        product(
            without(gs.SoftCrossEntropy),
            **weights,
            label_smoothing=smoothing,
            entropy_weight=(0.0, 0.0, 0.3, -0.2),
            subtract_target_entropy=(False, True),
            classes=(False, True),
            width=(*widths, 601, 1025),
        ),
        product(
            without(gs.MeanSquaredError),
            **weights,
            transform=("identity", "signed_hyperbolic", "symlog"),
            width=(0, 1, *widths),
        ),
        product(
            without(gs.Huber),
            **weights,
            delta=(1.0, 0.1, 30.0, 1e30),
            transform=("identity", "signed_hyperbolic", "symlog"),
            width=(0, 1, *widths),
        ),
        product(without(gs.BinaryCrossEntropy), **weights),
        product(without(gs.NegativeCosine), **weights, eps=(1e-8, 0.5), width=(1, *widths)),
        product(
            without(gs.QuantileHuber),
            **weights,
            kappa=(1.0, 0.0, 0.1, 30.0),
            sum_over_quantiles=(True, False),
            width=(1, *widths),
        ),
        product(
            without(gs.CategoricalKL),
            **weights,
            unimix=(0.01, 0.0, 0.5, 1.0),
            free_nats=(0.0, 1.0),
            prediction=("q", "p"),
            width=(1, *widths),
        ),
        product(without(gs.PerStepLoss), **weights),
        product(policy(gs.PolicyGradient), **of_policies, size=(*widths, 0, 0, 0, 1, 601, *several)),
        product(policy(gs.GaussianPolicyGradient), **of_policies, size=(3, 1, 2, 6, 17, 40), shared=(False, True)),
        product(
            lambda clip, fewer, **more: {"head": gs.ClippedSquaredError(clip=clip, **more), "width": 0, "fewer": fewer},
            **weights,
            clip=(0.2, None, 0.0, 30.0),
            fewer=(False, True),
        ),
    )


FORMS = ("list", "stacked", "tuple", "unbound", "same")
_predictions = product(
    dict,
    logits=("ordinary", "flat", "sharp", "shifted", "tiny", "illegal"),
    dtype=(torch.float32, torch.float32, *REAL),
    form=FORMS,
    requires_grad=(True, True, True, True, False),
    layout=LAYOUTS,
    mixed=(False, True),
)
_targets = product(
    dict,
    targets=("ordinary", "edges", "outside", "special"),
    target_dtype=(torch.float32, torch.float32, *REAL),
    target_form=FORMS,
    target_layout=LAYOUTS,
)
_heads = _kinds()


# ---- Cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case(Described):
    heads: tuple[HeadCase, ...]
    batch: int = 3
    steps: int = 2
    batch_first: bool = True
    step_weights: str = "none"
    step_gradient_scale: str = "none"
    importance_weights: bool = False
    by_head: bool = False
    """True if the weights of steps and samples are mappings, in which some heads are missing."""
    head_weights: str = "none"
    mask: str = "none"
    poison: str = "none"
    """Place of NaN and inf: "masked", "anywhere", or "none"."""
    reduction: str = "mean"
    nonfinite: str = "propagate"
    grad_output: str = "one"
    context: str = "function"
    weights_layout: str = "contiguous"
    seed: int = 0


class Leaf(NamedTuple):
    """A tensor of a prediction."""

    key: tuple[str, str]
    """Its head and field."""
    what: str
    tensor: Tensor
    part: Callable[[Array], Array]
    """Compute the gradient of the tensor from the gradient of all entries `[B, T_h, ...]`."""
    uses: int = 1
    """Number of gradients of its dtype that are added, at most."""


class Trial:
    """A case with its tensors, and the expected result."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        generator = random("loss", seed)
        batch, steps = case.batch, max(case.steps, *(item.head.first_step + 1 for item in case.heads))
        self.heads = {f"{type(item.head).__name__}_{index}": item.head for index, item in enumerate(case.heads)}
        self.masks, mask = self._masks(batch, steps, generator)
        self.predictions: dict[str, Any] = {}
        self.targets: dict[str, Any] = {}
        self.leaves: list[Leaf] = []
        self.forms: set[str] = set()
        """Of the predictions."""
        self.constants: list[Tensor] = []
        self.x: dict[str, formulas.Fields] = {}
        t: dict[str, formulas.Fields] = {}
        for (name, head), item in zip(self.heads.items(), case.heads, strict=True):
            x = item.prediction(batch, steps - head.first_step, generator)
            target = item.target(x, generator)
            self._poison(name, item, x, target, generator)
            self.predictions[name], self.x[name] = self._fields(name, x, item, is_prediction=True)
            fields, t[name] = self._fields(name, target, item, is_prediction=False)
            if target:
                self.targets[name] = fields
        dtypes = {item.dtype for item in case.heads}
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        draw_numbers = lambda form: self._step_numbers(form, batch, steps, generator)
        step_weights, numbers = self._by_head(lambda: draw_numbers(case.step_weights), (batch, steps), generator)
        scale, scales = self._by_head(lambda: draw_numbers(case.step_gradient_scale), (batch, steps), generator)
        importance, samples = self._by_head(lambda: self._importance(batch, generator), (batch,), generator)
        factors = {
            name: float(generator.choice([0.5, 0.0, 2.0, 1.5])) for name in list(self.heads)[: len(self.heads) // 2 + 1]
        }
        self.options: dict[str, Any] = {
            "step_weights": step_weights,
            "step_gradient_scale": scale,
            "importance_weights": importance,
            "head_weights": {
                "none": None,
                "numbers": factors,
                "tensors": {name: torch.tensor(factor) for name, factor in factors.items()},
            }[case.head_weights],
            "mask": mask,
            "reduction": case.reduction,
            "nonfinite": case.nonfinite,
            "batch_first": case.batch_first,
        }
        shape = (batch,) if case.reduction == "none" else ()
        self.grad_output = {
            "one": torch.ones(shape),
            "number": torch.full(shape, -2.5),
            "small": torch.full(shape, 1e-3),
            "zero": torch.zeros(shape),
            "expanded": torch.tensor(1.5).expand(shape),
            "strided": torch.from_numpy(generator.standard_normal((*shape, 2)))[..., 0],
        }[case.grad_output].to(self.dtype)
        items = list(zip(self.heads, case.heads, strict=True))
        self.truth = formulas.multi_step(
            self.heads,
            self.x,
            t,
            {
                name: {"log_stds": torch.finfo(item.dtype_of(item.dtype, 1))} if item.shared else {}
                for name, item in items
            },
            {name: tuple(field for field in self.x[name] if item.wants_gradient(field)) for name, item in items},
            self.masks,
            {name: eps_of(item.dtype) for name, item in items},
            numbers,
            scales,
            samples,
            {name: 1.0 if case.head_weights == "none" else factors.get(name, 1.0) for name in self.heads},
            case.reduction,
            case.nonfinite == "skip",
            np.broadcast_to(precise(self.grad_output), (batch,)),
            ROUNDED,
            SUMMED,
        )

    def turned(self, array: Array) -> Array:
        """Turn `[B, T, ...]` into the order of the call."""
        return array if self.case.batch_first else np.moveaxis(array, 0, 1)

    def _masks(self, batch: int, steps: int, generator: np.random.Generator) -> tuple[dict[str, Array], Any]:
        masks = {name: np.ones((batch, steps), bool) for name in self.heads}
        if self.case.mask == "none":
            return masks, None
        names = list(self.heads) if self.case.mask == "common" else list(self.heads)[::2]
        layout = self.case.weights_layout
        layout = "contiguous" if layout == "negative" else layout
        tensors = {}
        for name in names:
            if self.case.mask == "by head" or not tensors:
                drawn = generator.random((batch, steps)) < (0.6 if generator.random() < 0.8 else 0)
                tensor = laid_out(torch.from_numpy(np.array(self.turned(drawn))), layout)
            tensors[name] = tensor
            masks[name] = self.turned(tensor.numpy())
        return masks, tensors if self.case.mask == "by head" else tensor

    def _poison(
        self, name: str, item: HeadCase, x: formulas.Fields, target: formulas.Fields, generator: np.random.Generator
    ) -> None:
        first = next(iter(x.values()))
        if self.case.poison == "none" or not first.size:
            return
        kept = self.masks[name][:, item.head.first_step :]
        where = generator.random(kept.shape) < (0.8 if self.case.poison == "masked" else 0.15)
        if self.case.poison == "masked":
            where &= ~kept
        bad = generator.choice([np.nan, np.inf, -np.inf])
        for index, (field, array) in enumerate(target.items()):
            form, layout = item.form_of(field, item.target_form, index), item.layout_of(item.target_layout, index)
            if item.is_class(field) and form != "same" and layout not in REPEATING:
                array[where & ~kept] = generator.choice([-1, 10**6, -(2**63), 2**63 - 1])
        numbers = [array for field, array in target.items() if not item.is_class(field)]
        if numbers and generator.random() < 0.5:
            numbers[generator.integers(len(numbers))][where] = bad
            return
        own = [array for field, array in x.items() if not (item.shared and field == "log_stds")]
        own[generator.integers(len(own))][where] = bad

    def _fields(
        self, name: str, arrays: formulas.Fields, item: HeadCase, is_prediction: bool
    ) -> tuple[Any, formulas.Fields]:
        """A prediction or target in the form of the case, and its values `[B, T_h, ...]` by field."""
        form, dtype, layout = (
            (item.form, item.dtype, item.layout)
            if is_prediction
            else (item.target_form, item.target_dtype, item.target_layout)
        )
        entries, numbers = {}, {}
        for index, (field, array) in enumerate(arrays.items()):
            own_form, is_class = item.form_of(field, form, index), not is_prediction and item.is_class(field)
            entries[field], numbers[field], leaves = self._entries(
                (name, field),
                array,
                torch.int64 if is_class else item.dtype_of(dtype, index),
                own_form,
                item.layout_of(layout, index, is_class),
                is_prediction and item.wants_gradient(field),
            )
            self.constants += [leaf.tensor for leaf in leaves]
            if is_prediction:
                self.forms.add(own_form)
                self.leaves += leaves if item.wants_gradient(field) else []
        return entries.get("", entries), numbers

    def _entries(
        self, key: tuple[str, str], array: Array, dtype: torch.dtype, form: str, layout: str, wants_gradient: bool
    ) -> tuple[Any, Array, list[Leaf]]:
        """Tensors in one form, their values `[B, T_h, ...]`, and the tensors to which gradients come."""

        def tensor(values: Array) -> Tensor:
            return laid_out(torch.from_numpy(np.array(values)).to(dtype), layout).requires_grad_(wants_gradient)

        what = " of ".join(filter(None, reversed(key)))
        if form in ("stacked", "unbound"):
            stacked = tensor(self.turned(array))
            entries = stacked if form == "stacked" else list(stacked.unbind(1 if self.case.batch_first else 0))
            return entries, self.turned(precise(stacked)), [Leaf(key, what, stacked, self.turned)]
        if form in ("same", "shared"):
            one = tensor(array[:, 0] if form == "same" else array.reshape(-1, array.shape[-1])[:1].sum(0))
            numbers = precise(one)[:, None] if form == "same" else precise(one)
            numbers = np.array(np.broadcast_to(numbers, array.shape))
            entries = [one] * array.shape[1] if form == "same" else one
            axes = 1 if form == "same" else (0, 1)
            return (
                entries,
                numbers,
                [Leaf(key, what, one, lambda g: g.sum(axes), 2 if form == "shared" else array.shape[1])],
            )
        steps = [tensor(row) for row in np.moveaxis(array, 1, 0)]
        leaves = [Leaf(key, f"{what}, step {k}", entry, lambda g, k=k: g[:, k]) for k, entry in enumerate(steps)]
        return tuple(steps) if form == "tuple" else steps, np.stack([precise(entry) for entry in steps], 1), leaves

    def _by_head(
        self, draw: Callable[[], tuple[Any, Array]], shape: tuple[int, ...], generator: np.random.Generator
    ) -> tuple[Any, dict[str, Array]]:
        """Options for all heads or by head, and the numbers of each head."""
        if not self.case.by_head:
            option, numbers = draw()
            return option, dict.fromkeys(self.heads, numbers)
        drawn = {name: draw() for name in self.heads if generator.random() < 0.7}
        mapping = {name: option for name, (option, _) in drawn.items() if option is not None}
        return mapping, {name: drawn[name][1] if name in mapping else np.ones(shape) for name in self.heads}

    def _importance(self, batch: int, generator: np.random.Generator) -> tuple[Tensor | None, Array]:
        if not self.case.importance_weights:
            return None, np.ones(batch)
        weights = laid_out(torch.from_numpy(generator.random(batch) + 0.1).float(), self.case.weights_layout)
        return weights, precise(weights)

    def _step_numbers(self, form: str, batch: int, steps: int, generator: np.random.Generator) -> tuple[Any, Array]:
        if form == "none":
            return None, np.ones((batch, steps))
        if form == "unroll":
            return form, np.broadcast_to([1.0] + [1 / max(steps - 1, 1)] * (steps - 1), (batch, steps))
        drawn = np.round(generator.random((batch, steps)) * 2, 3)
        if form == "list":
            numbers = [float(number) for number in generator.choice([0.5, 1.0, 0.0, 0.25], steps)]
            return numbers, np.broadcast_to(numbers, (batch, steps))
        if form == "[T]":
            tensor = laid_out(torch.from_numpy(generator.random(steps)).float(), self.case.weights_layout)
            return tensor, np.broadcast_to(precise(tensor), (batch, steps))
        tensor = laid_out(torch.from_numpy(np.array(self.turned(drawn))).to(torch.float64), self.case.weights_layout)
        return tensor, self.turned(precise(tensor))

    def watch(self) -> Watched:
        options = [*self.options.values()]
        options += [value for mapping in options if isinstance(mapping, dict) for value in mapping.values()]
        return Watched(*self.constants, *options, self.grad_output)

    # ---- Running and checking

    def run(self, predictions: Any = None, loss_fn: Callable[..., Any] | None = None) -> Any:
        call = loss_fn or (lambda *args, **options: gs.multi_step_loss(self.heads, *args, **options))
        return call(predictions or self.predictions, self.targets, **self.options)

    def gradients(self, out: Any, **options: Any) -> list[Tensor]:
        leaves = [leaf.tensor for leaf in self.leaves]
        if not leaves:
            assert not out.loss.requires_grad
            return []
        if self.case.grad_output == "one" and out.loss.dim() == 0:
            return list(torch.autograd.grad(out.loss, leaves, **options))
        return list(torch.autograd.grad(out.loss, leaves, self.grad_output, **options))

    def check(self, out: Any) -> None:
        truth = self.truth
        scalars = ("head_means", "head_losses", "approx_kl", "clip_fraction")
        by_entry = ("per_step", "expected", "entropy", "log_probs")
        by_head = [tensor for field in scalars + by_entry for tensor in getattr(out, field).values()]
        for tensor in (out.loss, out.per_sample, *by_head):
            assert tensor.dtype == self.dtype
        anything = np.array(True)
        check_close(out.per_sample.detach(), *truth.per_sample, "per_sample", lenient=anything)
        check_close(out.loss.detach(), *truth.loss, "loss", lenient=anything)
        for field in by_entry + scalars:
            assert set(getattr(out, field)) == set(getattr(truth, field))
            for name, arrays in getattr(truth, field).items():
                value, error = (self.turned(array) for array in arrays) if field in by_entry else arrays
                check_close(getattr(out, field)[name], value, error, f"{field} of {name}", lenient=anything)
        assert int(out.num_nonfinite) == truth.num_nonfinite
        assert {name: float(value) for name, value in out.max_abs_logit.items()} == truth.largest
        names = {leaf.key[0] for leaf in self.leaves}
        assert set(out.head_gradient_norms) == (names if out.loss.requires_grad else set())
        for name, norm in out.head_gradient_norms.items():
            if truth.known[name].all():  # otherwise the formula does not define the gradient
                check_close(norm, *truth.gradient_norms[name], f"norm of {name}", lenient=anything)

    def check_gradients(self, gradients: list[Tensor]) -> None:
        for (key, what, leaf, part, uses), gradient in zip(self.leaves, gradients, strict=True):
            assert gradient.dtype == leaf.dtype
            value, error = self.truth.gradients[key]
            if uses > 1:
                # The gradient of each use of a tensor is rounded before they are added.
                info = torch.finfo(leaf.dtype)
                error = error + uses * info.eps * np.abs(value) + uses * info.smallest_normal * info.eps
                error = np.where(np.abs(value) < info.max / (uses + 1), error, np.inf)  # their sums may overflow
            unknown = ~self.truth.known[key[0]]
            unknown = np.broadcast_to(unknown.reshape(*unknown.shape, *[1] * (value.ndim - 2)), value.shape)
            skipped = (part(unknown.astype(float)) > 0) & ~(part(np.isnan(value).astype(float)) > 0)
            if self.case.nonfinite == "skip":
                skipped = np.zeros_like(skipped)
            expected = np.where(skipped, 0, part(value))  # NaN where the contract says so
            error = np.where(skipped, 0, part(error))
            masked = torch.where(torch.from_numpy(np.array(skipped)), 0.0, gradient.detach())
            check_close(masked, expected, error, f"gradient of {what}")


# ---- Contexts -------------------------------------------------------------------------------------------------------

Context = Callable[[Trial], None]
CONTEXTS: dict[str, Context] = {}


def context(function: Context) -> Context:
    CONTEXTS[function.__name__.strip("_").replace("_", " ")] = function
    return function


@context
def _function(trial: Trial) -> None:
    out = trial.run()
    trial.check(out)
    trial.check_gradients(trial.gradients(out))


@context
def _module(trial: Trial) -> None:
    """The module reuses its memory, but a gradient that is still referenced keeps its values."""
    module = gs.MultiStepLoss(**trial.heads)
    held: list[tuple[Tensor, bytes]] = []
    for seed in range(3):
        again = trial if seed == 0 else Trial(trial.case, trial.case.seed + seed)
        out = again.run(loss_fn=module)
        again.check(out)
        gradients = again.gradients(out)
        again.check_gradients(gradients)
        held = [*held[-2:], *((gradient, bits(gradient)) for gradient in gradients)]
    for gradient, before in held:
        assert bits(gradient) == before, "a gradient that was kept has changed"


@context
def _ownership(trial: Trial) -> None:
    """Gradients can be written to without effect on any other tensor, or on a second pass."""
    out = trial.run()
    leaves = [leaf.tensor for leaf in trial.leaves]
    if not leaves:
        return
    first = trial.gradients(out, retain_graph=True)
    before = [bits(gradient) for gradient in first]
    for index, gradient in enumerate(first):
        gradient.fill_(index + 1)
    for index, gradient in enumerate(first):
        assert (gradient == index + 1).all(), "two gradients share their memory"
    second = trial.gradients(out)
    assert [bits(gradient) for gradient in second] == before, "a second pass sees what was written to a gradient"
    trial.check_gradients(second)
    trial.check(out)


@context
def _backward(trial: Trial) -> None:
    out = trial.run()
    if trial.leaves:
        out.loss.backward(trial.grad_output)
        trial.check_gradients([leaf.tensor.grad for leaf in trial.leaves])  # type: ignore[misc]


@context
def _scaled_loss(trial: Trial) -> None:
    out = trial.run()
    if trial.leaves:
        total = (out.loss * trial.grad_output).sum()
        trial.check_gradients(list(torch.autograd.grad(total, [leaf.tensor for leaf in trial.leaves])))


@context
def _create_graph(trial: Trial) -> None:
    trial.check_gradients(trial.gradients(trial.run(), create_graph=True))


@context
def _func_grad(trial: Trial) -> None:
    """Gradients of all predictions of the call."""
    leaves = [leaf.tensor for leaf in trial.leaves]
    if not leaves or trial.forms & {"unbound", "same"}:
        return

    def loss(predictions: Any) -> Tensor:
        return (trial.run(predictions).loss * trial.grad_output).sum()

    gradients = torch.func.grad(loss)(tree_map(torch.detach, trial.predictions))
    pairs = zip(tree_leaves(gradients), tree_leaves(trial.predictions), strict=True)
    trial.check_gradients([gradient for gradient, prediction in pairs if prediction.requires_grad])


@context
def _threads(trial: Trial) -> None:
    out = trial.run()
    results: list[list[Tensor]] = []

    def run() -> None:
        results.append(trial.gradients(out, retain_graph=True))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for gradients in results:
        trial.check_gradients(gradients)


@context
def _checkpoint(trial: Trial) -> None:
    if trial.leaves:
        loss = checkpoint(lambda: trial.run().loss, use_reentrant=False)
        leaves = [leaf.tensor for leaf in trial.leaves]
        trial.check_gradients(list(torch.autograd.grad(loss, leaves, trial.grad_output)))


@context
def _saved_tensor_hooks(trial: Trial) -> None:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        out = trial.run()
    trial.check_gradients(trial.gradients(out))


@context
def _autocast(trial: Trial) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = trial.run()
    trial.check(out)
    trial.check_gradients(trial.gradients(out))


@context
def _no_grad(trial: Trial) -> None:
    with torch.no_grad():
        out = trial.run()
    assert not out.loss.requires_grad
    trial.check(out)


@context
def _reference(trial: Trial) -> None:
    """The reference in float64, with which other tests compare."""
    heads = tuple(dataclasses.replace(item, dtype=torch.float64) for item in trial.case.heads)
    trial = Trial(dataclasses.replace(trial.case, heads=heads), trial.case.seed)
    out = trial.run(loss_fn=functools.partial(gs.reference.multi_step_loss, trial.heads))
    trial.check(out)
    trial.check_gradients(trial.gradients(out))


@context
def _intermediate(trial: Trial) -> None:
    """Predictions are results of other operations, which consume the gradients."""
    predictions = tree_map(lambda entry: entry * 1, trial.predictions)
    trial.check_gradients(trial.gradients(trial.run(predictions)))


_calls = product(
    dict,
    batch=(3, 1, 2, 4, 5, 9, 8, 0),
    steps=(2, 1, 3, 4, 5),
    batch_first=(True, True, False),
    reduction=("mean", "sum", "none", "valid_mean"),
    context=(*["function"] * 6, "reference", "module", *CONTEXTS),
    seed=SEEDS,
)
_weights = product(
    dict,
    step_weights=("none", "list", "[T]", "[B, T]"),
    step_gradient_scale=("none", "unroll", "list", "[T]", "[B, T]"),
    importance_weights=(False, True),
    by_head=(False, False, True),
    head_weights=("none", "none", "numbers", "tensors"),
    mask=("none", "common", "by head"),
    poison=("none", "none", "masked", "anywhere"),
    nonfinite=("propagate", "skip"),
    grad_output=("one", "number", "small", "zero", "expanded", "strided"),
    weights_layout=LAYOUTS,
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads = [HeadCase(**draw(_heads), **draw(_predictions), **draw(_targets)) for _ in range(draw(st.integers(1, 4)))]
    return Case(tuple(heads), **draw(_calls), **draw(_weights))


@fuzz(cases(), examples=500)
def test_multi_step_loss(case: Case) -> None:
    trial = Trial(case, case.seed)
    watched = trial.watch()
    CONTEXTS[case.context](trial)
    watched.check(case.context)
