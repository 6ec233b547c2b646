"""Episodes of several agents as tensors [batch, time, agent], under PyMARL's names and shapes.

An episode of n steps fills n + 1 slots: slot t holds what was seen before action t, and the slot after the last action
what was seen then, which is only there to take a value from if the episode was cut off.

    step          0  1  2  3  4  5            an episode that a time limit cut off after 4 steps
    filled        1  1  1  1  1  0
    terminated    0  0  0  0  0  0            it did not end: its last target takes the value of slot 4
    truncated     0  0  0  1  0  0
    roles         C  C  C  C  >  >            C content, > after the end

What counts follows from the roles alone (`maths.roles.episode_roles`): nothing after an end, whatever is stored there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from rolecall.maths.roles import Role, TrainRule, episode_roles

RULE = TrainRule()
"""Content trains; an episode has no stop tokens."""


@dataclass(frozen=True, kw_only=True)
class EpisodeBatch:
    """Recorded episodes. Slots that are not filled may hold anything.

    `batch["state"]` and the like read what PyMARL's batches hold under the same names.
    """

    obs: Tensor
    """[batch, time, agent, obs] float: what each agent sees."""
    actions: Tensor
    """[batch, time, agent, 1] int64."""
    avail_actions: Tensor
    """[batch, time, agent, action] bool: what each agent may do."""
    reward: Tensor
    """[batch, time, 1] float for the team, or [batch, time, agent]."""
    terminated: Tensor
    """[batch, time, 1] bool: this step really ended the episode."""
    truncated: Tensor
    """[batch, time, 1] bool: a limit cut the episode off after this step. It goes on, unseen."""
    filled: Tensor
    """[batch, time, 1] bool."""
    present: Tensor
    """[batch, time, agent] bool: False for a dead or absent agent."""
    global_state: Tensor | None = None
    """[batch, time, state] float; None if the state is all agents' observations together."""

    def __post_init__(self) -> None:
        batch, time, agents = self.obs.shape[:3]
        shapes = {
            "actions": (batch, time, agents, 1),
            "avail_actions": (batch, time, agents, self.avail_actions.shape[-1]),
            "terminated": (batch, time, 1),
            "truncated": (batch, time, 1),
            "filled": (batch, time, 1),
            "present": (batch, time, agents),
        }
        if self.global_state is not None:
            shapes["global_state"] = (batch, time, self.global_state.shape[-1])
        for name, shape in shapes.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise ValueError(f"{name} has shape {found}, but {shape} fits obs {tuple(self.obs.shape)}")
        if tuple(self.reward.shape) not in {(batch, time, 1), (batch, time, agents)}:
            raise ValueError(
                f"reward has shape {tuple(self.reward.shape)}: it must be {(batch, time, 1)} for the team or "
                f"{(batch, time, agents)} for each agent"
            )
        for name in ("avail_actions", "terminated", "truncated", "filled", "present"):
            if getattr(self, name).dtype != torch.bool:
                raise ValueError(f"{name} must be a bool tensor, it is {getattr(self, name).dtype}")

    @classmethod
    def from_pymarl(cls, data: Mapping[str, Tensor]) -> Self:
        """A batch from PyMARL's keys and dtypes. Without `truncated`, an episode that has no end was cut off."""
        filled = data["filled"].bool()
        avail = data["avail_actions"].bool()
        return cls(
            obs=data["obs"].float(),
            actions=data["actions"].long(),
            avail_actions=avail,
            reward=data["reward"].float(),
            terminated=data["terminated"].bool(),
            truncated=data["truncated"].bool() if "truncated" in data else torch.zeros_like(filled),
            filled=filled,
            present=data["present"].bool() if "present" in data else torch.ones(avail.shape[:3], dtype=torch.bool),
            global_state=data["state"].float() if "state" in data else None,
        )

    def __getitem__(self, key: str) -> Tensor:
        value = getattr(self, key, None)
        if not isinstance(value, Tensor):
            raise KeyError(f"an episode batch has no {key!r}")
        return value

    def __len__(self) -> int:
        return self.obs.shape[0]

    # -- what follows from the record, worked out once ---------------------------------------------------------------

    @cached_property
    def state(self) -> Tensor:
        """[batch, time, state]: the whole world, for mixers and central critics."""
        return self.obs.flatten(2) if self.global_state is None else self.global_state

    @cached_property
    def team_roles(self) -> Tensor:
        """[batch, time] uint8: the role of each time step."""
        return episode_roles(self.filled[..., 0], self.terminated[..., 0], self.truncated[..., 0])

    @cached_property
    def there(self) -> Tensor:
        """[batch, time, agent] bool: the agent is there, with a choice or without; also in the slot after the end."""
        return self.filled & self.present

    @cached_property
    def able(self) -> Tensor:
        """[batch, time, agent] bool: the agent is there and has something to choose; also in the slot after the end."""
        return self.there & (self.avail_actions.sum(-1) > 1)

    @cached_property
    def roles(self) -> Tensor:
        """[batch, time, agent] uint8: NO_CHOICE where the agent is absent or has one action at most, else the step's."""
        steps = self.team_roles[..., None]
        return torch.where(~self.able & (steps == Role.CONTENT), int(Role.NO_CHOICE), steps).to(torch.uint8)

    @cached_property
    def valid(self) -> Tensor:
        """[batch, time] bool: steps that happened. The cumulative mask: filled, and nothing after an end."""
        return self.team_roles == Role.CONTENT

    @cached_property
    def eligible(self) -> Tensor:
        """[batch, time, agent] bool: the agent chose."""
        return RULE.eligible(self.roles)

    @cached_property
    def verdicts(self) -> Tensor:
        """[batch, time, agent] uint8: why each agent's step trains or does not."""
        roles = self.roles.transpose(1, 2)
        return RULE.verdicts(roles.flatten(0, 1)).view(roles.shape).transpose(1, 2)

    @cached_property
    def lengths(self) -> Tensor:
        """[batch] int64: steps of each episode."""
        return self.valid.sum(1)

    @cached_property
    def bootstrap(self) -> Tensor:
        """[batch] bool: cut off rather than ended, so the value of the slot after the last step stands for the rest."""
        return ~(self.terminated[..., 0] & self.valid).any(1) & (self.lengths > 0)

    @cached_property
    def actions_onehot(self) -> Tensor:
        """[batch, time, agent, action] float; all zero where no action was taken."""
        shape = (*self.actions.shape[:-1], self.avail_actions.shape[-1])
        onehot = torch.zeros(shape, device=self.actions.device).scatter_(-1, self.actions, 1.0)
        return torch.where(self.valid[..., None, None], onehot, 0.0)

    def behind(self, values: Tensor) -> Tensor:
        """[batch, …]: what `values` [batch, time, …] holds in the slot after each episode's last step; 0 if it ended."""
        slot = self.lengths.clamp(max=values.shape[1] - 1)
        taken = values[torch.arange(len(self), device=values.device), slot]
        cut = self.bootstrap.view(-1, *[1] * (taken.dim() - 1))
        return torch.where(cut, taken, 0)

    def paid(self, columns: int) -> Tensor:
        """[batch, time, columns]: rewards of the steps that happened, of each agent or, in one column, of the team."""
        paid = torch.where(self.valid[..., None], self.reward, 0.0)
        if paid.shape[-1] > columns:
            paid = paid.sum(-1, keepdim=True)
        return paid.expand(-1, -1, columns)

    # -- other batches ---------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """What is recorded, by field."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _each(self, change: Any) -> Self:
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})

    def max_t_filled(self) -> int:
        """Slots of the longest episode."""
        return int(self.filled.sum(1).max()) if len(self) else 0

    def trimmed(self) -> Self:
        """Without the slots that no episode fills; one slot at least."""
        width = max(1, self.max_t_filled())
        return self if width == self.obs.shape[1] else self._each(lambda tensor: tensor[:, :width])

    def rows(self, index: Tensor | slice | Sequence[int]) -> Self:
        return self._each(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def returns(self) -> Tensor:
        """[batch, 1 or agent]: the undiscounted sum of rewards."""
        return torch.where(self.valid[..., None], self.reward, 0.0).sum(1)
