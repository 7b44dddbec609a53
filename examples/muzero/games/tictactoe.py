"""Tic-tac-toe, and a player that plays it perfectly."""

from __future__ import annotations

import functools
from typing import ClassVar

import numpy as np

from games import Booleans, Floats, Game, Integers

LINES = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]])

Board = tuple[int, ...]  # 9 squares: 1 for the player to move, -1 for the other, 0 for empty


class TicTacToe(Game):
    """The move that completes a line of three earns 1."""

    title = "tic-tac-toe"
    observation_shape = (18,)  # squares of the player to move, and squares of the other
    num_actions = 9
    players = 2
    hyperparameters: ClassVar = {
        "num_environments": 128,
        "training_steps": 4_500,
        "num_simulations": 30,
        "discount": 1.0,
        "bootstrap_steps": 9,  # to the end: values are outcomes
        "random_actions": 0.1,  # opponents choose moves that self-play would avoid, so those must be learned too
        "replay_capacity": 50_000,
        "priority_exponent": 0.0,
        "updates_per_step": 4,
        "support_limit": 1.0,
        "support_bins": 21,
        "hidden_size": 64,
        "layer_size": 128,
    }
    opponent = "a perfect player"

    def reset(self, seed: int) -> Floats:
        self.board = np.zeros((self.num_games, 9), dtype=np.int64)
        self.ended = np.zeros(self.num_games, dtype=bool)
        return self.observation()

    def step(self, action: Integers) -> tuple[Floats, Floats, Booleans, Booleans]:
        beginning, rows = self.ended, np.arange(self.num_games)
        if not self.legal_actions()[rows, action].all():
            raise ValueError(f"these squares are taken: {action[~self.legal_actions()[rows, action]]}")
        self.board[rows, action] = 1
        self.board[beginning] = 0
        won = (self.board[:, LINES] == 1).all(axis=-1).any(axis=-1)
        self.ended = won | (self.board != 0).all(axis=-1)
        self.board *= -1  # the other player is to move
        return self.observation(), won.astype(np.float32), self.ended, np.zeros_like(self.ended)

    def observation(self) -> Floats:
        return np.concatenate((self.board == 1, self.board == -1), axis=-1).astype(np.float32)

    def legal_actions(self) -> Booleans:
        return (self.board == 0) | self.ended[:, None]

    def opponent_actions(self, generator: np.random.Generator) -> Integers:
        return np.array([generator.choice(best_moves(tuple(board))) for board in self.board.tolist()])


@functools.cache
def value(board: Board) -> int:
    """The result of the player to move under perfect play: 1, 0 or -1."""
    if any(board[a] == board[b] == board[c] == -1 for a, b, c in LINES.tolist()):
        return -1
    return max((-value(after(board, square)) for square in range(9) if board[square] == 0), default=0)


def best_moves(board: Board) -> list[int]:
    """The moves that keep the value of the position; any move if the game is over."""
    moves = [square for square in range(9) if board[square] == 0 and -value(after(board, square)) == value(board)]
    return moves or list(range(9))


def after(board: Board, square: int) -> Board:
    """The board after a move, as the other player sees it."""
    return tuple(-1 if i == square else -stone for i, stone in enumerate(board))


GAME = TicTacToe
