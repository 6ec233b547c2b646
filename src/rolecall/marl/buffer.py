"""A ring of whole episodes to learn from again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolecall.marl.episodes import EpisodeBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Episodes drawn from a buffer: copies, so that nothing done to them reaches it."""

    episodes: EpisodeBatch
    """Trimmed to the longest."""
    index: Tensor
    """[batch] int64: where they lie, for `EpisodeBuffer.set_priorities`."""
    weights: Tensor
    """[batch] float: undoes the bias of drawing by priority; 1 without priorities."""


def inclusion_chances(sizes: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """The chance of each to be among `count` different ones: proportional to its size, but at most 1; they sum to count.

    What would exceed 1 is certain, and the rest share what is left:   sizes 6 1 1, count 2  ->  1, 0.5, 0.5
    """
    certain = np.zeros(len(sizes), bool)
    while True:
        chances = np.ones(len(sizes))
        chances[~certain] = (count - certain.sum()) * sizes[~certain] / sizes[~certain].sum()
        more = ~certain & (chances > 1 - 1e-12)  # nearly certain is certain: rounding must not draw one of them twice
        if not more.any():
            return chances
        certain |= more


def systematic_draw(chances: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Different indices, each with exactly its chance (Madow 1949).

    The chances are laid end to end in random order; points one apart, from a random start below 1, hit what is drawn.
    """
    certain = np.flatnonzero(chances == 1)
    order = rng.permutation(np.flatnonzero(chances < 1))
    ends = chances[order].cumsum()
    points = rng.random() + np.arange(round(float(chances[order].sum())))
    hit = ends.searchsorted(points, side="right").clip(max=len(order) - 1)  # the sum of the chances is rounded
    return np.concatenate([certain, order[hit]])


class EpisodeBuffer:
    """The last `capacity` episodes. The n-th draw is a function of the seed, n and the content: no state is shared.

    With `alpha` > 0 the chance to be in a draw is proportional to priority ** alpha, up to 1, and an episode is weighed by
    chance ** -beta, the largest weight in the buffer being 1 (Schaul et al. 2015, arXiv 1511.05952, who draw with
    replacement). With beta = 1 the weighted sum of anything over a draw is, in the mean over draws, proportional to its sum
    over the buffer. A new episode has the largest priority so far.
    """

    def __init__(self, capacity: int, *, seed: int, alpha: float = 0.0, beta: float = 0.4) -> None:
        if capacity < 1:
            raise ValueError(f"the buffer must hold at least 1 episode, got {capacity}")
        self.capacity, self.seed, self.alpha, self.beta = capacity, seed, alpha, beta
        self._data: dict[str, Tensor] = {}
        self._size = self._next = self._draws = 0
        self._priorities = torch.zeros(capacity, dtype=torch.float64)

    def __len__(self) -> int:
        return self._size

    def add(self, episodes: EpisodeBatch) -> None:
        """Copy episodes in over the oldest; of more than fit, the last ones stay."""
        episodes = episodes.rows(slice(max(0, len(episodes) - self.capacity), None))
        if not self._data:
            self._data = {
                name: torch.zeros(self.capacity, *tensor.shape[1:], dtype=tensor.dtype)
                for name, tensor in episodes.tensors().items()
            }
        given = episodes.tensors()
        self._check(given)
        where = (torch.arange(len(episodes)) + self._next) % self.capacity
        for name, tensor in given.items():
            width = tensor.shape[1]
            held = self._widened(name, width)
            held[where, :width] = tensor
            held[where, width:] = 0  # what a longer episode left behind must not count
        top = float(self._priorities.max())
        self._priorities[where] = top if top > 0 else 1.0
        self._next = int((self._next + len(episodes)) % self.capacity)
        self._size = min(self.capacity, self._size + len(episodes))

    def sample(self, count: int) -> Draw:
        """Draw different episodes, all of them if there are no more."""
        if not self._size:
            raise ValueError("the buffer is empty: add episodes before drawing from it")
        rng = np.random.default_rng([self.seed, self._draws])
        self._draws += 1
        count = min(count, self._size)
        if self.alpha > 0:
            chances = inclusion_chances(self._priorities[: self._size].numpy() ** self.alpha, count)
            index = torch.from_numpy(systematic_draw(chances, rng))
            weights = torch.from_numpy((chances[chances > 0].min() / chances[index.numpy()]) ** self.beta).float()
        else:
            index = torch.from_numpy(rng.choice(self._size, size=count, replace=False))
            weights = torch.ones(count)
        filled = self._data["filled"][index]
        width = max(1, int(filled.sum(1).max()))
        taken = {name: held[index, :width] for name, held in self._data.items()}  # indexing by a tensor copies
        return Draw(episodes=EpisodeBatch(**taken), index=index, weights=weights)

    def set_priorities(self, index: Tensor, errors: Tensor) -> None:
        """Give drawn episodes the size of their errors as priority."""
        if not bool(torch.isfinite(errors).all()):
            return  # a step that is skipped says nothing about the episodes
        self._priorities[index] = errors.detach().double().abs().cpu() + 1e-6

    def state_dict(self) -> dict[str, Any]:
        """Everything the next draw and the next episode depend on."""
        return {
            "size": self._size,
            "next": self._next,
            "draws": self._draws,
            "priorities": self._priorities[: self._size].clone(),
            "episodes": {name: held[: self._size].clone() for name, held in self._data.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        size = int(state["size"])
        if size > self.capacity:
            raise ValueError(
                f"the saved buffer holds {size} episodes and this one has room for {self.capacity}; make it larger"
            )
        self._size, self._next, self._draws = size, int(state["next"]), int(state["draws"])
        self._next = self._next if size == self.capacity else size % self.capacity
        self._priorities = torch.zeros(self.capacity, dtype=torch.float64)
        self._priorities[:size] = state["priorities"]
        self._data = {}
        for name, held in state["episodes"].items():
            self._data[name] = torch.zeros(self.capacity, *held.shape[1:], dtype=held.dtype)
            self._data[name][:size] = held

    def _widened(self, name: str, width: int) -> Tensor:
        """Room for `width` slots of a field."""
        held = self._data[name]
        if held.shape[1] < width:
            room = torch.zeros(self.capacity, width, *held.shape[2:], dtype=held.dtype)
            room[:, : held.shape[1]] = held
            self._data[name] = held = room
        return held

    def _check(self, given: Mapping[str, Tensor]) -> None:
        if given.keys() != self._data.keys():
            odd = sorted(given.keys() ^ self._data.keys())
            raise ValueError(f"these episodes are not like those in the buffer: {odd[0]} is only in one of them")
        for name, tensor in given.items():
            if tensor.shape[2:] != self._data[name].shape[2:]:
                raise ValueError(
                    f"{name} of these episodes is {tuple(tensor.shape[2:])} per slot, in the buffer it is "
                    f"{tuple(self._data[name].shape[2:])}"
                )
