"""What the rest of the library asks of an engine, and what every engine asks of its requests."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rolecall.types import Completion, Request


class Engine(Protocol):
    """Samples answers from one set of weights. Keeps no random state: see `Request`."""

    version: int
    """The policy version of the loaded weights; it is written into every completion."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in the order of the requests and of their samples."""
        ...

    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """The same answers, each as soon as it ends."""
        ...

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights (by their Hugging Face names), cast to the engine's dtype."""
        ...

    def hash(self) -> str:
        """`weights_hash` of the weights the engine samples from."""
        ...


def in_order(requests: Sequence[Request], completions: Iterator[Completion]) -> list[Completion]:
    """What a stream yields, in the order of the requests and of their samples."""
    found = {(c.prompt, c.sample): c for c in completions}
    return [found[r.prompt, r.first_sample + i] for r in requests for i in range(r.n)]


def check_requests(requests: Sequence[Request], *, context_length: int, vocabulary: int) -> None:
    """Refuse what cannot be answered, before any work starts."""
    seen: set[tuple[int, int]] = set()
    for request in requests:
        where = f"prompt {request.prompt}"
        if len(request.prompt_ids) >= context_length:
            raise ValueError(
                f"{where} has {len(request.prompt_ids)} tokens but the model's context is {context_length}; "
                "shorten the prompt, or leave out rows that are too long"
            )
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
            raise ValueError(
                f"{where} holds a token id outside 0..{vocabulary - 1}: the tokenizer does not fit the model's vocabulary"
            )
        keys = {(request.prompt, request.first_sample + i) for i in range(request.n)}
        if seen & keys:
            raise ValueError(
                f"{where} is requested twice with the same sample numbers; give each request its own `prompt`"
            )
        seen |= keys


def weights_hash(weights: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """A fingerprint of weights as they are in `dtype`, at memory speed: equal weights, equal hash, on every engine.

    It tells stale or missing updates apart; it is not meant to withstand forgery (checkpoints use sha256).
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().to(dtype).contiguous()
        words = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).flatten()
        columns = torch.nn.functional.pad(words, (0, -len(words) % 1024)).view(-1, 1024).sum(0, dtype=torch.int64)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(columns.numpy(force=True).tobytes())
    return digest.hexdigest()
