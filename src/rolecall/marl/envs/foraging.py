"""Level-based foraging, many boards at a time: the rules, rewards, observations and random numbers of lbforaging 2.0.0.

Players of different levels walk a grid and pick up food together: food goes if the levels of the players that load beside
it add up to its own. A board is a function of its seed, the one that a new lbforaging environment has after
`reset(seed=…)`; tests compare every number of thousands of steps. What differs: the 50-step limit is a truncation.

Cells are numbers on a board with a border, so that neighbours are at distance 1 and `width`:

    # # # # #           3 x 3 cells, width 5: the first inner cell is 6; north is -5, south +5, west -1, east +1
    # . . . #
    # . F . #           A border and food block a move. Two players that want one cell both stay; a swap is allowed.
    # . . . #
    # # # # #
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rolecall.marl.envs.base import EnvSpec, Frame

_LOAD = 5
_ATTEMPTS = 1000
"""Tries to place something, as in lbforaging."""


class ForagingEnvs:
    """Boards that step together."""

    def __init__(
        self,
        *,
        name: str,
        size: int,
        players: int,
        food: int,
        sight: int,
        coop: bool,
        count: int,
        limit: int = 50,
        penalty: float = 0.0,
    ) -> None:
        self.size, self.players, self.food, self.sight, self.coop = size, players, food, sight, coop
        self.count, self._penalty, self._width = count, penalty, size + 2
        self.spec = EnvSpec(
            name=name,
            agents=tuple(f"player_{i}" for i in range(players)),
            obs_size=3 * (food + players),
            n_actions=6,
            limit=limit,
            team="sum",
        )
        self._frame = Frame.of(self.spec, count)
        width = self._width
        self._moves = np.array([0, -width, width, -1, 1, 0])
        self._rows, self._boards = np.arange(count)[:, None], np.arange(count)
        self._border = np.ones((width, width), bool)
        self._border[1:-1, 1:-1] = False
        # The players in the order in which each of them sees them: itself first.
        self._order = np.array([[p, *(q for q in range(players) if q != p)] for p in range(players)])
        self._blocked = np.zeros((count, width * width), bool)
        self._cell = np.zeros((count, players), np.int64)
        self._level = np.zeros((count, players), np.int64)
        self._food_cell = np.zeros((count, food), np.int64)
        self._food_level = np.zeros((count, food), np.int64)
        self._alive = np.zeros((count, food), bool)
        self._spawned = np.zeros(count, np.int64)
        self._step = 0

    def reset(self, seeds: Sequence[int]) -> Frame:
        self._step = 0
        self._blocked[:] = self._border.reshape(-1)
        self._food_level[:] = 0
        for i, seed in enumerate(seeds):
            self._spawn(i, np.random.Generator(np.random.PCG64(seed)))
        self._alive = self._food_level > 0
        self._spawned = self._food_level.sum(1)
        self._blocked[np.nonzero(self._alive)[0], self._food_cell[self._alive]] = True
        self._frame.reward[:] = 0
        self._frame.terminated[:] = self._frame.truncated[:] = False
        self._look()
        return self._frame

    def _spawn(self, i: int, rng: np.random.Generator) -> None:
        """Place players, then food, drawing exactly what lbforaging draws."""
        size, width = self.size, self._width
        rng.permutation(self.players)  # of the level limits, which are the same for all
        taken: set[tuple[int, int]] = set()
        for p in range(self.players):
            for _ in range(_ATTEMPTS):
                at = int(rng.integers(0, size)), int(rng.integers(0, size))
                if at not in taken:
                    taken.add(at)
                    self._cell[i, p] = (at[0] + 1) * width + at[1] + 1
                    self._level[i, p] = rng.integers(1, 3)
                    break
        most = int(np.sort(self._level[i])[:3].sum())
        least = most if self.coop else 1
        rng.permutation(self.food)
        placed: list[tuple[int, int, int]] = []
        for _ in range(_ATTEMPTS):
            if len(placed) == self.food:
                break
            row, column = int(rng.integers(1, size - 1)), int(rng.integers(1, size - 1))
            if (row, column) in taken or any(_near(row - r, column - c) for r, c, _ in placed):
                continue
            level = least if least == most else int(rng.integers(least, most + 1))
            placed.append((row, column, level))
        for k, (row, column, level) in enumerate(sorted(placed)):
            self._food_cell[i, k] = (row + 1) * width + column + 1
            self._food_level[i, k] = level

    def step(self, actions: NDArray[np.int64], running: NDArray[np.bool_]) -> Frame:
        """Move, then load."""
        self._step += 1
        gap = np.abs(self._cell[:, :, None] - self._food_cell[:, None, :])
        beside = ((gap == 1) | (gap == self._width)) & self._alive[:, None, :]
        loads = (actions == _LOAD)[:, :, None] & beside  # no cell is beside two pieces of food

        target = self._cell + self._moves[actions]
        target = np.where(self._blocked[self._rows, target], self._cell, target)
        wanted = (target[:, :, None] == target[:, None, :]).sum(2)
        self._cell = np.where(wanted > 1, self._cell, target)

        reward = self._frame.reward
        reward[:] = 0
        if loads.any():
            strength = (loads * self._level[:, :, None]).sum(1)
            gone = (strength >= self._food_level) & (strength > 0)
            shares = self._level[:, :, None] * self._food_level[:, None, :]
            whole = np.maximum(strength * self._spawned[:, None], 1)[:, None, :]
            reward += np.where(loads & gone[:, None, :], shares / whole, 0.0).sum(2)
            if self._penalty:
                reward -= self._penalty * (loads & ~gone[:, None, :]).any(2)
            boards, which = np.nonzero(gone)
            self._blocked[boards, self._food_cell[boards, which]] = False
            self._alive &= ~gone
            self._food_level[gone] = 0
        self._frame.terminated[:] = ~self._alive.any(1)
        self._frame.truncated[:] = ~self._frame.terminated & (self._step >= self.spec.limit)
        self._look()
        return self._frame

    def _look(self) -> None:
        """What each player sees: food, then players, itself first, as (row, column, level) from its corner of sight."""
        row, column = np.divmod(self._cell, self._width)
        food_row, food_column = np.divmod(self._food_cell, self._width)
        top, left = np.maximum(row - 1 - self.sight, 0), np.maximum(column - 1 - self.sight, 0)
        obs = self._frame.obs.reshape(self.count, self.players, self.food + self.players, 3)

        foods = np.empty((self.count, self.players, self.food, 3), np.float32)
        foods[..., 0] = food_row[:, None, :] - 1 - top[:, :, None]
        foods[..., 1] = food_column[:, None, :] - 1 - left[:, :, None]
        foods[..., 2] = self._food_level[:, None, :]
        seen = np.broadcast_to(self._alive[:, None, :], foods.shape[:3])
        if self.sight < self.size:
            near = np.abs(food_row[:, None, :] - row[:, :, None]) <= self.sight
            seen = seen & near & (np.abs(food_column[:, None, :] - column[:, :, None]) <= self.sight)
        obs[:, :, : self.food] = _first(foods, seen)

        others = np.empty((self.count, self.players, self.players, 3), np.float32)
        others[..., 0] = row[:, self._order] - 1 - top[:, :, None]
        others[..., 1] = column[:, self._order] - 1 - left[:, :, None]
        others[..., 2] = self._level[:, self._order]
        if self.sight < self.size:
            # As lbforaging has it: a window of 2 sight + 1 from the corner, also where the corner is the board's.
            inside = (others[..., :2] >= 0) & (others[..., :2] <= 2 * self.sight)
            others = _first(others, inside[..., 0] & inside[..., 1])
        obs[:, :, self.food :] = others

    def close(self) -> None:
        """Nothing is held."""


def _near(rows: int, columns: int) -> bool:
    """Too close for two pieces of food: touching, corners included, or two apart in a line."""
    rows, columns = abs(rows), abs(columns)
    return max(rows, columns) <= 1 or (rows + columns == 2)


def _first(items: NDArray[np.float32], seen: NDArray[np.bool_]) -> NDArray[np.float32]:
    """What is seen moves to the front, in its order; after it (-1, -1, 0)."""
    if seen.all():
        return items
    order = np.argsort(~seen, axis=2, kind="stable")
    front = np.take_along_axis(items, order[..., None], 2)
    missing = ~np.take_along_axis(seen, order, 2)
    front[missing] = (-1, -1, 0)
    return front
