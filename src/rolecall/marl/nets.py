"""Networks of agents: what each sees becomes one number per action.

Shared parameters: one network, told by a one-hot number which agent it is. Otherwise one network per agent.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rolecall.marl.gru import GRU

UNAVAILABLE = -1e9
"""Stands for minus infinity where an action may not be done: finite, so that no arithmetic turns it into NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentShape:
    """What networks of agents must know."""

    agents: int
    obs: int
    actions: int
    hidden: int
    recurrent: bool
    """A GRU between two layers, as in PyMARL; else a second layer."""
    shared: bool
    """One network for all agents."""
    last_action: bool
    """Each agent also sees what it did last."""

    @property
    def inputs(self) -> int:
        """Numbers that go in."""
        return self.obs + (self.agents if self.shared else 0) + (self.actions if self.last_action else 0)


class AgentNet(nn.Module):
    """One network: layer, ReLU, GRU or another layer with ReLU, layer."""

    def __init__(self, shape: AgentShape) -> None:
        super().__init__()
        self.recurrent = shape.recurrent
        self.first = nn.Linear(shape.inputs, shape.hidden)
        self.middle = (GRU if shape.recurrent else nn.Linear)(shape.hidden, shape.hidden)
        self.last = nn.Linear(shape.hidden, shape.actions)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x [time, rows, inputs] -> [time, rows, actions], and the memory [1, rows, hidden] after the last step."""
        x = torch.relu(self.first(x))
        if self.recurrent:
            x, memory = self.middle(x, memory)
        else:
            x = torch.relu(self.middle(x))
        return self.last(x), memory


class Agents(nn.Module):
    """The networks of all agents."""

    ids: Tensor

    def __init__(self, shape: AgentShape, *, seed: int) -> None:
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.nets = nn.ModuleList(AgentNet(shape) for _ in range(1 if shape.shared else shape.agents))
        self.register_buffer("ids", torch.eye(shape.agents), persistent=False)

    def inputs(self, obs: Tensor, last_onehot: Tensor | None = None) -> Tensor:
        """obs [..., agent, obs] followed by what else an agent is given; `last_onehot` [..., agent, action]."""
        parts = [obs]
        if self.shape.last_action:
            parts.append(torch.zeros(*obs.shape[:-1], self.shape.actions) if last_onehot is None else last_onehot)
        if self.shape.shared:
            parts.append(self.ids.expand(*obs.shape[:-1], -1))
        return torch.cat(parts, -1) if len(parts) > 1 else obs

    def forward(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x [time, batch, agent, inputs] -> [time, batch, agent, actions]; memory [batch, agent, hidden].

        Inputs that are not finite give outputs that are not: replace what does not count before.
        """
        time, batch, agents, width = x.shape
        if self.shape.shared:
            held = None if memory is None else memory.reshape(1, batch * agents, -1)
            out, held = self.nets[0](x.reshape(time, batch * agents, width), held)
            after = None if held is None else held.view(batch, agents, -1)
            return out.view(time, batch, agents, -1), after
        outs, after_each = [], []
        for i, net in enumerate(self.nets):
            held = None if memory is None else memory[None, :, i].contiguous()
            out, held = net(x[:, :, i], held)
            outs.append(out)
            after_each.append(held)
        behind = None if after_each[0] is None else torch.cat([h for h in after_each if h is not None]).transpose(0, 1)
        return torch.stack(outs, 2), behind

    def at(self, x: Tensor, agent: Tensor) -> Tensor:
        """Feed-forward networks on single steps: x [rows, inputs] of the agents [rows] -> [rows, actions]."""
        if self.shape.shared:
            return self.nets[0](x[None])[0][0]
        out = x.new_zeros(len(x), self.shape.actions)
        for i, net in enumerate(self.nets):
            rows = torch.nonzero(agent == i)[:, 0]
            out = out.index_copy(0, rows, net(x[rows][None])[0][0])
        return out


class Critic(nn.Module):
    """V of what it is shown, and of which agent it is asked about: two layers with ReLU, and one number."""

    def __init__(self, inputs: int, hidden: int, *, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(
                nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
            )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [...]."""
        return self.body(x)[..., 0]


def save_agents(agents: Agents, directory: Path, about: Mapping[str, Any]) -> None:
    """Write agents.safetensors and agents.json, which says what they are; `about` goes into it too."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in agents.state_dict().items()}, directory / "agents.safetensors"
    )
    (directory / "agents.json").write_text(json.dumps({"shape": asdict(agents.shape), **about}, indent=1))


def load_agents(directory: str | Path) -> tuple[Agents, dict[str, Any]]:
    """Agents that `save_agents` wrote, and what is known about them."""
    directory = Path(directory)
    about = json.loads((directory / "agents.json").read_text())
    agents = Agents(AgentShape(**about.pop("shape")), seed=0)
    agents.load_state_dict(load_file(directory / "agents.safetensors"))
    return agents, about
