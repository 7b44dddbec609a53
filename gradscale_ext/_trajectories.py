"""Checks of the arguments of the functions over transitions, and the results of all return functions: plain data."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch

from . import _context, _numbers, _remedies, _table, _tensors
from ._tensors import written

Discount = float | torch.Tensor


class GeneralizedAdvantages(NamedTuple):
    """Results of `generalized_advantages`, `[B, T]` each, 0 where masked.

    Attributes:
        advantages: of the actions, for the policy gradient. They are not normalised: see `standardize`.
        returns: advantages + values, the λ-returns: targets of the values.
    """

    advantages: torch.Tensor
    returns: torch.Tensor

    def __repr__(self) -> str:
        return _table.named_tensors(self)


class NStepTransitions(NamedTuple):
    """Results of `n_step_transitions`, `[B, T]` each, 0 where masked.

    Attributes:
        rewards: sums of up to n discounted rewards.
        discounts: factors of the value after the last of these rewards; 0 after a termination.
        steps: int64: the number of rewards in each sum. The value is the value of the state that many steps later.
    """

    rewards: torch.Tensor
    discounts: torch.Tensor
    steps: torch.Tensor

    def __repr__(self) -> str:
        return _table.named_tensors(self)


class VTrace(NamedTuple):
    """Results of `vtrace`, `[B, T]` each, 0 where masked.

    Attributes:
        targets: of the values.
        advantages: of the actions, for the policy gradient. They contain the clipped ratio.
    """

    targets: torch.Tensor
    advantages: torch.Tensor

    def __repr__(self) -> str:
        return _table.named_tensors(self)


class MuZeroTargets(NamedTuple):
    """Results of `muzero_targets`.

    Attributes:
        values: `[B, K + 1]`: the n-step returns; 0 after a termination.
        rewards: `[B, K]` for a head with ``first_step=1``, or `[B, K + 1]` with the root's reward first.
        mask: `[B, K + 1]` bool: True where the targets of value and reward are known.
        policy_mask: `[B, K + 1]` bool: True where the search was made, so that there is a policy target.
    """

    values: torch.Tensor
    rewards: torch.Tensor
    mask: torch.Tensor
    policy_mask: torch.Tensor

    def __repr__(self) -> str:
        return _table.named_tensors(self)


class Function(NamedTuple):
    """The arguments in which a function over transitions differs from others. csrc/returns/kernels.h has them for C++.

    Attributes:
        values: the name of the values; empty for a function without values and next_values.
        reads_values: True if it reads values also where next_values are given.
        has_observations: True if values of all T + 1 observations can be given instead of next_values.
        clips: the names of the limits of its ratios; a function without limits has no ratios.
        has_n: True for n, False for lambda_, which a function without values does not have either.
    """

    values: str = "values"
    reads_values: bool = True
    has_observations: bool = True
    clips: tuple[str, ...] = ()
    has_n: bool = False


#: The functions by name. gradscale_ext/reference/returns.py adds each, next to its formula.
FUNCTIONS: dict[str, Function] = {}


class Trajectories(NamedTuple):
    """The arguments of a function over transitions, in the caller's order of dimensions: as given, and as checked.

    `values` has one step more than `rewards` if `next_values` is None. `n_step_transitions` has neither. `clips` are
    the limits of the ratios, at most three. A checked call has a number for each, and 0 for n if there is none.
    """

    rewards: torch.Tensor
    values: torch.Tensor | None = None
    next_values: torch.Tensor | None = None
    ratios: torch.Tensor | None = None
    discount: Discount = 1.0
    lambda_: Discount = 1.0
    terminated: torch.Tensor | None = None
    truncated: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    clips: tuple[float, ...] = ()
    n: int = 0
    batch_first: bool = True


class Checker:
    """Checks the arguments of one call of `function`; `rewards` gives the device and the sizes. Remedies depend on the
    `others` with two dimensions, by name."""

    def __init__(
        self, function: str, rewards: Any, batch_first: Any, others: Mapping[str, Any], steps: str = "T"
    ) -> None:
        self.function = function
        self._others = others
        _numbers.check_flag(f"{function}: batch_first", batch_first)
        self.batch_first = batch_first
        self.step_letter = steps
        self.floats("rewards", rewards)
        self.device = rewards.device
        self._dims("rewards", rewards)
        self.batch, self.steps = rewards.shape if batch_first else reversed(rewards.shape)

    def _letters(self, more: int | None) -> str:
        """The shape in letters: `more` steps more than rewards have, or `[B]` if `more` is None."""
        if more is None:
            return "[B]"
        steps = f"{self.step_letter} + {more}" if more else self.step_letter
        return written(("B", steps) if self.batch_first else (steps, "B"))

    def tensor(self, name: str, value: Any, more: int | None = 0, wanted: str = "a tensor") -> None:
        _tensors.check_tensor(self.function, name, value, wanted, self._letters(more), self._stacked_dims(more))

    def _stacked_dims(self, more: int | None) -> dict[str, int] | None:
        """The dimension in which a list becomes a tensor."""
        if more is None:
            return None
        of_sample = 0 if self.batch_first else 1
        return {" for an entry per sample": of_sample, " for an entry per step": 1 - of_sample}

    def floats(self, name: str, value: Any, more: int | None = 0) -> None:
        self.tensor(name, value, more)
        or_else = ""
        if name == "next_values" and self.function != "retrace":  # the third argument of others, which may be flags
            flags = name if value.dtype == torch.bool else f"{name}.bool()"
            or_else = f", or, if these are flags of ends, terminated={flags}"
        _tensors.check_float_dtype(self.function, name, value, or_else)

    def dtype(self, name: str, value: torch.Tensor, accepted: bool, wanted: str) -> None:
        """Check the dtype of a tensor of integers."""
        _tensors.check_dtype(self.function, name, value, accepted, wanted, ".long()")

    def on_device(self, name: str, value: torch.Tensor) -> None:
        _tensors.check_device(self.function, name, value, "rewards", self.device)

    def _dims(self, name: str, value: torch.Tensor, more: int = 0) -> None:
        if value.dim() != 2:
            self._refuse_shape(name, value, self._letters(more), self._remedy_for_dims(name, value, more))

    def _refuse_shape(self, name: str, value: torch.Tensor, wanted: str, remedy: str) -> NoReturn:
        raise ValueError(
            f"{self.function}: {name} must have shape {wanted}, but its shape is {written(value.shape)}{remedy}"
        )

    def _remedy_for_dims(self, name: str, value: torch.Tensor, more: int) -> str:
        """An expression of the right shape. Rewards, which define the sizes, may have any two dimensions."""
        shape = tuple(value.shape)
        expressions = {}
        if len(shape) == 3 and shape[2] == 1:
            expressions[f"{name}.squeeze(-1)"] = shape[:2]
        elif len(shape) == 1:
            one_row, one_step = (f"{name}[None]", (1, *shape)), (f"{name}[:, None]", (*shape, 1))
            expressions = dict([one_row, one_step] if self.batch_first else [one_step, one_row])
        for expression, result in expressions.items():
            if name != "rewards" and result == self.sizes(more):
                return f"; write {expression}"
        if name == "rewards" and len(shape) == 1:
            trajectory, steps = ("[None]", "[:, None]") if self.batch_first else ("[:, None]", "[None]")
            return (
                f"; write rewards{trajectory} if they are one trajectory, or rewards{steps} if they are single steps "
                f"of {shape[0]} trajectories"
            )
        if name == "rewards" and expressions:
            return f"; write {next(iter(expressions))}"
        if name == "rewards":
            return self._remedy_for_rewards(len(shape))
        if name == "next_values":
            return self._remedy_for_last_values(name, value)
        if shape == (self.steps + more,):
            sizes = ", ".join(map(str, self.sizes(more)))
            return f"; write {name}{'' if self.batch_first else '[:, None]'}.expand({sizes}) if all rows are alike"
        return ""

    def _remedy_for_rewards(self, dims: int) -> str:
        """Remedy for rewards without dimensions, and for rewards with more than two, as of several agents."""
        if dims == 0:
            return "; write rewards[None, None]"
        others = [
            name for name, other in self._others.items() if isinstance(other, torch.Tensor) and other.dim() == dims
        ]
        names = ", ".join(["rewards", *others])
        mapped = (
            f"lambda {names}: {self.function}({', '.join(['rewards', *(f'{name}={name}' for name in others)])}, ...)"
        )
        for _ in range(dims - 2):
            mapped = f"torch.func.vmap({mapped}, in_dims=-1, out_dims=-1)"
        return f"; to map over the last dimension{'s' if dims > 3 else ''}, write {mapped}({names})"

    def _remedy_for_last_values(self, name: str, value: torch.Tensor) -> str:
        """Remedy for next_values of the last step alone, in this order of dimensions or in the other."""
        values, shape = self._others.get("values"), tuple(value.shape)
        has_steps = isinstance(values, torch.Tensor) and values.shape == self.sizes(0)
        if name != "next_values" or not has_steps or self._others.get("truncated") is not None:
            return ""
        if shape in ((self.batch,), self.sizes(1 - self.steps)):
            appended = appended_values(name, value.dim(), self.batch_first)
            return (
                f"; the value of the state after the last step belongs to values {self.shape(1)}: write {appended}, "
                "and leave out next_values"
            )
        if shape == (self.steps,):
            other = not self.batch_first
            order = written(("B", self.step_letter) if other else (self.step_letter, "B"))
            return (
                f"; if rewards are {order}, and these the values after the last step, write batch_first={other} and "
                f"{appended_values(name, 1, other)}, and leave out next_values"
            )
        return ""

    def shape(self, more: int = 0) -> str:
        """The shape of rewards, with `more` additional steps."""
        return written(self.sizes(more))

    def sizes(self, more: int = 0) -> tuple[int, int]:
        """The sizes of rewards, with `more` additional steps."""
        return (self.batch, self.steps + more) if self.batch_first else (self.steps + more, self.batch)

    def shaped(self, name: str, value: torch.Tensor, more: int = 0, reason: str = "") -> None:
        """Check for two dimensions, and for `more` steps more than rewards have."""
        self.on_device(name, value)
        self._dims(name, value, more)
        if tuple(value.shape) != self.sizes(more):
            swapped = (self.batch + more, self.steps) if self.batch_first else (self.steps, self.batch + more)
            if name in ("values", "root_values") and tuple(value.shape) == swapped:  # the first tensor after rewards
                order = written((self.step_letter, "B") if self.batch_first else ("B", self.step_letter))
                remedy = f"; if rewards are {order}, pass batch_first={not self.batch_first}"
            else:
                remedy = self._remedy_for_last_values(name, value)
            self._refuse_shape(name, value, f"{self.shape(more)}{reason or ', the shape of rewards'}", remedy)

    def flags(self, name: str, value: Any, are_per_row: bool = False) -> None:
        if value is None:
            return
        self.tensor(name, value, None if are_per_row else 0, "a bool tensor")
        _tensors.check_bools(self.function, name, value)
        if are_per_row:
            self.per_row(name, value)
        else:
            self.shaped(name, value)

    def per_row(self, name: str, value: torch.Tensor) -> None:
        self.on_device(name, value)
        if tuple(value.shape) != (self.batch,):
            remedy = f"; write {name}.squeeze(-1)" if tuple(value.shape) == (self.batch, 1) else ""
            self._refuse_shape(name, value, f"[{self.batch}]", remedy)

    def constant(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            _context.check_constant(self.function, name, value)

    def coefficient(self, name: str, value: Any, low: float, per_step: bool = True) -> Discount:
        """Return a number from `low` to 1 as a float, and a tensor of 0 or 2 dimensions unchanged."""
        if not isinstance(value, torch.Tensor):
            return self._number(name, value, low, per_step)
        self.floats(name, value)
        self.constant(name, value)
        if value.dim() == 0:
            if value.device.type != "cpu":
                self.on_device(name, value)
            else:
                _context.refuse_in_capture(self.function, name, self.device)
            return value
        self.on_device(name, value)
        sizes = self._coefficient_sizes(per_step)
        if value.dim() != 2 or not all([own == 1 or own == size for own, size in zip(value.shape, sizes, strict=True)]):
            remedy = ""
            if value.dim() == 1 and per_step:
                remedy = f"; write {name}[None] if it varies along the last dimension, else {name}[:, None]"
            elif value.dim() == 1:
                remedy = f"; write {name}[:, None]" if self.batch_first else f"; write {name}[None]"
            elif value.dim() == 3 and value.shape[-1] == 1:
                remedy = f"; write {name}.squeeze(-1)"
            raise ValueError(
                f"{self.function}: {name} must be a number, have no dimensions, or broadcast to {written(sizes)}, "
                f"but its shape is {written(value.shape)}{remedy}"
            )
        return value

    def _coefficient_sizes(self, per_step: bool) -> tuple[int, int]:
        steps = self.steps if per_step else 1
        return (self.batch, steps) if self.batch_first else (steps, self.batch)

    def _number(self, name: str, value: Any, low: float, per_step: bool) -> float:
        sizes = written(self._coefficient_sizes(per_step))
        wanted = f"a number, a 0-dim tensor, or a tensor that broadcasts to {sizes}"
        remedy = "" if isinstance(value, numbers.Number) else _remedies.remedy_for_type(value, name)
        number = _numbers.real(f"{self.function}: {name}", value, wanted, remedy)
        if not low <= number <= 1:
            raise ValueError(f"{self.function}: {name} must be from {low:g} to 1, but it is {number}")
        return number

    def clip(self, name: str, value: Any) -> float:
        number = torch.inf if value is None else _numbers.real(f"{self.function}: {name}", value, "a number or None")
        if not number >= 0:
            raise ValueError(f"{self.function}: {name} must not be negative or NaN, but it is {number}")
        return number

    def integer(self, name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
        return _numbers.integer(f"{self.function}: {name}", value, least, most)  # type: ignore[no-any-return]


def check_trajectories(function: str, call: Trajectories) -> Trajectories:
    """Check the arguments of one of the functions over transitions.

    Raises:
        TypeError: a type or dtype is wrong.
        ValueError: a shape, device or number is wrong, or a constant requires grad.
    """
    takes = FUNCTIONS[function]
    others = {takes.values if name == "values" else name: value for name, value in call._asdict().items()}
    check = Checker(function, others.pop("rewards"), others.pop("batch_first"), others)
    next_values, ratios = others["next_values"], others["ratios"]
    if next_values is not None or not takes.has_observations:
        check.floats("next_values", next_values)
        check.shaped("next_values", next_values)
    if takes.values:
        _check_values(check, takes, call.values, next_values, call.truncated)
    if takes.clips:
        check.floats("ratios", ratios)
        check.constant("ratios", ratios)
        check.shaped("ratios", ratios)
    discount = check.coefficient("discount", call.discount, -1)
    lambda_ = 1.0 if takes.has_n else check.coefficient("lambda_", call.lambda_, 0)
    for flag in ("terminated", "truncated", "mask"):
        check.flags(flag, others[flag])
    limits = [check.clip(name, value) for name, value in zip(takes.clips, call.clips, strict=False)]
    return call._replace(
        discount=discount,
        lambda_=lambda_,
        clips=(*limits, torch.inf, torch.inf, torch.inf)[:3],
        n=check.integer("n", call.n, 1) if takes.has_n else 0,
    )


def appended_values(name: str, dims: int, batch_first: bool) -> str:
    """Code for values with those after the last step, `[B]` or with a dimension of steps."""
    last = name if dims == 2 else f"{name}[:, None]" if batch_first else f"{name}[None]"
    return f"values=torch.cat([values, {last}], {1 if batch_first else 0})"


def _check_values(check: Checker, takes: Function, values: Any, next_values: Any, truncated: Any) -> None:
    """Check the values of states or actions, or of all observations if there are no next_values."""
    function, name = check.function, takes.values
    if values is None and not takes.reads_values:
        if next_values is None:
            raise ValueError(
                f"{function}: next_values {check.shape()} or values {check.shape(1)} must be given, but both are None"
            )
        return
    check.floats(name, values, 1 if next_values is None else 0)
    if next_values is None:
        if tuple(values.shape) == check.sizes():
            appended = appended_values("last_values", 1, check.batch_first)
            remedy = f"write {appended} to append the values of the last observations, or " if truncated is None else ""
            raise ValueError(
                f"{function}: values must have shape {check.shape(1)}, one for each observation, because next_values "
                f"is None, but its shape is {check.shape()}; {remedy}give next_values, the values of the true "
                "successors"
            )
        check.shaped("values", values, 1, ", one for each observation")
        if truncated is not None:
            raise ValueError(
                f"{function}: truncated cannot be given with values of shape {check.shape(1)}: after a reset the next "
                f"value belongs to another episode; give values {check.shape()} and next_values {check.shape()}, the "
                "values of the true successors before any reset"
            )
    elif not takes.reads_values and tuple(values.shape) == check.sizes(1):
        check.on_device(name, values)
    else:
        check.shaped(name, values, 0, " because next_values is given" if takes.has_observations else "")
