"""TRL: `GRPOTrainer._compute_loss`, with a small model of tokens in place of a language model."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

import gradscale_ext as gs

from .checkout import Checkout, Edit
from .lockstep import Side, clear, leaves
from .project import Project

ANSWERS, PROMPT, LENGTH, VOCABULARY, FEATURES = 8, 8, 48, 2048, 32
TRAINER, UTILITIES = "trl/trainer/grpo_trainer.py", "trl/trainer/utils.py"


def token_loss(logits, inputs, mask, trainer):
    """GRPO's loss: a mean over the tokens of each answer, then over answers."""
    head = gs.PolicyGradient(clip=(trainer.epsilon_low, trainer.epsilon_high), kl_weight=trainer.beta)
    fields = {
        "actions": inputs["completion_ids"],
        "advantages": inputs["advantages"][:, None].expand_as(mask),
        "log_probs": inputs["old_per_token_logps"],
        "reference_log_probs": inputs["ref_per_token_logps"],
    }
    lengths = mask.sum(1, keepdim=True).clamp(min=1).to(logits.dtype)
    return gs.multi_step_loss(
        {"policy": head}, {"policy": logits}, {"policy": fields}, mask=mask.bool(), step_weights=mask / lengths
    )


EDITS = [
    Edit(
        TRAINER,
        "_compute_loss",
        "per_token_logps, entropies, aux_loss = ",
        "return loss",
        """
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        out = token_loss(logits / self.temperature, inputs, mask, self)
        loss = out.loss / self.current_gradient_accumulation_steps
        e = inputs["ref_per_token_logps"] - out.log_probs["policy"]
        for name, value in (("kl", e.expm1() - e), ("entropy", out.entropy["policy"])):
            self._metrics["train"][name].append(((value * mask).sum() / mask.sum()).item())
        """,
    )
]


class Tokens(torch.nn.Module):
    """Logits from the mean of the embeddings so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, FEATURES)
        self.head = torch.nn.Linear(FEATURES, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        features = self.embedding(input_ids).cumsum(1) / torch.arange(1, input_ids.shape[1] + 1)[:, None]
        return SimpleNamespace(logits=self.head(features))


def sides(checkout: Checkout) -> tuple[Side, Side]:
    return _side(checkout, []), _side(checkout, EDITS)


def _side(checkout: Checkout, edits: list[Edit]) -> Side:
    torch.manual_seed(0)
    model = Tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compute_loss = _compute_loss(checkout, edits)

    def step(data: Any) -> dict[str, Any]:
        optimizer.zero_grad()
        trainer = trainer_of()
        loss = compute_loss(trainer, model, data)
        loss.backward()
        optimizer.step()
        reported = {name: torch.tensor(trainer._metrics["train"][name]) for name in ("entropy", "kl")}
        return {"loss": loss.detach(), **reported}

    return Side(step, [optimizer], _loss_alone(compute_loss), [model])


def _compute_loss(checkout: Checkout, edits: list[Edit]) -> Any:
    names = {"torch": torch, "F": functional, "nanmin": torch.min, "nanmax": torch.max}
    for name in ("selective_log_softmax", "entropy_from_logits"):
        names[name] = checkout.inner_function(UTILITIES, name, [], names)
    names["profiling_decorator"] = lambda function: function
    method = checkout.inner_function(TRAINER, "_get_per_token_logps_and_entropies", [], names)
    compute_loss = checkout.inner_function(TRAINER, "_compute_loss", edits, {**names, "token_loss": token_loss})

    def bound(trainer: Any, model: Any, data: Any) -> torch.Tensor:
        trainer._get_per_token_logps_and_entropies = lambda *given, **named: method(trainer, *given, **named)
        return compute_loss(trainer, model, data)

    return bound


def trainer_of() -> SimpleNamespace:
    """The settings that the loss reads: GRPO with a divergence from a reference model, and no other option."""
    one_process = {"gather": lambda x: x.reshape(-1), "reduce": lambda x, reduction: x, "num_processes": 1}
    return SimpleNamespace(
        **{"loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.04, "temperature": 0.9},
        **{"epsilon_low": 0.2, "epsilon_high": 0.28, "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0},
        **{"use_vllm": False, "aux_loss_enabled": False, "_entropy_bonus_enabled": False, "model_kwarg_keys": ()},
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        accelerator=SimpleNamespace(**one_process),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
    )


def _loss_alone(compute_loss: Any) -> Any:
    (logits,), data = leaves([ANSWERS, PROMPT + LENGTH, VOCABULARY]), batch(0)

    def loss() -> list[torch.Tensor]:
        clear([logits])
        compute_loss(trainer_of(), lambda **_: SimpleNamespace(logits=logits.clone()), data).backward()
        return [logits]

    return loss


def batch(seed: int) -> dict[str, Any]:
    """Answers with padding. Old and reference log-probabilities are near those of a uniform distribution."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (ANSWERS, PROMPT + LENGTH), generator=random)
    lengths = torch.randint(1, LENGTH + 1, (ANSWERS, 1), generator=random)
    advantages = torch.randn(ANSWERS, generator=random)
    old, reference = (
        0.3 * torch.randn(ANSWERS, LENGTH, generator=random) - torch.tensor(float(VOCABULARY)).log() for _ in range(2)
    )
    return {
        "prompt_ids": tokens[:, :PROMPT],
        "prompt_mask": torch.ones(ANSWERS, PROMPT, dtype=torch.int64),
        "completion_ids": tokens[:, PROMPT:],
        "completion_mask": (torch.arange(LENGTH) < lengths).to(torch.int64),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
    }


PROJECT = Project(
    name="trl-grpo",
    repository="huggingface/trl",
    commit="f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    marker=TRAINER,
    case=f"GRPO: {ANSWERS} answers of {LENGTH} tokens, vocabulary {VOCABULARY}, features {FEATURES}",
    edits=EDITS,
    sides=sides,
    batch=batch,
)
