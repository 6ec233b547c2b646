"""Hidden states of the positions that are needed: by the flat trunk where it fits, else by the model's own."""

import logging
from typing import Any

import torch
from torch import Tensor

from rolecall.policy.flat import FlatTrunk, unfit
from rolecall.policy.reading import hidden_states

_log = logging.getLogger("rolecall")

_BANDS = {torch.bfloat16: 0.1, torch.float32: 1e-3, torch.float64: 1e-5}
"""How far the two may be apart, as a share of the hidden states' size. bf16 rounds every layer in its own way."""


class Trunk:
    """Called with ids and the needed positions. The flat trunk is compared with the model's own when it is first used."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._flat = FlatTrunk(model) if unfit(model) is None else None
        self._checked = False

    @property
    def is_flat(self) -> bool:
        """True while the flat trunk is in use."""
        return self._flat is not None

    def __call__(self, ids: Tensor, needed: Tensor) -> Tensor:
        """[n, width] the last hidden states of the needed positions, row by row."""
        if self._flat is None or not bool(needed.any()):
            return self._own(ids, needed)
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else self._model.dtype
        if not self._checked:
            self._check(self._flat, ids, needed, dtype)
            return self(ids, needed)
        with torch.autocast("cpu", enabled=False):
            return self._flat(ids, needed, dtype=dtype)

    def _own(self, ids: Tensor, needed: Tensor) -> Tensor:
        return hidden_states(self._model, ids)[needed]

    @torch.no_grad()
    def _check(self, flat: FlatTrunk, ids: Tensor, needed: Tensor, dtype: torch.dtype) -> None:
        self._checked = True
        some = needed.any(dim=1).nonzero().flatten()[:16]  # enough rows to share prefixes
        ids, needed = ids[some], needed[some]
        own = self._own(ids, needed).float()
        with torch.autocast("cpu", enabled=False):
            error = float((flat(ids, needed, dtype=dtype).float() - own).norm() / own.norm())
        if not error <= _BANDS[dtype]:
            self._flat = None
            _log.warning(
                "the fast forward pass differs from the model's own by %.2g of its hidden states (%s allows %.2g): "
                "going on with the model's own, which is slower",
                error,
                str(dtype).removeprefix("torch."),
                _BANDS[dtype],
            )
