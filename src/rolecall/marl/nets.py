"""Networks of agents: what each sees becomes one number per action.

Shared parameters: one network, told by a one-hot number which agent it is. Otherwise one network per agent.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rolecall.marl.episodes import EpisodeBatch
from rolecall.maths.reduce import masked_sum

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


class GRU(nn.Module):
    """`torch.nn.GRU(inputs, hidden)`."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.bias_ih_l0 = nn.Parameter(torch.empty(3 * hidden))
        self.bias_hh_l0 = nn.Parameter(torch.empty(3 * hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [time, rows, inputs] -> [time, rows, hidden], and the memory [1, rows, hidden] after the last step."""
        weights = self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0
        before = x.new_zeros(x.shape[1], self.weight_hh_l0.shape[1]) if memory is None else memory[0]
        out: Tensor
        if torch.is_grad_enabled():
            out = _Walk.apply(x, before, *weights)
        elif len(x) == 1:  # agents that act
            out = torch.gru_cell(x[0], before, *weights)[None]
        else:
            out = _walk(x, before, *weights)[0][1:]
        return out, out[-1:]


class _Walk(torch.autograd.Function):
    """The steps one after the other, and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Tensor, *weights: Tensor) -> Tensor:
        states, gates, new = _walk(x, before, *weights)
        ctx.save_for_backward(x, states, gates, new, weights[0], weights[1])
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With d the gradient of h' at a step, that of what goes into r, z and n is d times factors known beforehand."""
        x, states, gates, new, w_in, w_state = ctx.saved_tensors
        hidden, time = new.shape[-1], len(new)
        reset, keep, remembered = gates.chunk(3, -1)  # r, z, h U_n
        into_new = (1 - keep) * (1 - new.square())
        factors = torch.empty_like(gates)
        r, z, n = factors.chunk(3, -1)
        torch.mul(into_new, reset, out=n)
        torch.mul(n, (1 - reset) * remembered, out=r)
        torch.mul(states[:-1] - new, keep * (1 - keep), out=z)
        back = torch.empty(time + 1, *grad.shape[1:], dtype=grad.dtype)
        back[0] = 0
        back[1:] = grad
        d = gates.new_empty(gates.shape)  # of h U + bias, all steps
        wide, steps = factors.unflatten(-1, (3, hidden)).unbind(), d.unflatten(-1, (3, hidden)).unbind()
        at, flat, kept = back.unbind(), d.unbind(), keep.unbind()
        for t in reversed(range(time)):
            torch.mul(at[t + 1][:, None], wide[t], out=steps[t])
            at[t].addcmul_(at[t + 1], kept[t]).addmm_(flat[t], w_state)
        rows = d.flatten(0, 1)
        grad_state, grad_bias_state = rows.t() @ states[:-1].flatten(0, 1), rows.sum(0)
        torch.mul(back[1:], into_new, out=d[..., 2 * hidden :])  # of x W + bias: the same but for n
        grad_x = (rows @ w_in).view_as(x) if ctx.needs_input_grad[0] else None
        return grad_x, back[0], rows.t() @ x.flatten(0, 1), grad_state, rows.sum(0), grad_bias_state


def _walk(
    x: Tensor, before: Tensor, w_in: Tensor, w_state: Tensor, b_in: Tensor, b_state: Tensor
) -> tuple[Tensor, ...]:
    """The states [1 + time, rows, hidden], the first being `before`; r, z and h U_n side by side; and n."""
    (time, rows, _), hidden = x.shape, before.shape[-1]
    states = x.new_empty(time + 1, rows, hidden)
    states[0] = before
    gates = torch.addmm(b_in, x.flatten(0, 1), w_in.t()).view(time, rows, 3 * hidden)
    new = gates[..., 2 * hidden :].contiguous()
    gates[..., 2 * hidden :] = 0
    gates += b_state
    w_state = w_state.t()
    at, both, news = states.unbind(), gates.unbind(), new.unbind()
    opened, remembered = gates[..., : 2 * hidden].unbind(), gates[..., 2 * hidden :].unbind()
    reset, keep = gates[..., :hidden].unbind(), gates[..., hidden : 2 * hidden].unbind()
    for t in range(time):
        both[t].addmm_(at[t], w_state)
        opened[t].sigmoid_()
        news[t].addcmul_(reset[t], remembered[t]).tanh_()
        torch.lerp(news[t], at[t], keep[t], out=at[t + 1])
    return states, gates, new


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


def action_scores(agents: Agents, batch: EpisodeBatch, inputs: Tensor | None = None) -> Tensor:
    """[batch, time, agent, action]: what the networks say in every filled slot, 0 elsewhere.

    Recurrent networks walk the episodes from their beginning with an empty memory; the others see filled slots alone.
    `inputs` are `agent_inputs` if they are at hand.
    """
    x = agent_inputs(agents, batch) if inputs is None else inputs
    if agents.shape.recurrent:
        scores, _ = agents(torch.where(batch.filled[..., None], x, 0.0).transpose(0, 1))
        return torch.where(batch.filled[..., None], scores.transpose(0, 1), 0.0)
    filled = batch.filled[..., 0]
    found, _ = agents(x[filled][None])
    scores = found.new_zeros(*filled.shape, *found.shape[2:])
    return scores.masked_scatter(filled[..., None, None], found[0])


def agent_inputs(agents: Agents, batch: EpisodeBatch) -> Tensor:
    """[batch, time, agent, inputs]."""
    last = None
    if agents.shape.last_action:
        onehot = batch.actions_onehot
        last = torch.cat([torch.zeros_like(onehot[:, :1]), onehot[:, :-1]], 1)
    return agents.inputs(batch.obs, last)


def available(scores: Tensor, avail: Tensor) -> Tensor:
    """Scores with what may not be done pushed out of reach. Where nothing may be done they stay."""
    nothing = ~avail.any(-1, keepdim=True)
    return torch.where(avail | nothing, scores, UNAVAILABLE)


class RunningMoments(nn.Module):
    """Moments of all values so far, or, with `decay`, mostly of the latest; padding never enters.

    Its buffers are state: they are saved and come back with the module.
    """

    count: Tensor
    mean: Tensor
    square: Tensor

    def __init__(self, *, decay: float | None = None) -> None:
        super().__init__()
        self.decay = decay
        for name in ("count", "mean", "square"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def update(self, x: Tensor, mask: Tensor) -> None:
        x = x.detach().double()
        count = mask.sum().double()
        if not float(count):
            return
        mean, square = masked_sum(x, mask) / count, masked_sum(x.square(), mask) / count
        if not bool(torch.isfinite(mean + square)):
            return
        if self.decay is not None:  # weights of a mean that forgets, without the bias of its start at 0
            count = torch.tensor(1 - self.decay, dtype=torch.float64)
            self.count.mul_(self.decay)
        share = count / (self.count + count)
        self.count += count
        self.mean += share * (mean - self.mean)
        self.square += share * (square - self.square)

    @property
    def std(self) -> Tensor:
        """Never 0: of a constant it is 1."""
        variance = (self.square - self.mean.square()).clamp(min=0)
        return torch.where(variance > 1e-8 * self.square.clamp(min=1e-8), variance.sqrt(), 1.0)

    def normalise(self, x: Tensor) -> Tensor:
        """(x - mean) / std."""
        return ((x - self.mean) / self.std).to(x.dtype)

    def restore(self, x: Tensor) -> Tensor:
        """x std + mean: the way back."""
        return (x * self.std + self.mean).to(x.dtype)
