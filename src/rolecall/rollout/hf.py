"""The engine for every other architecture: transformers' own generate, drawing with this library's sampler.

Slower than the native engine (prompts are prefilled once per sample, rows that end wait for the last one), but the
random numbers, the log-probs and the reasons to stop are the same.

Not every family can do what is quickest. Some count positions from the left edge of the padding or carry a state through
it, and some have a cache that is wrong or none. So three ways are tried at first use, and the first whose log-probs are
those of a plain forward pass is taken: see `_WAYS`.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from rolecall.policy.load import cast_weights
from rolecall.policy.reading import outputs_of
from rolecall.rollout.engine import LocalEngine, check_weights, weights_hash
from rolecall.rollout.sampler import draw, uniforms
from rolecall.rollout.stops import Answer
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
        """Take new weights."""
        own = dict(self._model.named_parameters())
        check_weights(weights, {name: p.shape for name, p in own.items()})
        for name, tensor in weights.items():
            own[name].copy_(tensor)
        self.version = version

    def hash(self) -> str:
        """The fingerprint of the weights in use."""
        return weights_hash(dict(self._model.named_parameters()), self.dtype)

    @torch.no_grad()
    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answers, a batch at a time."""
        rows = [answer for answers in self._start_all(requests) for answer in answers]
        # A call of generate has one set of sampling settings and one limit of tokens, so that no row grows beyond the
        # context while it waits for the others. Prompts of like length go together.
        rows.sort(key=lambda row: (repr(row.request.sampling), row.length))
        way = self._way = self._way or self._find_way()

        def alike_key(row: Answer) -> tuple[Any, ...]:
            return row.request.sampling, self._limit(row), 0 if way == "padded" else row.length

        for (_, limit, _), group in groupby(rows, key=alike_key):
            alike = list(group)
            for start in range(0, len(alike), self.max_rows):
                yield from self._run(alike[start : start + self.max_rows], limit, way)

    def _start_all(self, requests: Sequence[Request]) -> list[list[Answer]]:
        return self._start(requests, vocabulary=self._model.get_input_embeddings().num_embeddings)

    def _find_way(self) -> str:
        for way in _WAYS:
            if way == "plain" or self._agrees(way):
                if way != "padded":
                    _log.info("sampling from %s: %s", type(self._model).__name__, _WAYS[way])
                return way
        raise AssertionError

    def _agrees(self, way: str) -> bool:
        """Whether answers to two short prompts have the log-probs of a plain forward pass."""
        lengths = (7, 3) if way == "padded" else (7, 7)
        sampling = Sampling(max_new_tokens=max(1, min(6, self.context_length - 7)), stop_ids=())
        requests = [
            Request(prompt_ids=tuple(range(5 + i, 5 + i + n)), sampling=sampling, prompt=i)
            for i, n in enumerate(lengths)
        ]
        try:
            rows = [answer for (answer,) in self._start_all(requests)]
            answers = self._run(rows, sampling.max_new_tokens, way)
        except Exception:  # a family's generate and cache raise what they like
            return False
        gaps = []
        for request, answer in zip(requests, answers, strict=True):
            ids = torch.tensor([[*request.prompt_ids, *answer.ids]])
            logits = outputs_of(self._model, ids).logits[0, -len(answer.ids) - 1 : -1].float()
            expected = logits.log_softmax(-1).gather(1, ids[0, -len(answer.ids) :, None])[:, 0]
            gaps.append((torch.tensor(answer.behaviour_logprobs) - expected).abs())
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
        return torch.full_like(scores, -torch.inf).scatter(1, drawn.tokens[:, None], 0.0)


class _Ended(StoppingCriteria):
    """Says which rows have ended."""

    def __init__(self, rows: list[Answer]) -> None:
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([row.finish is not None for row in self._rows], device=input_ids.device)
