"""From what each agent expects to what the team expects."""

import torch
from torch import Tensor, nn


class SumMixer(nn.Module):
    """VDN: the team's value is the sum of the agents'. Sunehag et al. 2017, arXiv 1706.05296."""

    def forward(self, values: Tensor, state: Tensor) -> Tensor:
        """values [rows, agent], state [rows, state] -> [rows]."""
        return values.sum(-1)


class MonotonicMixer(nn.Module):
    """QMIX: a small network from values to value whose weights come from the state and are never negative.

    Rashid et al. 2018, arXiv 1803.11485. What is best for one agent is then best for the team: the joint greedy choice
    is each agent's own. It begins as the sum, VDN's mixture, and learns where to leave it: with torch's own beginning the
    first weights are the noise of a network that nothing is known about yet.
    """

    def __init__(self, agents: int, state: int, *, embed: int, hidden: int, seed: int) -> None:
        super().__init__()
        self.agents, self.embed = agents, embed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.weights1 = nn.Sequential(nn.Linear(state, hidden), nn.ReLU(), nn.Linear(hidden, agents * embed))
            self.weights2 = nn.Sequential(nn.Linear(state, hidden), nn.ReLU(), nn.Linear(hidden, embed))
            self.bias1 = nn.Linear(state, embed)
            self.value = nn.Sequential(nn.Linear(state, embed), nn.ReLU(), nn.Linear(embed, 1))
            self._begin_as_sum()

    def _begin_as_sum(self) -> None:
        """Weights that do not depend on the state yet and keep elu where it is a straight line."""
        # Different for each hidden unit: equal ones would have equal gradients, and stay one for ever.
        inner = torch.empty(self.embed).uniform_(0.5, 1.5) / self.embed**0.5
        outer, lift = 1 / (self.embed * inner), torch.empty(self.embed).uniform_(0.5, 1.5)
        _constant(self.weights1[-1], inner.repeat(self.agents))
        _constant(self.weights2[-1], outer)
        _constant(self.bias1, lift)
        _constant(self.value[-1], -(lift * outer).sum())

    def forward(self, values: Tensor, state: Tensor) -> Tensor:
        """values [rows, agent], state [rows, state] -> [rows]."""
        weights1 = self.weights1(state).abs().view(-1, self.agents, self.embed)
        hidden = nn.functional.elu((values[:, :, None] * weights1).sum(1) + self.bias1(state))
        return (hidden * self.weights2(state).abs()).sum(-1) + self.value(state)[:, 0]


@torch.no_grad()
def _constant(layer: nn.Module, bias: Tensor) -> None:
    """The layer says this whatever it sees, until it learns."""
    assert isinstance(layer, nn.Linear)
    layer.weight.zero_()
    layer.bias.copy_(bias)
