"""The module that is trained: a causal language model and, if there is one, its critic.

Everything that touches weights happens inside `forward`, so that wrappers that gather or average them (DDP, FSDP) see it.
Rows are right-padded and attention is causal, so padding after a row changes nothing and no attention mask is needed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rolecall.policy.head_ops import Head
from rolecall.policy.logprobs import exact_token_kl, fused_loss, token_scores
from rolecall.policy.reading import Trunk, logit_map
from rolecall.transfer import to_device
from rolecall.types import Supports


class Outputs(NamedTuple):
    """What the policy says about a batch: [batch, time], 0 at positions that were not asked for."""

    logprobs: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"]
    values: Float[Tensor, "batch time"] | None
    kl: Float[Tensor, "batch time"] | None = None
    """The exact KL to the reference, if one was given to compare with."""


class _CachedForward(NamedTuple):
    """A pass through the trunks whose backward pass is still to come, and what it was of."""

    ids: Tensor
    asked: Tensor
    picked: Tensor
    values: Tensor | None
    weights: int
    """Counts the changes of the weights; a pass of other weights is of no use."""


RowLoss = Callable[[Outputs, slice], Tensor]
"""(outputs of some rows, which rows) -> a scalar, already divided by its denominators."""

Against = Callable[[Tensor, Tensor, float], tuple[Tensor, Head]]
"""(ids, asked, temperature) -> `PolicyModel.read` of the reference."""


class PolicyModel(nn.Module):
    """A causal language model with an optional critic, either a head on its trunk or a model of its own."""

    def __init__(self, model: Any, *, value_head: nn.Module | None = None, critic: nn.Module | None = None) -> None:
        """`value_head` maps the trunk's hidden states to values; `critic(ids, asked)` gives the values of the asked tokens itself."""
        super().__init__()
        if value_head is not None and critic is not None:
            raise ValueError("give a value head on the shared trunk or a separate critic, not both")
        self.model, self.value_head, self.critic = model, value_head, critic
        logit_map(self._language_model())  # a model that cannot be trained is refused here, before anything is sampled
        self._policy_trunk: Trunk | None = None  # made when the model is on its device
        self._kept: _CachedForward | None = None

    @property
    def has_values(self) -> bool:
        """True if there is a critic."""
        return self.value_head is not None or self.critic is not None

    def forward(
        self,
        ids: Int[Tensor, "batch time"],
        wanted: Bool[Tensor, "batch time"],
        *,
        temperature: float,
        loss: RowLoss | None = None,
        against: Against | None = None,
        keep: bool = False,
        supports: Supports | None = None,
    ) -> Any:
        """Scores of the wanted tokens as `Outputs`; or, given a loss, (its value, `Outputs` without gradient).

        The loss path computes the head's gradient on the way, in chunks of whole rows. With `against`, also the KL to
        the reference over the whole vocabulary at every wanted position. With `keep`, the next call with a loss, if it
        asks for the same of the same weights, goes on from this one's pass through the trunks. With `supports`
        [batch, time], all of it is of the distribution over the tokens that could be drawn.

        Leave ids, wanted and supports on the host: there it is known what is asked, without waiting for an accelerator.
        """
        ids, wanted = ids.cpu(), wanted.cpu()  # a wrapper may have moved them
        # Token t is read from the hidden state at t - 1; token 0 has none before it.
        asked = wanted[:, 1:]
        kept = None if supports is None else supports[:, 1:][asked]
        if loss is None:
            picked, values = self._keep(ids, asked) if keep else self._pass(ids, asked)
        else:
            picked, values = self._taken(ids, asked) or self._pass(ids, asked)
        targets = to_device(ids[:, 1:][asked], picked.device)
        head = head_of(self._language_model(), temperature)
        kl = None if against is None else exact_token_kl(picked, head, *against(ids, asked, temperature), kept=kept)
        held = [x for x in (values, kl) if x is not None]
        beside = torch.stack(held, dim=1) if held else None
        spread = _Spread(to_device(asked, picked.device), has_values=values is not None, has_kl=kl is not None)
        if loss is None:
            return spread(*token_scores(picked, head, targets, kept=kept), beside, slice(None))

        ends = asked.sum(dim=1).cumsum(0).tolist()
        row_of = {0: 0} | {end: row + 1 for row, end in enumerate(ends)}  # empty rows: the last of them wins

        def chunk_loss(logprobs: Tensor, entropy: Tensor, more: Tensor | None, start: int, stop: int) -> Tensor:
            rows = slice(row_of[start], row_of[stop])
            return loss(spread(logprobs, entropy, more, rows), rows)

        fused = fused_loss(picked, head, targets, chunk_loss, row_ends=ends, values=beside, kept=kept)
        total = fused.loss
        if not len(targets):
            # A micro-batch in which nothing trains still reaches every parameter, with gradient 0 (DDP waits for them).
            total = total + 0.0 * (picked.sum() + head.weight.sum() + (0 if beside is None else beside.sum()))
        known = None if beside is None else beside.detach()
        return total, spread(fused.logprobs, fused.entropy, known, slice(None))

    def read(self, ids: Tensor, asked: Tensor, temperature: float) -> tuple[Tensor, Head]:
        """(hidden states before the asked tokens, the head): what another policy is compared with. `asked` is
        [batch, time - 1], one entry per token but the first."""
        return self._hidden(ids, asked), head_of(self._language_model(), temperature)

    def _language_model(self) -> Any:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def _trunk(self) -> Trunk:
        if self._policy_trunk is None:
            self._policy_trunk = Trunk(self._language_model())
        return self._policy_trunk

    def settle(self, *, flat: bool) -> None:
        """Choose how the trunk is computed before its layers are sharded; its own way unless it may be `flat`."""
        self._trunk().settle(flat=flat)

    def _hidden(self, ids: Tensor, asked: Tensor) -> Tensor:
        """[n, width] what the asked tokens are read from."""
        return self._trunk()(ids, nn.functional.pad(asked, (0, 1)))

    def _pass(self, ids: Tensor, asked: Tensor) -> tuple[Tensor, Tensor | None]:
        """[n, width] what the asked tokens are read from, and [n] their values."""
        picked = self._hidden(ids, asked)
        return picked, self._values(ids, picked, asked)

    def _keep(self, ids: Tensor, asked: Tensor) -> tuple[Tensor, Tensor | None]:
        """A pass whose gradient is kept for the update that follows."""
        with torch.enable_grad():
            picked, values = self._pass(ids, asked)
        self._kept = _CachedForward(ids, asked, picked, values, self._weights_changed())
        return picked.detach(), None if values is None else values.detach()

    def _taken(self, ids: Tensor, asked: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """What was kept, once, if it is of these tokens and of the weights as they are."""
        kept, self._kept = self._kept, None
        if kept is None or kept.weights != self._weights_changed():
            return None
        if not (torch.equal(kept.ids, ids) and torch.equal(kept.asked, asked)):
            return None
        return kept.picked, kept.values

    def forget(self) -> None:
        """Drop what was kept. Fused optimisers must say so: they do not count as changes of the weights they move."""
        self._kept = None

    def _weights_changed(self) -> int:
        return sum(parameter._version for parameter in self.parameters())

    def _values(self, ids: Tensor, picked: Tensor, asked: Tensor) -> Tensor | None:
        if self.value_head is not None:
            return _wide(self.value_head(picked).flatten())
        if self.critic is not None:
            return _wide(self.critic(ids, asked))
        return None


class _Spread(NamedTuple):
    """Puts numbers of the asked tokens in their places."""

    asked: Tensor
    """[batch, time - 1]."""
    has_values: bool
    has_kl: bool

    def __call__(self, logprobs: Tensor, entropy: Tensor, more: Tensor | None, rows: slice) -> Outputs:
        """From [n] of some rows' asked tokens; `more` [n, 0..2] holds values and KL."""
        place = nn.functional.pad(self.asked[rows], (1, 0))
        columns = (logprobs, entropy, *(() if more is None else more.unbind(dim=1)))
        found = [torch.zeros(place.shape, dtype=x.dtype, device=x.device).masked_scatter(place, x) for x in columns]
        return Outputs(found[0], found[1], found[2] if self.has_values else None, found[-1] if self.has_kl else None)


def filler() -> tuple[Tensor, Tensor]:
    """(ids, wanted) of a pass in which nothing is asked, so that all ranks make the same number of passes."""
    ids = torch.zeros(1, 2, dtype=torch.long)
    return ids, torch.zeros_like(ids, dtype=torch.bool)


def shares_prefixes(module: nn.Module) -> bool:
    """True if rows that begin alike are cheaper together: micro-batches should keep groups whole."""
    return isinstance(module, PolicyModel) and module._trunk().is_flat


def _wide(x: Tensor) -> Tensor:
    """In fp32; fp64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def head_of(model: Any, temperature: float) -> Head:
    """A causal language model's map from hidden states to logits."""
    layer, after = model.get_output_embeddings(), logit_map(model)
    return Head(
        weight=layer.weight, bias=layer.bias, temperature=temperature, logit_scale=after.scale, soft_cap=after.soft_cap
    )
