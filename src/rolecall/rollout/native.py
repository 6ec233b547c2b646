"""The native engine: continuous batching over a preallocated cache, for Llama-family models.

Each prompt is prefilled once, whatever its number of samples. Rows that finish leave and waiting ones enter, so a batch
of ragged answers costs what its tokens cost. A conversation's cache is kept between turns, so a turn pays for its new
tokens only.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolecall.rollout.engine import Flight, LocalEngine, LocalFlight
from rolecall.rollout.llama import KVCache, LlamaDecoder
from rolecall.rollout.sampler import Drawn, draw, logprobs_of, uniforms
from rolecall.rollout.stops import Answer, Ticket
from rolecall.types import Completion

_PREFILL_TOKENS = 4096
_SCORED_AT_ONCE = 64


@dataclass(slots=True, eq=False)
class _Prompt:
    """A request with answers that wait to be let in, and its prefilled state once there is one."""

    ticket: Ticket
    waiting: deque[Answer]
    length: int
    kv: Tensor | None = None
    hidden: Tensor | None = None


class NativeEngine(LocalEngine):
    """Samples from a copy of the model's weights in its dtype."""

    def __init__(self, model: Any, tokenizer: Any, *, cache_bytes: int = 2 * 2**30, **settings: Any) -> None:
        """`settings` as in `LocalEngine`; fewer answers grow at a time if their cache would exceed `cache_bytes`."""
        super().__init__(model, tokenizer, **settings)
        self.cache_bytes = cache_bytes
        self.inflight = False
        """Whether weights may be loaded between two steps of a flight, whose answers then go on with the new ones."""
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
        return self._hash

    @property
    def vocabulary(self) -> int:
        return self._decoder.vocabulary

    @torch.inference_mode()
    def score(self, ids: Sequence[int]) -> list[float]:
        hidden = self._decoder.prefill(torch.tensor([ids]))[0][0, :-1]
        parts = zip(hidden.split(_SCORED_AT_ONCE), torch.tensor(ids)[1:].split(_SCORED_AT_ONCE), strict=True)
        return [x for rows, targets in parts for x in logprobs_of(self._decoder.logits(rows), targets)]

    def open(self) -> Flight:
        """A flight that lets new requests in between any two tokens."""
        return _Decoding(self)

    def draw(self, rows: list[Answer], hidden: Tensor) -> Drawn:
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

    def known(self, prompt: _Prompt) -> Tensor | None:
        """The conversation's cache as far as the prompt begins with it."""
        name = prompt.ticket.request.conversation
        known = self._conversations.pop(name, None) if name is not None else None
        if known is None:
            return None
        ids, past = known
        # At least the last token is fed again, for its hidden state.
        pairs = zip(ids, prompt.ticket.request.prompt_ids[:-1], strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), prompt.length - 1))
        return past[:, :, :, :shared] if shared else None

    def keep(self, conversation: str, ids: tuple[int, ...], kv: Tensor) -> None:
        """Keep a conversation's cache. Those that went longest without a turn are dropped while all take too much room."""
        self._conversations[conversation] = (ids, kv)
        while sum(kv.nbytes for _, kv in self._conversations.values()) > self.cache_bytes:
            self._conversations.popitem(last=False)


class _Decoding(LocalFlight):
    """Requests in flight: with each step, every answer that grows gets a token. An answer's place in `_rows` is its slot in
    the cache."""

    def __init__(self, engine: NativeEngine) -> None:
        super().__init__(engine)
        self._engine, self._decoder = engine, engine._decoder
        self._loads, self._version = engine._loads, engine.version
        self._waiting: deque[_Prompt] = deque()
        self._rows: list[Answer] = []
        self._cache: KVCache | None = None
        self._slots = 0  # how many of the cache's are used
        self._crowded = False  # True while answers must end before the cache can be made for what waits

    def __len__(self) -> int:
        return len(self._rows) + sum(len(p.waiting) for p in self._waiting) + sum(map(len, self._new))

    @torch.inference_mode()
    def step(self) -> list[tuple[Ticket, Completion]]:
        """A token for every answer that grows, and for those that find room now."""
        self._take()
        ended = self._cut() if self._cuts else []
        rows, hidden = self._rows, self._decoder.embedding[:0]
        if rows:
            assert self._cache is not None
            last, lengths = ([row.ids[-1] for row in rows], [row.length - 1 for row in rows])
            hidden = self._decoder.step(torch.tensor(last), torch.tensor(lengths), self._cache)
        hidden = torch.cat([hidden, self._admit()])
        if rows:
            drawn = self._engine.draw(rows, hidden)
            supports = drawn.supports or repeat(None)
            tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
            for row, token, logprob, support in zip(rows, tokens, logprobs, supports, strict=False):
                row.add(token, logprob, support)
            ended += [self._leave(slot) for slot in reversed(range(len(rows))) if rows[slot].finish is not None]
        if self._cache is not None and not (rows or self._waiting):
            self._engine._cache, self._cache = self._cache, None  # not after an error, which may leave NaN in it
        return ended

    def _take(self) -> None:
        """Take on what was added, and make the cache for it."""
        engine = self._engine
        if self._loads != engine._loads and (self._rows or any(prompt.kv is not None for prompt in self._waiting)):
            if not engine.inflight:
                raise RuntimeError(
                    "new weights were loaded while answers of the old ones were growing; read the stream to its end first"
                )
            self._read_again()
        self._loads, self._version = engine._loads, engine.version
        new = [self._new.popleft() for _ in range(len(self._new))]
        self._waiting.extend(_Prompt(a[0].ticket, deque(a), a[0].length) for a in new)
        if not self._decoder.layers and self._waiting:
            raise RuntimeError("the engine's weights were released; load some before requesting answers")
        if new or self._crowded:
            self._make_room()

    def _read_again(self) -> None:
        """Compute by new weights what the old ones have read, so that the next tokens are drawn as by the new ones alone."""
        for prompt in self._waiting:
            prompt.kv = prompt.hidden = None
        for slot, row in enumerate(self._rows):
            assert self._cache is not None
            row.earlier.append((len(row.ids), self._version))
            _, kv = self._decoder.prefill(torch.tensor([[*row.request.prompt_ids, *row.ids[:-1]]]))
            self._cache.put(slot, kv[:, :, 0])

    def _make_room(self) -> None:
        """A cache that is large enough, with the sequences of the one before.

        It is the one of the last flight if that will do, which is taken away from the engine, so that another flight makes
        its own. How many slots are used depends on what is in flight alone, never on what an earlier call left behind: the
        same call gives the same batches.
        """
        engine, rows = self._engine, self._rows
        requests = [*(prompt.ticket.request for prompt in self._waiting), *(row.request for row in rows)]
        length = max(min(len(r.prompt_ids) + r.sampling.max_new_tokens, engine.context_length) for r in requests)
        fit = max(1, engine.cache_bytes // (self._decoder.bytes_per_token() * length))
        slots = min(engine.max_rows, fit, len(rows) + sum(len(prompt.waiting) for prompt in self._waiting))
        self._crowded = slots < len(rows)
        if self._crowded:
            return
        if self._cache is None:
            self._cache, engine._cache = engine._cache, None
        self._slots, old = slots, self._cache
        if old is None or old.slots < slots or old.length < length:
            if rows:  # others will come, and longer ones, so that the next need not copy again
                assert old is not None
                slots = min(engine.max_rows, fit)
                most = engine.cache_bytes // (self._decoder.bytes_per_token() * slots)
                length = max(length, min(2 * old.length, engine.context_length, most))
            else:
                old = self._cache = None  # free it first
            self._cache = self._decoder.cache(slots=slots, length=length)
            for slot, row in enumerate(rows):
                assert old is not None
                self._cache.put(slot, old.get(slot, row.length - 1))

    def _cut(self) -> list[tuple[Ticket, Completion]]:
        """Take out the answers of requests that were cancelled or have no time left."""
        ended, kept, version = [], deque[_Prompt](), self._engine.version
        for prompt in self._waiting:
            if (finish := prompt.ticket.cut()) is None:
                kept.append(prompt)
                continue
            for answer in prompt.waiting:
                answer.finish = finish
                ended.append((prompt.ticket, answer.completion(version)))
        self._waiting = kept
        for slot in reversed(range(len(self._rows))):
            self._rows[slot].finish = self._rows[slot].ticket.cut()
            if self._rows[slot].finish is not None:
                ended.append(self._leave(slot))
        return ended

    def _admit(self) -> Tensor:
        """Let waiting samples into free slots; the hidden states to draw their first tokens from, in order."""
        new: list[Tensor] = []
        free = 0 if self._crowded else self._slots - len(self._rows)
        self._prefill(free)
        for _ in range(free):
            if not self._waiting:
                break
            prompt = self._waiting[0]
            assert prompt.kv is not None
            assert prompt.hidden is not None
            assert self._cache is not None
            self._cache.put(len(self._rows), prompt.kv)
            self._rows.append(prompt.waiting.popleft())
            new.append(prompt.hidden)
            if not prompt.waiting:
                self._waiting.popleft()
        return torch.stack(new) if new else self._decoder.embedding[:0]

    def _prefill(self, free: int) -> None:
        """Compute the prompts whose samples enter next: new ones of like length together, and those that go on."""
        new: list[_Prompt] = []
        known: list[tuple[_Prompt, Tensor]] = []
        for prompt in self._waiting:
            if free <= 0:
                break
            free -= len(prompt.waiting)
            if prompt.kv is None:
                past = self._engine.known(prompt)
                if past is None:
                    new.append(prompt)
                else:
                    known.append((prompt, past))
        new.sort(key=lambda prompt: prompt.length)
        while new:
            count = max(1, min(len(new), _PREFILL_TOKENS // new[-1].length))
            self._prefill_batch(new[-count:])
            del new[-count:]
        while known:
            count, tokens = 0, 0
            while count < len(known) and (tokens < _PREFILL_TOKENS or not count):
                tokens += known[count][0].length - known[count][1].shape[3]
                count += 1
            self._go_on(known[:count])
            del known[:count]

    def _prefill_batch(self, batch: list[_Prompt]) -> None:
        """Those of like length together."""
        ids = torch.zeros(len(batch), batch[-1].length, dtype=torch.long)
        for i, prompt in enumerate(batch):
            ids[i, : prompt.length] = torch.tensor(prompt.ticket.request.prompt_ids)
        hidden, kv = self._decoder.prefill(ids)
        for i, prompt in enumerate(batch):
            prompt.hidden = hidden[i, prompt.length - 1].clone()
            prompt.kv = kv[:, :, i, :, : prompt.length].clone()

    def _go_on(self, batch: list[tuple[_Prompt, Tensor]]) -> None:
        """Those with a cache, however long each is."""
        ids = [torch.tensor(prompt.ticket.request.prompt_ids[past.shape[3] :]) for prompt, past in batch]
        hidden, kv = self._decoder.go_on(ids, [past for _, past in batch])
        for (prompt, _), states, kept in zip(batch, hidden, kv, strict=True):
            prompt.hidden, prompt.kv = states[-1].clone(), kept

    def _leave(self, slot: int) -> tuple[Ticket, Completion]:
        """Take a finished row out; the last row moves into its slot. The cache lacks each row's last token."""
        row, rows, cache = self._rows[slot], self._rows, self._cache
        assert cache is not None
        if row.request.conversation is not None:
            known = (*row.request.prompt_ids, *row.ids[:-1])
            self._engine.keep(row.request.conversation, known, cache.get(slot, len(known)))
        last = rows.pop()
        if slot < len(rows):
            cache.move(len(rows), slot, last.length - 1)
            rows[slot] = last
        return row.ticket, row.completion(self._engine.version)
