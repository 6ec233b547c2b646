"""The native engine: continuous batching over a preallocated cache, for Llama-family models.

Each prompt is prefilled once, whatever its number of samples. Rows that finish leave and waiting ones enter, so a batch
of ragged answers costs what its tokens cost. A conversation's cache is kept between turns, so a turn pays for its new
tokens only.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolecall.rollout.engine import LocalEngine
from rolecall.rollout.llama import KVCache, LlamaDecoder
from rolecall.rollout.sampler import Drawn, draw, uniforms
from rolecall.rollout.stops import Answer
from rolecall.types import Completion, Request

_PREFILL_TOKENS = 4096


@dataclass(slots=True)
class _Prompt:
    """A request with answers that wait to be let in, and its prefilled state once there is one."""

    request: Request
    waiting: deque[Answer]
    length: int
    kv: Tensor | None = None
    hidden: Tensor | None = None


class NativeEngine(LocalEngine):
    """Samples from a copy of the model's weights in its dtype. An answer's place in `rows` is its slot in the cache."""

    def __init__(self, model: Any, tokenizer: Any, *, cache_bytes: int = 2 * 2**30, **settings: Any) -> None:
        """`settings` as in `LocalEngine`; fewer answers grow at a time if their cache would exceed `cache_bytes`."""
        super().__init__(model, tokenizer, **settings)
        self.cache_bytes = cache_bytes
        self._decoder = LlamaDecoder(model, dtype=self.dtype)
        self._cache: KVCache | None = None
        self._loads = 0
        self._conversations: OrderedDict[str, tuple[tuple[int, ...], Tensor]] = OrderedDict()
        self.load(dict(model.named_parameters()), self.version)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights. What was cached under the old ones is dropped."""
        self._hash = self._decoder.load(weights)
        self._conversations.clear()
        self._loads += 1
        self.version = version

    def release(self) -> None:
        """Free weights and caches until the next `load`."""
        self._decoder.release()
        self._loads += 1  # a stream that is not at its end cannot go on
        self._cache = None
        self._conversations.clear()

    def hash(self) -> str:
        """The fingerprint of the weights in use."""
        return self._hash

    @torch.inference_mode()
    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answers as they end. Other calls may be made between them, except `load`."""
        answers = self._start(requests, vocabulary=self._decoder.vocabulary)
        waiting = deque(_Prompt(r, deque(a), len(r.prompt_ids)) for r, a in zip(requests, answers, strict=True))
        if not waiting:
            return
        if not self._decoder.layers:
            raise RuntimeError("the engine's weights were released; load some before requesting answers")
        loads, cache, slots = self._loads, *self._cache_for(requests)
        rows: list[Answer] = []
        hidden = self._admit(waiting, rows, cache, slots)
        while rows:
            drawn = self._draw(rows, hidden)
            supports = drawn.supports or repeat(None)
            tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
            for row, token, logprob, support in zip(rows, tokens, logprobs, supports, strict=False):
                row.add(token, logprob, support)
            for slot in reversed(range(len(rows))):
                if rows[slot].finish is not None:
                    yield self._leave(rows, slot, cache)
            if self._loads != loads:
                raise RuntimeError(
                    "new weights were loaded while answers of the old ones were growing; read the stream to its end first"
                )
            hidden = hidden[:0]
            if rows:
                last, lengths = ([row.ids[-1] for row in rows], [row.length - 1 for row in rows])
                hidden = self._decoder.step(torch.tensor(last), torch.tensor(lengths), cache)
            hidden = torch.cat([hidden, self._admit(waiting, rows, cache, slots)])
        self._cache = cache  # not after an error, which may leave NaN in it

    def _cache_for(self, requests: Sequence[Request]) -> tuple[KVCache, int]:
        """The cache of the last call if it is large enough, else a new one; and how many of its slots to use.

        The cache is taken away from the engine, so that another stream makes its own. The slots depend on the requests
        alone, never on what an earlier call left behind: the same call gives the same batches.
        """
        length = max(min(len(r.prompt_ids) + r.sampling.max_new_tokens, self.context_length) for r in requests)
        fit = self.cache_bytes // (self._decoder.bytes_per_token() * length)
        slots = max(1, min(self.max_rows, fit, sum(r.n for r in requests)))
        cache, self._cache = self._cache, None
        if cache is None or cache.slots < slots or cache.length < length:
            del cache  # free the old one first
            cache = self._decoder.cache(slots=slots, length=length)
        return cache, slots

    def _admit(self, waiting: deque[_Prompt], rows: list[Answer], cache: KVCache, slots: int) -> Tensor:
        """Let waiting samples into free slots; the hidden states to draw their first tokens from, in order."""
        new: list[Tensor] = []
        self._prefill(waiting, slots - len(rows))
        while waiting and len(rows) < slots:
            prompt = waiting[0]
            assert prompt.kv is not None
            assert prompt.hidden is not None
            cache.put(len(rows), prompt.kv)
            rows.append(prompt.waiting.popleft())
            new.append(prompt.hidden)
            if not prompt.waiting:
                waiting.popleft()
        return torch.stack(new) if new else self._decoder.embedding[:0]

    def _prefill(self, waiting: deque[_Prompt], free: int) -> None:
        """Compute the prompts whose samples enter next: those that go on from equally long caches together."""
        wanted: dict[int, list[tuple[_Prompt, Tensor | None]]] = {}
        for prompt in waiting:
            if free <= 0:
                break
            free -= len(prompt.waiting)
            if prompt.kv is None:
                past = self._known(prompt)
                wanted.setdefault(0 if past is None else past.shape[3], []).append((prompt, past))
        for start, prompts in wanted.items():
            prompts.sort(key=lambda pair: pair[0].length)
            while prompts:
                count = max(1, min(len(prompts), _PREFILL_TOKENS // (prompts[-1][0].length - start)))
                batch, prompts = prompts[-count:], prompts[:-count]
                self._prefill_batch(batch, start)

    def _prefill_batch(self, batch: list[tuple[_Prompt, Tensor | None]], start: int) -> None:
        """Those of like length together; each has `start` tokens in its cache."""
        ids = torch.zeros(len(batch), batch[-1][0].length - start, dtype=torch.long)
        for i, (prompt, _) in enumerate(batch):
            ids[i, : prompt.length - start] = torch.tensor(prompt.request.prompt_ids[start:])
        known = [past for _, past in batch if past is not None]
        hidden, kv = self._decoder.prefill(ids, torch.stack(known, dim=2)) if known else self._decoder.prefill(ids)
        for i, (prompt, past) in enumerate(batch):
            new = kv[:, :, i, :, : prompt.length - start]
            prompt.hidden = hidden[i, prompt.length - start - 1].clone()
            prompt.kv = new.clone() if past is None else torch.cat([past, new], dim=3)

    def _known(self, prompt: _Prompt) -> Tensor | None:
        """The conversation's cache as far as the prompt begins with it."""
        name = prompt.request.conversation
        known = self._conversations.pop(name, None) if name is not None else None
        if known is None:
            return None
        ids, past = known
        # At least the last token is fed again, for its hidden state.
        pairs = zip(ids, prompt.request.prompt_ids[:-1], strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), prompt.length - 1))
        return past[:, :, :, :shared] if shared else None

    def _draw(self, rows: list[Answer], hidden: Tensor) -> Drawn:
        """The next token of every row, each by its own settings and its own random number; like rows together."""
        logits = self._decoder.logits(hidden)
        keys = np.array([row.key for row in rows], dtype=np.uint64)
        positions = np.array([row.length for row in rows])
        u = torch.from_numpy(uniforms(keys, positions))
        settings = [row.request.sampling for row in rows]
        kinds = [(s.temperature, s.top_k, s.top_p, s.min_p, s.logprobs) for s in settings]
        if len(set(kinds)) == 1:
            return draw(logits, settings[0], u, kernels=self._decoder.kernels)
        tokens, logprobs = torch.zeros(len(rows), dtype=torch.long), torch.zeros(len(rows), dtype=torch.float64)
        supports = [b""] * len(rows)
        for kind in dict.fromkeys(kinds):
            index = torch.tensor([i for i, other in enumerate(kinds) if other == kind])
            sampling = settings[int(index[0])]
            drawn = draw(logits[index], sampling, u[index], kernels=self._decoder.kernels)
            tokens[index], logprobs[index] = drawn.tokens, drawn.logprobs.double()
            for i, ids in zip(index.tolist(), drawn.supports or (), strict=False):
                supports[i] = ids
        return Drawn(tokens, logprobs, supports)

    def _leave(self, rows: list[Answer], slot: int, cache: KVCache) -> Completion:
        """Take a finished row out; the last row moves into its slot. The cache lacks each row's last token."""
        row = rows[slot]
        if row.request.conversation is not None:
            known = (*row.request.prompt_ids, *row.ids[:-1])
            self._conversations[row.request.conversation] = (known, cache.get(slot, len(known)))
            self._forget()
        last = rows.pop()
        if slot < len(rows):
            cache.move(len(rows), slot, last.length - 1)
            rows[slot] = last
        return row.completion(self.version)

    def _forget(self) -> None:
        """Drop the conversations that went longest without a turn while they take more room than the cache may."""
        while sum(kv.nbytes for _, kv in self._conversations.values()) > self.cache_bytes:
            self._conversations.popitem(last=False)
