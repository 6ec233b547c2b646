"""What a causal language model of any architecture computes before and after its output layer, found by trying it.

Families differ in what stands between the decoder and the output layer (projections, a scale, another norm) and in what
they do to the logits afterwards (Cohere multiplies, Granite divides, Gemma caps). So the hidden states are what the
output layer is given, and the map after it is tried out once: a model whose logits we would not reproduce, or whose later
tokens change the scores of earlier ones, is refused.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rolecall.errors import UserError
from rolecall.policy.flat import FlatTrunk, unfit
from rolecall.policy.varlen import ways
from rolecall.transfer import to_device

_log = logging.getLogger("rolecall")

_SAME = {torch.bfloat16: 0.02, torch.float32: 1e-4, torch.float64: 1e-6}
"""How far two results that should be the same may be apart, as a share of their size."""

_FLAT_BANDS = {torch.bfloat16: 0.1, torch.float32: 1e-3, torch.float64: 1e-5}
"""How far the flat trunk and the model's own may be apart, as a share of the size of hidden states or gradients. bf16 rounds every layer
in its own way."""


_GRADIENT_TOKENS = 12
"""Of a row, in the comparison of gradients."""


class LogitMap(NamedTuple):
    """What a model does to the outputs of its last matrix."""

    scale: float
    """Multiplies them."""
    soft_cap: float | None
    """Then cap tanh(logits / cap)."""


_tried: WeakKeyDictionary[nn.Module, LogitMap] = WeakKeyDictionary()


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
        ids, needed = ids.cpu(), needed.cpu()
        if self._flat is None or not bool(needed.any()):
            return self._own(ids, needed)
        if not self._checked:
            self._check(self._flat, ids, needed)
            return self(ids, needed)
        dtype = self._dtype()
        with torch.autocast(self._device().type, enabled=False):
            return self._flat(ids, needed, dtype=dtype)

    def settle(self, *, flat: bool) -> None:
        """Decide now what is used from here on; a sharded model cannot be compared with itself, layer by layer."""
        if not flat:
            self._flat = None
        elif self._flat is not None and not self._checked:
            ids = torch.arange(5, 29).view(2, 12) % min(self._model.config.vocab_size, 200)
            ids[1, :6] = ids[0, :6]
            self._check(self._flat, ids, torch.ones_like(ids, dtype=torch.bool))

    def _device(self) -> torch.device:
        """Where the model computes; its parts may lie elsewhere while they rest."""
        device: torch.device = self._model.get_input_embeddings().weight.device
        return device

    def _dtype(self) -> torch.dtype:
        """What products are computed in."""
        return torch.bfloat16 if torch.is_autocast_enabled(self._device().type) else self._model.dtype

    def _own(self, ids: Tensor, needed: Tensor) -> Tensor:
        device = self._device()
        rows, columns = (to_device(place, device) for place in needed.nonzero(as_tuple=True))
        return hidden_states(self._model, to_device(ids, device))[rows, columns]

    @torch.no_grad()
    def _check(self, flat: FlatTrunk, ids: Tensor, needed: Tensor) -> None:
        """Compare the flat trunk with the model's own; off the CPU, with each way that attention can be computed there."""
        self._checked = True
        some = needed.any(dim=1).nonzero().flatten()[:16]  # enough rows to share prefixes
        ids, needed, dtype, device = ids[some], needed[some], self._dtype(), self._device()

        def fast(ids: Tensor, needed: Tensor) -> Tensor:
            with torch.autocast(device.type, enabled=False):
                return flat(ids, needed, dtype=dtype)

        own, band = _both(self._own, ids, needed, flat.first_norm), _FLAT_BANDS[dtype]
        torch.clear_autocast_cache()  # it may hold copies of weights that no gradient comes back from
        for name, varlen in ways(device, dtype):
            flat.varlen = varlen
            try:
                found = _both(fast, ids, needed, flat.first_norm)
            except Exception as failed:  # a kernel that is not for this GPU, or not for heads of this width
                if varlen is None:
                    raise
                _log.warning("%s cannot be used here: %s", name, str(failed).strip().split("\n")[0])
                continue
            error = {what: float((found[what] - own[what]).norm() / own[what].norm()) for what in own}
            worst = max(error, key=lambda what: error[what])
            if error[worst] <= band:
                if device.type != "cpu":
                    _say(f"forward passes on {device}: no padding, shared prefixes once, attention by {name}")
                return
            _log.warning(
                "the fast forward pass%s differs from the model's own by %.2g of its %s (%s allows %.2g): going on with %s",
                "" if varlen is None else f" with {name}",
                error[worst],
                worst,
                str(dtype).removeprefix("torch."),
                band,
                "the model's own, which is slower" if varlen is None else "another",
            )
        self._flat = None


def _both(
    forward: Callable[[Tensor, Tensor], Tensor], ids: Tensor, needed: Tensor, weight: nn.Parameter
) -> dict[str, Tensor]:
    """What two trunks are compared in: hidden states and, if it trains, the gradient of a weight below all attention. The
    latter is of a few tokens: with a real batch it would take as much memory as a step."""
    found = {"hidden states": forward(ids, needed).float()}
    if weight.requires_grad:
        ids, needed = ids[:4, :_GRADIENT_TOKENS], needed[:4, :_GRADIENT_TOKENS]
        with torch.enable_grad():
            hidden = forward(ids, torch.ones_like(needed)).float()
            direction = torch.arange(hidden.numel(), device=hidden.device).sin().view_as(hidden)
            (gradient,) = torch.autograd.grad((hidden * direction).sum(), weight)
        found["gradients"] = gradient.float()
    return found


@functools.cache
def _say(line: str) -> None:
    """Once: policy, reference and critic are alike."""
    _log.info("%s", line)


def output_layer(model: Any) -> nn.Linear | None:
    """The layer that gives the logits; None for a trunk without one."""
    try:
        layer = model.get_output_embeddings()
    except NotImplementedError:
        return None
    return layer if isinstance(layer, nn.Linear) else None


def hidden_states(model: Any, ids: Tensor) -> Tensor:
    """[batch, time, width]: what the output layer is given, or a trunk's last hidden states."""
    layer = output_layer(model)
    if layer is None:
        output = outputs_of(model, ids)
        return output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
    seen: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        seen.append(given[0])
        return (given[0][..., :0, :],)  # no logits are computed: they would be [batch, time, vocabulary]

    with _hooked(layer.register_forward_pre_hook(keep)):
        outputs_of(model, ids)
    return seen[-1]


def outputs_of(model: Any, ids: Tensor) -> Any:
    """The model's own forward pass, without a cache."""
    accepted = inspect.signature(model.forward).parameters
    return model(input_ids=ids, **({"use_cache": False} if "use_cache" in accepted else {}))


def logit_map(model: Any) -> LogitMap:
    """What the model does to its raw logits. Raises UserError if that, or its attention, is not what training needs."""
    if model not in _tried:
        try:
            _tried[model] = _try(model)
        except UserError:
            raise
        except Exception as error:  # a family that needs pictures, another model's states, or a length of its own
            raise _refused(
                model, f"a forward and backward pass over token ids fails ({str(error).strip().split(chr(10))[0]})"
            ) from error
    return _tried[model]


@torch.no_grad()
def _try(model: Any) -> LogitMap:
    layer = output_layer(model)
    if layer is None:
        raise _refused(model, "its output layer is not a plain matrix")
    vocabulary = len(layer.weight)
    ids = torch.arange(5, 29, device=layer.weight.device).view(2, 12) % min(vocabulary, 200)
    ids[1, :6] = ids[0, :6]
    # The same beginning with other tokens after it: where it is read differently, attention looks ahead.
    begun = hidden_states(model, ids)[:, :6]
    if begun.dim() != 3 or begun.shape[:2] != (2, 6):
        raise _refused(model, "its output layer does not read one state per token")
    if not _same(begun[0], begun[1]):
        raise _refused(model, "its attention is not causal: later tokens change the scores of earlier ones")
    raw = torch.linspace(-80, 80, ids.numel() * vocabulary, device=ids.device).view(*ids.shape, vocabulary)
    with _hooked(layer.register_forward_hook(lambda *_: raw)):
        output = outputs_of(model, ids)
    logits = getattr(output, "logits", None)
    if logits is None or logits.shape != raw.shape:
        raise _refused(model, "it has no logits of its whole vocabulary for every token")
    _try_backward(model, ids)
    numbers = {k: v for k, v in _numbers(model) if v}
    scales = [1.0, *(s for k, v in numbers.items() if "logit" in k or "lm_head" in k for s in (v, 1 / v))]
    caps = [None, *(v for k, v in numbers.items() if "cap" in k)]
    for scale, cap in product(scales, caps):
        expected = raw * scale if cap is None else cap * torch.tanh(raw * (scale / cap))
        if _same(logits.to(raw.dtype), expected):
            return LogitMap(scale, cap)
    raise _refused(model, "it changes its logits in a way that is not known here")


def _try_backward(model: Any, ids: Tensor) -> None:
    """Run a backward pass down to the first weight that trains; Reformer, for one, has none outside training mode."""
    first = next((p for p in model.parameters() if p.requires_grad), None)
    if first is not None:
        with torch.enable_grad():
            torch.autograd.grad(hidden_states(model, ids).sum(), first, allow_unused=True)


def _numbers(model: Any) -> Iterator[tuple[str, float]]:
    for part in (model.config, model.config.get_text_config()):
        for key, value in vars(part).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield key, float(value)


def _same(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).norm()) <= _SAME.get(found.dtype, 0.02) * float(expected.norm())


def _refused(model: Any, why: str) -> UserError:
    return UserError(f"a {model.config.model_type} model ({type(model).__name__}) cannot be trained here: {why}")


@contextmanager
def _hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
