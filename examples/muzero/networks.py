"""The networks of MuZero: representation, dynamics and prediction.

Schrittwieser et al., "Mastering Atari, Go, chess and shogi by planning with a learned model", Nature 588 (2020),
Methods, "Network input" and "Network architecture".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradscale_ext as gs

Outputs = dict[str, Tensor]


class MuZeroNetwork(nn.Module):
    """Representation h, dynamics g and prediction f as small multilayer perceptrons; h sees planes by convolutions.

    The search and `gs.unroll` call `initial_inference` and `recurrent_inference`. Both return the heads' outputs, which
    are logits, and the hidden state `[B, hidden_size]`.
    """

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        num_actions: int,
        support: gs.Support,
        hidden_size: int,
        layer_size: int,
    ) -> None:
        """Initialise the networks from torch's random numbers."""
        super().__init__()
        self.num_actions = num_actions
        self.support = support  # of value and reward
        network = perceptron if len(observation_shape) == 1 else convolutions
        self.representation = network(*observation_shape, layer_size, hidden_size)
        self.dynamics = perceptron(hidden_size + num_actions, layer_size, hidden_size)
        self.reward = head(hidden_size, layer_size, support.num_bins)
        self.value = head(hidden_size, layer_size, support.num_bins)
        self.policy = head(hidden_size, layer_size, num_actions)

    def forward(
        self, observation: Tensor, legal_actions: Tensor, actions: Tensor, hidden_scale: float
    ) -> dict[str, list[Tensor]]:
        """The predictions for the root and along the actions `[B, K]`. DistributedDataParallel wraps this call."""
        return gs.unroll(
            lambda root: self.initial_inference(root, legal_actions),
            self.recurrent_inference,
            observation,
            actions,
            hidden_scale=hidden_scale,
        )

    def initial_inference(self, observation: Tensor, legal_actions: Tensor) -> tuple[Outputs, Tensor]:
        """Maps an observation `[B, *observation_shape]` to value and policy of the root, and its hidden state.

        The logits of illegal actions according to `legal_actions`, `[B, A]`, are -inf. Legal actions are known only at
        the root: the dynamics have no rules, and learn that the search never chooses illegal actions.
        """
        hidden = scale_to_unit_interval(self.representation(observation))
        outputs = {"value": self.value(hidden), "policy": self.policy(hidden)}
        outputs["policy"] = outputs["policy"].masked_fill(~legal_actions, -torch.inf)
        return outputs, hidden

    def recurrent_inference(self, hidden: Tensor, action: Tensor) -> tuple[Outputs, Tensor]:
        """Maps hidden state and action `[B]` (int64) to the next reward, value, policy and hidden state."""
        one_hot_action = functional.one_hot(action, self.num_actions).to(hidden.dtype)
        hidden = scale_to_unit_interval(self.dynamics(torch.cat((hidden, one_hot_action), dim=-1)))
        outputs = {"reward": self.reward(hidden), "value": self.value(hidden), "policy": self.policy(hidden)}
        return outputs, hidden


def perceptron(input_size: int, layer_size: int, output_size: int) -> nn.Sequential:
    """A perceptron with one hidden layer."""
    return nn.Sequential(
        nn.Linear(input_size, layer_size), nn.LayerNorm(layer_size), nn.ReLU(), nn.Linear(layer_size, output_size)
    )


def convolutions(channels: int, height: int, width: int, layer_size: int, output_size: int) -> nn.Sequential:
    """Two convolutions, the second of which halves height and width, and a perceptron."""
    filters = 32
    flat_size = filters * ((height + 1) // 2) * ((width + 1) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, filters, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(filters, filters, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        *perceptron(flat_size, layer_size, output_size),
    )


def head(input_size: int, layer_size: int, output_size: int) -> nn.Sequential:
    """A perceptron with zero initial outputs, so that policies start uniform, and values and rewards at 0."""
    layers = perceptron(input_size, layer_size, output_size)
    nn.init.zeros_(layers[-1].weight)
    nn.init.zeros_(layers[-1].bias)
    return layers


def scale_to_unit_interval(hidden: Tensor) -> Tensor:
    """Scale the hidden state of every sample to 0..1, the range of the action that the dynamics also receive."""
    minimum = hidden.amin(dim=-1, keepdim=True)
    maximum = hidden.amax(dim=-1, keepdim=True)
    return (hidden - minimum) / (maximum - minimum + 1e-5)
