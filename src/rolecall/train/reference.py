"""The frozen model that KL is measured against: the policy as it was before RL."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rolecall.policy.head_ops import Head
from rolecall.policy.lora import is_fresh
from rolecall.policy.lora import reference as without_adapter
from rolecall.policy.model import PolicyModel
from rolecall.policy.sharded import is_sharded, rest, spread


class Reference:
    """A frozen copy of the policy or, where a fresh adapter trains, the policy with the adapter switched off.

    Made while the policy is whole; if the policy is then sharded, so is `frozen`.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._adapter = hasattr(policy.model, "disable_adapter") and is_fresh(policy.model)
        self.frozen: PolicyModel | None = None
        """The copy; None with an adapter."""
        if not self._adapter:
            self.frozen = PolicyModel(copy.deepcopy(policy.model).requires_grad_(False).eval())

    @contextmanager
    def module(self) -> Iterator[nn.Module]:
        """The module to score with."""
        if self.frozen is not None:
            yield self.frozen
            rest(self.frozen)
        else:
            with without_adapter(self._policy.model):
                # A critic is not asked; but what is sharded is gathered by the module that it was sharded with.
                yield self._policy if is_sharded(self._policy) else PolicyModel(self._policy.model)

    @torch.no_grad()
    def read(self, ids: Tensor, asked: Tensor, temperature: float) -> tuple[Tensor, Head]:
        """What the exact KL to it needs (`PolicyModel.read`)."""
        if self.frozen is not None:
            return self.frozen.read(ids, asked, temperature)
        with without_adapter(self._policy.model):
            return self._policy.read(ids, asked, temperature)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the policy of this moment the reference."""
        if self.frozen is None:
            raise ValueError("reference_every needs full weights: with an adapter the reference is the model below it")
        self.rest()
        for held, new in zip(self.frozen.model.parameters(), self._policy.model.parameters(), strict=True):
            held.copy_(new)

    def rest(self) -> None:
        """Free what was gathered to read from it."""
        if self.frozen is not None:
            rest(self.frozen)

    @property
    def weights(self) -> dict[str, Tensor] | None:
        """The frozen weights, for checkpoints of runs that refresh them; None with an adapter."""
        return None if self.frozen is None else dict(self.frozen.model.named_parameters())

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Make these weights, from `weights` of a checkpoint, the reference."""
        self.rest()
        own = self.weights
        assert own is not None
        for name, parameter in own.items():
            parameter.copy_(spread(weights[name], parameter))
