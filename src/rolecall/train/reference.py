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


class Reference:
    """A frozen copy of the policy or, where a fresh adapter trains, the policy with the adapter switched off."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._adapter = hasattr(policy.model, "disable_adapter") and is_fresh(policy.model)
        self._frozen = None if self._adapter else self._copy()

    def _copy(self) -> PolicyModel:
        return PolicyModel(copy.deepcopy(self._policy.model).requires_grad_(False).eval())

    @contextmanager
    def module(self) -> Iterator[nn.Module]:
        """The module to score with."""
        if self._frozen is not None:
            yield self._frozen
        else:
            with without_adapter(self._policy.model):
                yield PolicyModel(self._policy.model)

    @torch.no_grad()
    def read(self, ids: Tensor, asked: Tensor, temperature: float) -> tuple[Tensor, Head]:
        """What the exact KL to it needs (`PolicyModel.read`)."""
        with self.module() as frozen:
            assert isinstance(frozen, PolicyModel)
            return frozen.read(ids, asked, temperature)

    def refresh(self) -> None:
        """Make the policy of this moment the reference."""
        if self._adapter:
            raise ValueError("reference_every needs full weights: with an adapter the reference is the model below it")
        self._frozen = self._copy()

    @property
    def weights(self) -> dict[str, Tensor] | None:
        """The frozen weights, for checkpoints of runs that refresh them; None with an adapter."""
        return None if self._frozen is None else dict(self._frozen.model.named_parameters())

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Make these weights, from `weights` of a checkpoint, the reference."""
        own = self.weights
        assert own is not None
        for name, parameter in own.items():
            parameter.copy_(weights[name])
