"""The engine for every other architecture: transformers' own generate, drawing with this library's sampler.

Slower than the native engine (prompts are prefilled once per sample, rows that end wait for the last one), but the
random numbers, the log-probs and the reasons to stop are the same.

Not every family can do what is quickest. Some count positions from the left edge of the padding or carry a state through
it, and some have a cache that is wrong or none. So three ways are tried at first use, and the first whose log-probs are
those of a plain forward pass is taken: see `_WAYS`.
"""

import copy
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from rolecall.policy.load import cast_weights
from rolecall.policy.reading import outputs_of
from rolecall.policy.sharded import whole
from rolecall.rollout.engine import Flight, LocalEngine, LocalFlight, check_weights, weights_hash
from rolecall.rollout.sampler import draw, logprobs_of, uniforms
from rolecall.rollout.stops import Answer, Ticket
from rolecall.types import Completion, Request, Sampling

_log = logging.getLogger("rolecall")

_WAYS = {
    "padded": "prompts of all lengths together, padded on the left, with the model's cache",
    "level": "prompts of one length at a time, with the model's cache",
    "plain": "prompts of one length at a time, every token by a forward pass over the whole answer, which is slow",
}
"""How answers are made, the quickest first."""

_AGREE = {torch.bfloat16: 0.05, torch.float32: 3e-5, torch.float64: 1e-7}
"""How far log-probs of one way may be from those of a plain forward pass, on average: well within the band in which a
run's engine and trainer must agree."""


class HFEngine(LocalEngine):
    """Samples through `model.generate` from a copy of the model in its dtype."""

    def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
        """`settings` as in `LocalEngine`."""
        super().__init__(model, tokenizer, **settings)
        self._model = cast_weights(copy.deepcopy(model), self.dtype).eval().requires_grad_(False)
        # What the model's own settings would add to ours: stop ids, penalties, forced tokens.
        self._model.generation_config = GenerationConfig()
        self._way: str | None = None  # tried when it is first needed

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        own = dict(self._model.named_parameters())
        check_weights(weights, {name: p.shape for name, p in own.items()})
        for name, tensor in weights.items():
            own[name].copy_(whole(tensor))
        self.version = version

    def hash(self) -> str:
        return weights_hash(dict(self._model.named_parameters()), self.dtype)

    @property
    def vocabulary(self) -> int:
        return int(self._model.get_input_embeddings().num_embeddings)

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> list[float]:
        return logprobs_of(outputs_of(self._model, torch.tensor([ids])).logits[0, :-1], torch.tensor(ids)[1:])

    def open(self) -> Flight:
        """A flight that takes new requests on in waves: those that wait when all before them have ended."""
        return _Waves(self)

    def batches(self, rows: list[Answer]) -> Iterator[list[Answer]]:
        """Answers that can grow together."""
        # A call of generate has one set of sampling settings and one limit of tokens, so that no row grows beyond the
        # context while it waits for the others. Prompts of like length go together.
        rows.sort(key=lambda row: (repr(row.request.sampling), row.length))
        self._way = self._way or self._find_way()
        for _, group in groupby(rows, key=self._alike_key):
            alike = list(group)
            for start in range(0, len(alike), self.max_rows):
                yield alike[start : start + self.max_rows]

    @torch.no_grad()
    def finish(self, rows: list[Answer]) -> None:
        """Let one of `batches` grow to the end of its answers."""
        assert self._way is not None
        self._run(rows, self._limit(rows[0]), self._way)

    def _alike_key(self, row: Answer) -> tuple[Any, ...]:
        return row.request.sampling, self._limit(row), 0 if self._way == "padded" else row.length

    def _find_way(self) -> str:
        for way in _WAYS:
            if way == "plain" or self._agrees(way):
                if way != "padded":
                    _log.info("sampling from %s: %s", type(self._model).__name__, _WAYS[way])
                return way
        raise AssertionError

    @torch.no_grad()
    def _agrees(self, way: str) -> bool:
        """Whether answers to two short prompts have the log-probs of a plain forward pass."""
        lengths = (7, 3) if way == "padded" else (7, 7)
        sampling = Sampling(max_new_tokens=max(1, min(6, self.context_length - 7)), stop_ids=())
        requests = [
            Request(prompt_ids=tuple(range(5 + i, 5 + i + n)), sampling=sampling, prompt=i)
            for i, n in enumerate(lengths)
        ]
        try:
            rows = [answer for request in requests for answer in self.start(Ticket(request=request))]
            answers = self._run(rows, sampling.max_new_tokens, way)
        except Exception:  # a family's generate and cache raise what they like
            return False
        gaps = []
        for request, answer in zip(requests, answers, strict=True):
            ids = torch.tensor([[*request.prompt_ids, *answer.ids]], device=self._model.device)
            logits = outputs_of(self._model, ids).logits[0, -len(answer.ids) - 1 : -1].float()
            expected = logits.log_softmax(-1).gather(1, ids[0, -len(answer.ids) :, None])[:, 0]
            gaps.append((torch.tensor(answer.behaviour_logprobs) - expected.cpu()).abs())
        return bool(torch.cat(gaps).mean() <= _AGREE.get(self.dtype, 0.05))

    def _limit(self, row: Answer) -> int:
        """The most tokens an answer can have."""
        return min(row.request.sampling.max_new_tokens, self.context_length - row.length)

    def _run(self, rows: list[Answer], limit: int, way: str) -> list[Completion]:
        width = max(row.length for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        present = torch.zeros_like(ids)  # by length, never by token value
        for i, row in enumerate(rows):
            ids[i, width - row.length :] = torch.tensor(row.request.prompt_ids)
            present[i, width - row.length :] = 1
        ids, present = ids.to(self._model.device), present.to(self._model.device)
        drawer, ended = _Drawer(rows), _Ended(rows)
        if way == "plain":
            while any(row.finish is None for row in rows):
                scores = outputs_of(self._model, ids).logits[:, -1].float()
                ids = torch.cat([ids, drawer(ids, scores).argmax(-1, keepdim=True)], dim=1)
        else:
            self._model.generate(
                ids,
                attention_mask=present,
                generation_config=GenerationConfig(
                    do_sample=False, max_new_tokens=limit, pad_token_id=0, use_cache=True
                ),
                logits_processor=LogitsProcessorList([drawer]),
                stopping_criteria=StoppingCriteriaList([ended]),
            )
        return [row.completion(self.version) for row in rows if row.finish is not None]


class _Waves(LocalFlight):
    """A step answers a batch of the wave; when that is empty, what was added meanwhile is the next wave."""

    def __init__(self, engine: HFEngine) -> None:
        super().__init__(engine)
        self._engine = engine
        self._wave: deque[list[Answer]] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._wave)) + sum(map(len, self._new))

    def step(self) -> list[tuple[Ticket, Completion]]:
        if not self._wave:
            waiting = [self._new.popleft() for _ in range(len(self._new))]
            self._wave.extend(self._engine.batches([answer for answers in waiting for answer in answers]))
        if not self._wave:
            return []
        rows = self._wave.popleft()
        for row in rows:
            row.finish = row.ticket.cut()
        if growing := [row for row in rows if row.finish is None]:
            self._engine.finish(growing)
        return [(row.ticket, row.completion(self._engine.version)) for row in rows]


class _Drawer(LogitsProcessor):
    """Draws each row's token and leaves it as the only one that greedy search can pick. Rows that ended are drawn too."""

    def __init__(self, rows: list[Answer]) -> None:
        self._rows = rows
        self._keys = np.array([row.key for row in rows], dtype=np.uint64)
        self._positions = np.array([row.length for row in rows])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        u = torch.from_numpy(uniforms(self._keys, self._positions)).to(scores.device)
        drawn = draw(scores, self._rows[0].request.sampling, u)
        self._positions += 1
        tokens, logprobs, supports = drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.supports or repeat(None)
        for row, token, logprob, support in zip(self._rows, tokens, logprobs, supports, strict=False):
            if row.finish is None:
                row.add(token, logprob, support)
                row.finish = row.finish or row.ticket.cut()
        return torch.full_like(scores, -torch.inf).scatter(1, drawn.tokens[:, None], 0.0)


class _Ended(StoppingCriteria):
    """Says which rows have ended."""

    def __init__(self, rows: list[Answer]) -> None:
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([row.finish is not None for row in self._rows], device=input_ids.device)
