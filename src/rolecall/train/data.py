"""The order in which rows are trained on."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

_log = logging.getLogger(__name__)


class RowOrder:
    """Endless passes over the rows, each in its own order. Its whole state is how many rows were taken."""

    def __init__(self, rows: int, *, seed: int) -> None:
        if rows < 1:
            raise ValueError("there are no rows to train on")
        self.rows, self.seed, self.taken = rows, seed, 0
        self._pass: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int64))

    def take(self, count: int) -> list[int]:
        """The next rows; a pass ends in the middle of a step if it must, and no row is left out."""
        chosen: list[int] = []
        while len(chosen) < count:
            epoch, start = divmod(self.taken, self.rows)
            if self._pass[0] != epoch:
                self._pass = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self.rows))
            more = self._pass[1][start : start + count - len(chosen)].tolist()
            chosen += more
            self.taken += len(more)
        return chosen

    def state_dict(self) -> dict[str, int]:
        """How far it is."""
        return {"rows": self.rows, "seed": self.seed, "taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if (state["rows"], state["seed"]) != (self.rows, self.seed):
            _log.warning(
                "the checkpoint was taken with %d rows in the order of seed %d; there are %d in that of seed %d now, so "
                "the run goes on from row %d of a new order",
                *(state["rows"], state["seed"], self.rows, self.seed, int(state["taken"]) % self.rows),
            )
        self.taken = int(state["taken"])
