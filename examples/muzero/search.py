"""Monte Carlo tree search with the learned model, in many environments at once.

The search of MuZero (Schrittwieser et al. 2020, Methods, "Search"): a simulation descends by the pUCT rule to an
unvisited edge, evaluates the state behind it with the networks, and backs the return up along its path. Every
environment has its own tree. All trees run their n-th simulation together, with one call of the networks.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import gradscale_ext as gs
from games import Booleans, Floats, Integers
from networks import MuZeroNetwork, Outputs

# c1 and c2 of the pUCT rule, as in the paper.
EXPLORATION_INITIAL = 1.25
EXPLORATION_BASE = 19652.0


@dataclass
class SearchResult:
    """The results of a search at the roots."""

    policy: Floats  # [E, A], the fraction of simulations that began with each action
    value: Floats  # [E], the mean return of the simulations
    best_action: Integers  # [E], the most visited action; ties go to the largest mean return


@dataclass
class Evaluation:
    """The networks' outputs for one state of every tree."""

    policy: Floats  # [E, A], probabilities
    value: Floats  # [E]
    reward: Floats | float  # [E], for the transition into the state; a root has none
    hidden: Floats  # [E, hidden_size]


@dataclass
class Edges:
    """One edge of every tree. A descent that has reached its leaf repeats its last edge, and is no longer `active`."""

    node: Integers  # [E]
    action: Integers  # [E]
    active: Booleans  # [E]


class Trees:
    """The trees of E environments, as arrays. Node 0 is the root; an edge is a pair of a node and an action."""

    def __init__(self, root: Evaluation, num_simulations: int) -> None:
        """Make trees that consist of a root, with space for the node of every simulation."""
        num_environments, num_actions = root.policy.shape
        nodes = (num_environments, num_simulations + 1)
        edges = (*nodes, num_actions)
        self.rows = np.arange(num_environments)
        self.hidden = np.zeros((*nodes, root.hidden.shape[-1]), dtype=np.float32)
        self.prior = np.zeros(edges, dtype=np.float32)
        self.reward = np.zeros(edges, dtype=np.float32)
        self.visits = np.zeros(edges, dtype=np.float32)
        self.returns = np.zeros(edges, dtype=np.float32)  # mean over the visits, including the edge's own reward
        self.child = np.full(edges, -1, dtype=np.int64)  # -1 for an unvisited edge
        self.smallest_return = np.full(num_environments, np.inf, dtype=np.float32)
        self.largest_return = np.full(num_environments, -np.inf, dtype=np.float32)
        self.hidden[:, 0] = root.hidden
        self.prior[:, 0] = root.policy

    def descend(self) -> list[Edges]:
        """Follow the pUCT rule in every tree, from the root to an unvisited edge."""
        node = np.zeros_like(self.rows)
        active = np.ones(len(self.rows), dtype=bool)
        path = []
        while active.any():
            action = self.scores(node).argmax(axis=-1)
            path.append(Edges(node, action, active))
            child = self.child[self.rows, node, action]
            active = child >= 0
            node = np.where(active, child, node)
        return path

    def scores(self, node: Integers) -> Floats:
        """Q(s, a) + c(s) P(s, a) √N(s) / (1 + N(s, a)), Q scaled to 0..1 by the returns seen in the tree. `[E, A]`."""
        visits = self.visits[self.rows, node]
        node_visits = 1 + visits.sum(axis=-1, keepdims=True)
        exploration = EXPLORATION_INITIAL + np.log((node_visits + EXPLORATION_BASE) / EXPLORATION_BASE)
        bonus = exploration * self.prior[self.rows, node] * np.sqrt(node_visits) / (1 + visits)
        smallest = self.smallest_return[:, None]
        scaled = (self.returns[self.rows, node] - smallest) / np.maximum(self.largest_return[:, None] - smallest, 1e-3)
        return np.where(visits > 0, scaled, 0) + bonus

    def expand(self, leaf: Edges, node: int, evaluation: Evaluation) -> None:
        """Add a node to every tree, behind its leaf edge."""
        self.child[self.rows, leaf.node, leaf.action] = node
        self.reward[self.rows, leaf.node, leaf.action] = evaluation.reward
        self.hidden[:, node] = evaluation.hidden
        self.prior[:, node] = evaluation.policy

    def back_up(self, path: list[Edges], leaf_value: Floats, discount: float) -> None:
        """Go back along the paths, and add to the mean of every edge the return from there on."""
        value = leaf_value.copy()
        for edges in reversed(path):
            row = self.rows[edges.active]
            edge = (row, edges.node[row], edges.action[row])
            value[row] = self.reward[edge] + discount * value[row]
            self.visits[edge] += 1
            self.returns[edge] += (value[row] - self.returns[edge]) / self.visits[edge]
            self.smallest_return[row] = np.minimum(self.smallest_return[row], self.returns[edge])
            self.largest_return[row] = np.maximum(self.largest_return[row], self.returns[edge])


@torch.no_grad()  # makes decoding one kernel; in inference mode it is a dozen calls of PyTorch
def search(
    network: MuZeroNetwork,
    observation: Floats,
    legal_actions: Booleans,
    num_simulations: int,
    discount: float,
    noise: Floats | None = None,
    noise_fraction: float = 0.0,
) -> SearchResult:
    """Search from every observation.

    Args:
        network: the model to plan with.
        observation: `[E, *observation_shape]`, the states to search from.
        legal_actions: `[E, A]`, the actions that the searches may begin with.
        num_simulations: simulations of each search.
        discount: discount of a value one step earlier: γ, or -γ with two players, because values belong to the player
            to move.
        noise: `[E, A]`, probabilities of legal actions that are mixed into the priors of the roots, so that no action
            is excluded permanently.
        noise_fraction: the weight of `noise` in the priors.
    """
    support = network.support
    root = decode(support, *network.initial_inference(torch.from_numpy(observation), torch.from_numpy(legal_actions)))
    if noise is not None:
        root.policy = (1 - noise_fraction) * root.policy + noise_fraction * noise
    trees = Trees(root, num_simulations)
    for node in range(1, num_simulations + 1):
        path = trees.descend()
        leaf = path[-1]
        hidden = torch.from_numpy(trees.hidden[trees.rows, leaf.node])
        evaluation = decode(support, *network.recurrent_inference(hidden, torch.from_numpy(leaf.action)))
        trees.expand(leaf, node, evaluation)
        trees.back_up(path, evaluation.value, discount)
    visits, returns = trees.visits[:, 0], trees.returns[:, 0]
    return SearchResult(
        policy=visits / num_simulations,
        value=(root.value + (visits * returns).sum(axis=-1)) / (1 + num_simulations),
        best_action=np.lexsort((returns, visits), axis=-1)[:, -1],
    )


def time_search(repetitions: int, *arguments: Any) -> float:
    """Median time in seconds of a search with these arguments."""
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        search(*arguments)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def decode(support: gs.Support, outputs: Outputs, hidden: torch.Tensor) -> Evaluation:
    """The networks' logits as probabilities and scalars."""
    return Evaluation(
        policy=outputs["policy"].softmax(dim=-1).numpy(),
        value=support.decode(outputs["value"]).numpy(),
        reward=support.decode(outputs["reward"]).numpy() if "reward" in outputs else 0.0,
        hidden=hidden.numpy(),
    )
