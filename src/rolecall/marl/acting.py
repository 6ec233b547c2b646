"""How agents choose: one forward pass for all environments and agents, and random numbers that are handed in."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolecall.marl.nets import UNAVAILABLE, Agents

How = Literal["greedy", "epsilon", "sample"]
Share = float | NDArray[np.float64]
"""Of random choices: in all environments, or in each [env, 1]."""


class Actor:
    """Chooses for `count` environments, episode after episode."""

    def __init__(self, agents: Agents, *, how: How, epsilon: Share = 0.0, temperature: float = 1.0) -> None:
        """`sample` draws from softmax(outputs / temperature). `epsilon` makes that share of choices uniform and takes
        the best otherwise."""
        self.agents, self.how, self.epsilon, self.temperature = agents, how, epsilon, temperature
        self._memory: Tensor | None = None
        self._last: Tensor | None = None

    def begin(self) -> None:
        """New episodes in all environments."""
        self._memory = self._last = None

    @torch.inference_mode()
    def act(self, obs: NDArray[np.float32], avail: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
        """obs [env, agent, obs] and avail [env, agent, action] -> actions [env, agent], all of them available."""
        x = self.agents.inputs(torch.from_numpy(obs), self._last)
        scores, self._memory = self.agents(x[None], self._memory)
        chosen = choose(scores[0].numpy(), avail, rng, how=self.how, epsilon=self.epsilon, temperature=self.temperature)
        if self.agents.shape.last_action:
            self._last = torch.nn.functional.one_hot(torch.from_numpy(chosen), avail.shape[-1]).float()
        return chosen


def choose(
    scores: NDArray[np.float32],
    avail: NDArray[np.bool_],
    rng: np.random.Generator,
    *,
    how: How,
    epsilon: Share = 0.0,
    temperature: float = 1.0,
) -> NDArray[np.int64]:
    """One available action per [env, agent]. As many random numbers are taken whatever is chosen."""
    scores = np.where(avail, scores, np.float32(UNAVAILABLE))
    best: NDArray[np.int64] = scores.argmax(-1)
    if how == "greedy":
        return best
    if how == "sample":
        return _draw(np.exp((scores - scores.max(-1, keepdims=True)) / temperature), rng.random(best.shape))
    explore = rng.random(best.shape) < epsilon
    return np.where(explore, _draw(avail.astype(np.float32), rng.random(best.shape)), best)


def _draw(weights: NDArray[np.float32], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """The action at which the cumulative weight passes the uniform number; one of weight 0 never."""
    sums = weights.cumsum(-1, dtype=np.float64)
    drawn: NDArray[np.int64] = (sums <= (uniform * sums[..., -1])[..., None]).sum(-1)
    return drawn
