"""Matrix games: two agents choose at the same moment, both get what the table says, 25 times over."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rolecall.marl.envs.base import EnvSpec, Frame

CLIMBING = ((11, -30, 0), (-30, 7, 0), (0, 6, 5))
"""Claus & Boutilier 1998."""


def penalty(k: float) -> tuple[tuple[float, ...], ...]:
    """Two good agreements, each beside a loss of |k|; a safe one between them."""
    loss = -abs(k)
    return ((loss, 0, 10), (0, 2, 0), (10, 0, loss))


class MatrixGames:
    """A table of payoffs, played by many pairs at a time. Nothing is seen but that the game goes on.

    The limit cuts off: the game itself has no end.
    """

    def __init__(self, payoffs: Sequence[Sequence[float]], *, name: str, count: int, limit: int) -> None:
        self._payoffs = np.array(payoffs, np.float64)
        self.count = count
        self.spec = EnvSpec(
            name=name, agents=("row", "column"), obs_size=1, n_actions=len(payoffs), limit=limit, team="mean"
        )
        self._frame = Frame.of(self.spec, count)
        self._frame.obs[:] = 1
        self._step = 0

    def reset(self, seeds: Sequence[int]) -> Frame:
        """Begin again; there is nothing random."""
        self._step = 0
        self._frame.truncated[:] = False
        return self._frame

    def step(self, actions: NDArray[np.int64], running: NDArray[np.bool_]) -> Frame:
        self._step += 1
        self._frame.reward[:] = self._payoffs[actions[:, 0], actions[:, 1]][:, None]
        self._frame.truncated[:] = self._step >= self.spec.limit
        return self._frame

    def close(self) -> None:
        """Nothing is held."""
