"""The order in which rows are trained on."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from rolecall.errors import UserError
from rolecall.tasks.rows import share_of
from rolecall.tasks.streams import Stream

_log = logging.getLogger(__name__)


def order_of(rows: Any, *, seed: int) -> "RowOrder | StreamOrder":
    """The order in which rows are trained on: shuffled again in each pass, or a stream's own."""
    return StreamOrder(rows) if isinstance(rows, Stream) else RowOrder(len(rows), seed=seed)


class StreamOrder:
    """Endless passes over a stream, all in its own order. Its state is the position in the stream."""

    def __init__(self, rows: Stream) -> None:
        self.rows, self.position, self.taken = rows, 0, 0

    def take(self, count: int) -> list[int]:
        """The next rows."""
        chosen = []
        for _ in range(count):
            chosen.append(self.rows.next(self.position))
            self.position = chosen[-1] + 1
        self.taken += count
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """How far it is, and a hash of the row before."""
        return {"position": self.position, "taken": self.taken, "row": self._before()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "position" not in state:
            raise UserError("this run began with a table of rows, not with a stream: resume it with the same rows")
        self.position, self.taken = int(state["position"]), int(state["taken"])
        if self._before() != state["row"]:
            _log.warning(
                "the stream gives another row %d than when the checkpoint was written, so the run continues with other rows; "
                "a stream that is shuffled needs a seed",
                self.position - 1,
            )

    def _before(self) -> float | None:
        return share_of(str(self.rows[self.position - 1])) if self.position else None


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
        return {"rows": self.rows, "seed": self.seed, "taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "rows" not in state:
            raise UserError("this run began with a stream, not with a table of rows: resume it with the same rows")
        if (state["rows"], state["seed"]) != (self.rows, self.seed):
            _log.warning(
                "the checkpoint was taken with %d rows in the order of seed %d; there are %d in that of seed %d now, so "
                "the run continues from row %d of a new order",
                *(state["rows"], state["seed"], self.rows, self.seed, int(state["taken"]) % self.rows),
            )
        self.taken = int(state["taken"])
