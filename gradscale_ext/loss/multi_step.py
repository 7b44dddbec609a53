"""The fused, weighted multi-step loss."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import _context, _distributed, _numbers, _remedies, reference
from .._keywords import with_known_names
from .._native import _C, DEVICE_TYPES, Refusal, seen_by_modes, warn_of_reference
from ..call.checks import as_dict, as_dicts, check_choice, is_mapping
from ..call.options import (
    BY_HEAD,
    FieldEntries,
    HeadWeights,
    ImportanceWeights,
    Mask,
    Nonfinite,
    NumEntries,
    Options,
    Reduction,
    StepGradientScale,
    StepWeights,
)
from ..call.output import MultiStepLossOutput
from ..call.ranks import for_all_ranks
from ..call.validate import Call, check_heads, validate
from ..call.values import check_values
from ..heads import Head, SoftCrossEntropy, TwoHot, record_of
from ..policy_heads import ClippedSquaredError, GaussianPolicyGradient, PolicyGradient
from ..support import Support
from .compiled import can_compile, is_compiler_error, loss_by_compiler
from .operator import call_operator

_fused_loss = seen_by_modes(_C.multi_step_loss)

Implementation = Literal["auto", "fused", "compiled", "reference"]
_IMPLEMENTATIONS = get_args(Implementation)
#: Types of options that are passed on unchanged; mappings of other types are converted to dicts.
_AS_GIVEN = (NoneType, torch.Tensor, dict, list, tuple, str)
#: Types of devices on which the loss is not compiled, each with the reason that the warning adds.
_without_compiler = {"meta": ""}
Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:

    def _typed_as(function: Function) -> Callable[[Any], Function]: ...


@_context.in_eager_mode("empty_cache: call it outside of a function with fullgraph=True")
def empty_cache() -> int:
    """Free the CPU memory that is kept for later gradients, and return its number of bytes.

    The losses and `Support.decode` take the memory of their gradients from one pool for the whole process. The
    functions of returns take the memory of results of at least 1 MiB from the same pool. Memory returns to the pool
    when its last tensor is gone. Memory that 16 calls did not need is freed; nothing is freed while no calls are made.
    Memory on GPUs is PyTorch's own: `torch.cuda.empty_cache`.

    >>> logits = torch.zeros(256, 601, requires_grad=True)
    >>> gradient, = torch.autograd.grad(Support.muzero().decode(logits).sum(), logits)
    >>> del gradient
    >>> empty_cache() >= logits.nbytes
    True
    >>> empty_cache()
    0
    """
    return _C.release_gradient_pool()


def _make_plan(heads: Mapping[str, Head]) -> Any:
    check_heads(heads)
    return _C.Plan(dict(heads), *record_of(heads.values()))


@functools.lru_cache(maxsize=256)
def _cached_plan(heads: tuple[tuple[str, Head], ...]) -> Any:
    return _make_plan(dict(heads))


def multi_step_loss(
    heads: Mapping[str, Head],
    predictions: Mapping[str, FieldEntries],
    targets: Mapping[str, FieldEntries],
    *,
    step_weights: StepWeights = None,
    step_gradient_scale: StepGradientScale = None,
    importance_weights: ImportanceWeights = None,
    head_weights: HeadWeights = None,
    mask: Mask = None,
    reduction: Reduction = "mean",
    num_entries: NumEntries = None,
    nonfinite: Nonfinite = "propagate",
    process_group: torch.distributed.ProcessGroup | None = None,
    normalize_importance_weights: bool = False,
    batch_first: bool = True,
    steps: bool = True,
    check: bool = False,
    impl: Implementation = "auto",
) -> MultiStepLossOutput:
    """Loss of all heads at all unroll steps, with gradients, metrics and decoded predictions from the same pass.

    With l the loss of one (head h, step k, sample b)::

        L_b  = sum_h weight_h sum_k step_weights[b,k] mask_h[b,k] l[h,k,b]
        loss = reduce_b(importance_weights_b L_b)

    or, with weights that differ by head and `head_weights` w_h::

        L_b  = sum_h w_h weight_h sum_k step_weights_h[b,k] mask_h[b,k] l[h,k,b]
        loss = reduce_b(sum_h importance_h,b w_h weight_h sum_k step_weights_h[b,k] mask_h[b,k] l[h,k,b])

    `B` is the batch and `T = K + 1` the number of predictions (root and K recurrent steps).

    Args:
        heads: mapping of name to head: `TwoHot`, `HLGauss`, `SoftCrossEntropy`, `MeanSquaredError`, `Huber`,
            `QuantileHuber`, `BinaryCrossEntropy`, `NegativeCosine`, `CategoricalKL`, `PerStepLoss`, `PolicyGradient`,
            `GaussianPolicyGradient`, `ClippedSquaredError`. An ensemble is several heads.
        predictions: mapping (or TensorDict, which holds tensors but no lists) of head names to a list or tuple of
            T tensors `[B, ...]`, as an unroll produces them (they are read where they are, without stacking), or to
            one tensor `[B, T, ...]`. A head with ``first_step=1`` has T - 1 entries. float64, float32, bfloat16 or
            float16. A head that predicts several tensors has a mapping of field names to these.
        targets: the same for the targets, floating, or int64 for classes; they must not require grad. A `PerStepLoss`
            has none. Where a head has several targets, they are a mapping of field names:
            ``{"policy": {"actions": a, "advantages": adv, "log_probs": lp}}``; each field is a list of T tensors or one
            stacked tensor.
        step_weights: a sequence of T numbers, or a tensor `[T]` or `[B, T]`: multiplies value and gradient. A negative
            weight is an error: numbers are checked in every call, the elements of weights that are tensors with
            `check`. `step_weights`, `step_gradient_scale`, `importance_weights` and `mask` may be mappings of head
            names, for heads that differ (TD-MPC2, UniZero); a head that is not named has factor 1 and no mask. Entries
            are indexed by absolute step, also for heads with ``first_step=1``.
        step_gradient_scale: the same forms: multiplies the gradient only, as `scale_gradient` on each step's loss does;
            a negative number reverses it. "unroll" is 1 for the root and 1/K after, as in the pseudocode of MuZero
            (Schrittwieser et al. 2020).
        importance_weights: `[B]`, from prioritised replay (Schaul et al. 2016). They are not part of L_b, and do not
            decide which samples are skipped.
        head_weights: mapping of head names to a number or a tensor without dimensions on the device of the
            predictions, at least 0: multiplies the head's `weight`, in value and gradient. It is read without waiting
            for the device, and a number that changes does not recompile. A tensor that requires grad gets the head's
            share of the loss before this weight as its gradient, which `step_gradient_scale` does not change: for
            weights that are learned (Kendall et al. 2018).
        mask: bool `[B, T]` by absolute step. False: the entry adds exactly nothing to value and gradient, also if it is
            NaN or inf.
        reduction: over the batch: "mean" over B, "sum", "none" (`[B]`), or "valid_mean" (each head's sum over its
            number of unmasked entries, at least 1).
        num_entries: mapping of head names to a number above 0 or a tensor without dimensions on the device of the
            predictions: the divisor of "mean" and "valid_mean" in place of this call's own count, which is B or the
            number of unmasked entries. With the counts of a whole batch, losses and gradients of its micro-batches add
            up to the loss and gradient of the batch (gradient accumulation). A head that is not named keeps its own
            count. It is read without waiting for the device, and a number that changes does not recompile. A tensor has
            an integer type, float32 or float64, and counts as 1 if it is 0. With a process group it is the count of
            this rank, and the counts of all ranks are added. `head_means` are means over the entries of this call.
        nonfinite: "propagate": NaN reaches the loss, and only that sample's gradients. "skip": a sample whose loss is
            not finite (L_b, without its importance weight) adds nothing. `num_nonfinite` counts these samples in both
            cases.
        process_group: ranks whose batches make up one, for "mean" and "valid_mean": samples or unmasked entries are
            counted over all of them (one all-reduce of a number for each head), and each rank's loss is scaled so that
            the average over the ranks, which DistributedDataParallel and FSDP take of gradients, is the gradient of the
            mean over all. `head_means` are means over this rank, and `head_gradient_norms` are norms of this rank's
            gradients.
        normalize_importance_weights: divide `importance_weights` by the largest of them (Schaul et al. 2016), with a
            process group by the largest of all ranks. Weights that differ by head are divided by each head's own.
            Samples without an unmasked entry are ignored.
        batch_first: False: tensors with both dimensions have the step first: stacked predictions and targets are
            `[T, B, ...]`, masks and weights `[T, B]`, and of the output `per_step`, `expected` and `entropy`
            `[T_h, B]`.
        steps: False: no tensor has a dimension of steps. Predictions and targets are tensors `[B, ...]`, masks `[B]`,
            and `per_step`, `expected`, `entropy` and `log_probs` are `[B]`: for a minibatch of PPO or DQN.
            `step_weights`, `step_gradient_scale` and heads with ``first_step=1`` are errors then.
        check: check the values too, and raise ValueError for what cannot be intended: policy targets that are not
            distributions (negative, above 1, or whole numbers that add up to more than 1, as raw visit counts do; a
            smaller sum is treated as a weight), logits that are probabilities already, entries and weights that are not
            finite, negative weights, targets of `BinaryCrossEntropy` outside 0..1, classes out of range (kernels of a
            CPU always raise for these; elsewhere the row is NaN), probabilities of the target (`label_smoothing`
            included) where the logit is -inf. It warns of scalars beyond a support.
            For the heads of policies: an illegal action (with logit -inf) that was taken, advantages that are not
            finite, and, next to logits, log_probs above 0. Masked entries are not checked. Advantages given as targets
            of `SoftCrossEntropy` are rejected too. It waits for the device: use it in the first steps of training, and
            in tests. It raises an error under torch.compile, torch.export and torch.func transforms, where there are no
            values to read.
        impl: "auto": the fused kernels where they accept the call, elsewhere "compiled" on devices that have no kernels
            and "reference" otherwise. "fused": the kernels. "compiled": `gradscale_ext.reference` under
            `torch.compile`, which keeps a graph for each form of a call; head weights, step numbers and batch sizes may
            change. It has no second derivative. "reference": plain PyTorch.

    Returns:
        `MultiStepLossOutput`. An empty batch gives a loss of 0.

    Raises:
        ValueError, TypeError: names the head and step, what was expected and what came, and what to write instead;
            nothing has been changed then.
        NotImplementedError: ``impl="fused"`` if no kernel accepts the call, ``impl="compiled"`` for tensor subclasses,
            `torch.func` transforms, forward mode and dispatch modes.

    For plain tensors this is one call into C++, which allocates nothing of the size of the logits except the gradients.
    These are computed together with the loss: one parallel region on the CPU, two launches on CUDA (one more to count a
    mask for "valid_mean") and one in the backward pass, where nothing is waited for. In `torch.compile` and
    `torch.export` it is one operator of the graph. Second derivatives, `torch.func` transforms, forward mode and
    dispatch modes go through `gradscale_ext.reference`, and wrapper subclasses of tensors with a warning that names the
    argument. A compiled or exported loss has no second derivative: computing one raises an error.

    DTensors are gathered, so that every rank computes the loss of the whole batch; plain tensors next to them must be
    whole, and the same on every rank. If a prediction is a DTensor the output holds replicated DTensors, and gradients
    have the placements of the predictions. In PyTorch 2.11, second derivatives of DTensors raise NotImplementedError.

    Some backward passes read predictions, targets, weights and masks again, and raise if one of them was modified in
    the meantime: every pass on CUDA; on the CPU, passes that get another gradient of the loss than 1 if a prediction
    has a half type or that gradient is not finite; and passes that are differentiated themselves.

    >>> heads = {"policy": SoftCrossEntropy()}
    >>> logits = torch.zeros(1, 4, requires_grad=True)
    >>> out = multi_step_loss(
    ...     heads,
    ...     {"policy": [logits]},
    ...     {"policy": [torch.tensor([[1.0, 0.0, 0.0, 0.0]])]},
    ... )
    >>> out.loss.backward()
    >>> logits.grad
    tensor([[-0.7500,  0.2500,  0.2500,  0.2500]])
    """
    options = Options(
        step_weights,
        step_gradient_scale,
        importance_weights,
        mask,
        head_weights,
        num_entries,
        reduction,
        nonfinite,
        batch_first,
        steps,
    )
    heads = as_dict("heads", heads)
    plan = None
    if _context.is_eager():
        try:
            plan = _cached_plan(tuple(heads.items()))
        except TypeError:  # not heads at all, or heads without a hash
            plan = _make_plan(heads)
    return _run(plan, heads, predictions, targets, options, process_group, normalize_importance_weights, check, impl)


def _run(
    plan: Any,
    heads: Mapping[str, Head],
    predictions: Mapping[str, FieldEntries],
    targets: Mapping[str, FieldEntries],
    options: Options,
    process_group: torch.distributed.ProcessGroup | None,
    normalize_importance_weights: bool,
    check: bool,
    impl: str,
) -> MultiStepLossOutput:
    """Call the fused kernel if it accepts the call, else the checks and the reference."""
    if impl not in _IMPLEMENTATIONS:
        check_choice("impl", impl, _IMPLEMENTATIONS)
    predictions, targets = as_dicts("predictions", predictions), as_dicts("targets", targets)
    for name, given in zip(BY_HEAD, options, strict=False):
        if (plan is None or type(given) not in _AS_GIVEN) and is_mapping(given):
            as_given: dict[str, Any] = {name: as_dict(name, given)}
            options = options._replace(**as_given)
    is_eager = plan is not None and impl in ("auto", "fused")
    needs_python = check or process_group is not None or normalize_importance_weights
    outputs = None
    if is_eager and not needs_python:
        outputs = _fused_loss(plan, predictions, targets, options)
        if not isinstance(outputs, Refusal):
            return MultiStepLossOutput(**outputs)
    if _distributed.mesh_of(predictions, targets, options) is not None:

        def call_with(predictions: Any, targets: Any, options: Options) -> MultiStepLossOutput:
            group, normalize = process_group, normalize_importance_weights
            return _run(plan, heads, predictions, targets, options, group, normalize, check, impl)

        return _distributed.by_whole(call_with, predictions, targets, options)  # type: ignore[no-any-return]
    if check:
        _numbers.check_flag("multi_step_loss: check", check)
        check_values(heads, predictions, targets, options)
    if process_group is not None or normalize_importance_weights:
        call = validate(heads, predictions, targets, options)
        options = for_all_ranks(call, process_group, normalize_importance_weights).options
    if is_eager and needs_python:
        outputs = _fused_loss(plan, predictions, targets, options)
        if not isinstance(outputs, Refusal):
            return MultiStepLossOutput(**outputs)
    call = validate(heads, predictions, targets, options)
    shows_operator = plan is None or _context.shows_operators()
    return _run_in_python(call, predictions, targets, impl, shows_operator, outputs)


def _run_in_python(
    call: Call,
    predictions: Mapping[str, FieldEntries],
    targets: Mapping[str, FieldEntries],
    impl: str,
    shows_operator: bool,
    refusal: object,
) -> MultiStepLossOutput:
    """Compute a call that eager kernels do not accept: by the operator, by the compiler or by the reference."""
    if impl == "reference" or (impl == "compiled" and not _context.is_eager()):
        return reference.loss_of(call)
    if impl == "compiled":
        if not can_compile(call):
            raise NotImplementedError(
                "multi_step_loss: impl='compiled' accepts plain tensors outside torch.func transforms, forward mode "
                "and dispatch modes; impl='reference' computes this call"
            )
        return loss_by_compiler(call, predictions, targets)
    is_transformed = _context.is_transformed()
    if shows_operator and not is_transformed and _all_plain(predictions) and _all_plain(targets):
        return call_operator(call, predictions, targets)
    if impl == "fused":
        raise NotImplementedError(
            "multi_step_loss: impl='fused' accepts plain tensors on "
            f"{' and '.join(DEVICE_TYPES)}, outside torch.func transforms, forward mode and dispatch modes; "
            "impl='auto' computes this call by the reference"
        )
    if _context.is_eager() and not is_transformed and call.device.type not in DEVICE_TYPES:
        return _without_kernels(call, predictions, targets)
    warn_of_reference("multi_step_loss", refusal)
    return reference.loss_of(call)


def _all_plain(entries: Any) -> bool:
    """Return True if all tensors are PyTorch's own class, on a device with a kernel of the operator."""
    if isinstance(entries, torch.Tensor):
        return entries.device.type in DEVICE_TYPES and not is_traceable_wrapper_subclass(entries)
    values = entries.values() if isinstance(entries, Mapping) else entries
    return values is None or all([_all_plain(value) for value in values])


def _without_kernels(
    call: Call, predictions: Mapping[str, FieldEntries], targets: Mapping[str, FieldEntries]
) -> MultiStepLossOutput:
    """Compute the loss by the reference, compiled where the compiler works, and say so once."""
    device = call.device
    compiler = device.type not in _without_compiler and can_compile(call)
    if compiler:
        try:
            out = loss_by_compiler(call, predictions, targets)
        except Exception as error:
            if not is_compiler_error(error):
                raise
            _without_compiler[device.type] = f" (torch.compile failed: {' '.join(str(error).split())[:200]})"
            compiler = False
    reason = _without_compiler.get(device.type, "")
    how = "; `python -m gradscale_ext` says how to get kernels" if device.type == "cuda" else ""
    _context.say_once(
        f"gradscale_ext: there are no kernels for {device.type} tensors here; gradscale_ext.reference computes the "
        f"loss{', compiled by torch.compile' if compiler else ''}: the same numbers, not fused{reason}{how}"
    )
    return out if compiler else reference.loss_of(call)


class MultiStepLoss(torch.nn.Module):
    """`multi_step_loss` with its heads, as a module.

    Args:
        **heads: name of each head to its dataclass.

    >>> loss_fn = MultiStepLoss(
    ...     value=TwoHot(Support.muzero(), weight=0.25),
    ...     reward=TwoHot(Support.muzero()),
    ...     policy=SoftCrossEntropy(),
    ... )
    >>> sorted(loss_fn.heads)
    ['policy', 'reward', 'value']
    """

    @_remedies.without_parameter("mapping")
    def __init__(self, /, *mapping: Mapping[str, Head], **heads: Head) -> None:
        """Keep the heads."""
        super().__init__()
        if mapping:
            raise TypeError(
                "MultiStepLoss: heads are keyword arguments, but a positional one is of type "
                f"{type(mapping[0]).__name__}; write MultiStepLoss(value=TwoHot(...), ...), or MultiStepLoss(**heads)"
            )
        check_heads(heads)
        self.heads = heads

    @classmethod
    @with_known_names
    def muzero(
        cls, support: Support | None = None, value_weight: float = 1.0, root_reward: bool = True
    ) -> MultiStepLoss:
        """The heads of the MuZero pseudocode: categorical value and reward, and the policy.

        Args:
            support: of value and reward, `Support.muzero()` when left out.
            value_weight: weight of the value head (0.25 in MuZero Reanalyse).
            root_reward: True: the reward head predicts at the root too, as in the pseudocode. False: it has
                ``first_step=1``, for the targets of `muzero_targets` without its `root_reward`.

        Raises:
            TypeError: `root_reward` is not a bool.
        """
        _numbers.check_flag("MultiStepLoss.muzero: root_reward", root_reward)
        support = Support.muzero() if support is None else support
        return cls(
            value=TwoHot(support, weight=value_weight),
            reward=TwoHot(support, first_step=0 if root_reward else 1),
            policy=SoftCrossEntropy(),
        )

    @classmethod
    @with_known_names
    def ppo(
        cls,
        clip: float | tuple[float, float] | None = 0.2,
        value_clip: float | None = None,
        value_weight: float = 0.5,
        entropy_weight: float = 0.01,
        continuous: bool = False,
        choices: Sequence[int] | None = None,
    ) -> MultiStepLoss:
        """The heads of PPO: `policy` and `value`.

        The target of `value` is ``{"returns": R}``, with `value_clip` ``{"returns": R, "values": v_old}``. For
        sequences `[B, T]` write ``reduction="valid_mean"``: "mean" divides by B alone.

        Args:
            clip: of the ratio; see `PolicyGradient`.
            value_clip: of the value; None: the plain squared error.
            value_weight: weight of half the squared error, as `vf_coef` is in CleanRL. In Stable-Baselines3 it is the
                weight of the whole squared error: write ``2 * vf_coef``.
            entropy_weight: weight of the entropy bonus.
            continuous: False: `PolicyGradient`, for discrete actions. True: `GaussianPolicyGradient`.
            choices: sizes of independent discrete choices; see `PolicyGradient`.

        Raises:
            TypeError: `continuous` is not a bool, or `choices` are given with it.

        >>> sorted(MultiStepLoss.ppo(continuous=True).heads)
        ['policy', 'value']
        """
        _numbers.check_flag("MultiStepLoss.ppo: continuous", continuous)
        weight = _numbers.real("MultiStepLoss.ppo: value_weight", value_weight) / 2
        value = ClippedSquaredError(clip=value_clip, weight=weight)
        if not continuous:
            return cls(policy=PolicyGradient(clip=clip, entropy_weight=entropy_weight, choices=choices), value=value)  # type: ignore[arg-type]
        if choices is not None:
            raise TypeError(
                "MultiStepLoss.ppo: choices are of discrete actions, but continuous=True; leave out one of the two"
            )
        return cls(policy=GaussianPolicyGradient(clip=clip, entropy_weight=entropy_weight), value=value)

    def _plan(self) -> Any:
        """The heads as the kernels read them; made again if `self.heads` has changed."""
        items = list(self.heads.items())
        planned = self.__dict__.get("_planned")
        if planned is None or planned[0] != items:
            planned = self.__dict__["_planned"] = (items, _make_plan(self.heads))
        return planned[1]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the plan, which is made again on demand."""
        state = dict(self.__dict__)
        state.pop("_planned", None)
        return state

    def forward(
        self,
        predictions: Mapping[str, FieldEntries],
        targets: Mapping[str, FieldEntries],
        *,
        step_weights: StepWeights = None,
        step_gradient_scale: StepGradientScale = None,
        importance_weights: ImportanceWeights = None,
        head_weights: HeadWeights = None,
        mask: Mask = None,
        reduction: Reduction = "mean",
        num_entries: NumEntries = None,
        nonfinite: Nonfinite = "propagate",
        process_group: torch.distributed.ProcessGroup | None = None,
        normalize_importance_weights: bool = False,
        batch_first: bool = True,
        steps: bool = True,
        check: bool = False,
        impl: Implementation = "auto",
    ) -> MultiStepLossOutput:
        """Compute the loss; `multi_step_loss` describes the arguments."""
        options = Options(
            step_weights,
            step_gradient_scale,
            importance_weights,
            mask,
            head_weights,
            num_entries,
            reduction,
            nonfinite,
            batch_first,
            steps,
        )
        plan = self._plan() if _context.is_eager() else None
        return _run(
            plan, self.heads, predictions, targets, options, process_group, normalize_importance_weights, check, impl
        )

    if TYPE_CHECKING:  # torch.nn.Module says that a call takes anything, and returns Any

        @_typed_as(forward)
        def __call__(self, *args: Any, **options: Any) -> Any: ...  # noqa: D102

    def extra_repr(self) -> str:
        """One line per head."""
        return "\n".join(f"{name}={head}" for name, head in self.heads.items())


def _differentiable_gradients(
    heads: dict[str, Head],
    predictions: list[FieldEntries],
    targets: list[FieldEntries | None],
    options: dict[str, Any],
    grad_output: torch.Tensor,
    create_graph: bool,
) -> list[torch.Tensor | None]:
    """The gradients of predictions and head weights, from the loss computed once more with the reference: of each head
    the fields in their order, and of each field the steps.

    C++ calls it when a backward pass is itself differentiated, and for a batched `grad_output`. Predictions and
    targets are in the order of `heads`, the options by name. An option that may differ by head is a list with a value
    for each head, with one value for all heads, or without a value.
    """
    with torch.enable_grad():
        # Views give a tensor that is used twice a separate gradient for each use.
        views = _distributed.mapped(lambda tensor: tensor.view_as(tensor), predictions)
        options["head_weights"] = weights = [
            weight.view_as(weight) if isinstance(weight, torch.Tensor) else weight for weight in options["head_weights"]
        ]
        for name in BY_HEAD:
            given = options[name]
            common = len(given) == 1 < len(heads)
            by_head = {name: value for name, value in zip(heads, given, strict=False) if value is not None}
            options[name] = given[0] if common else by_head or None
        loss = reference.multi_step_loss(
            heads,
            dict(zip(heads, views, strict=True)),
            {name: entries for name, entries in zip(heads, targets, strict=True) if entries is not None},
            **options,
        ).loss
        inputs: list[Any] = [*pytree.tree_leaves(views), *weights]
        is_wanted = [isinstance(entry, torch.Tensor) and entry.requires_grad for entry in inputs]
        wanted = list(itertools.compress(inputs, is_wanted))
        gradients = iter(torch.autograd.grad(loss, wanted, grad_output, create_graph=create_graph))
    return [next(gradients) if wants else None for wants in is_wanted]
