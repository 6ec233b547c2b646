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
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from rolecall.policy.load import cast_weights
from rolecall.policy.reading import outputs_of
from rolecall.rollout.engine import check_requests, check_weights, in_order, weights_hash
from rolecall.rollout.sampler import draw, row_keys, uniforms
from rolecall.rollout.stops import StopRule
from rolecall.types import Completion, Finish, Request, Sampling

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


class HFEngine:
    """Samples through `model.generate` from a copy of the model in `dtype`. See `rollout.engine.Engine`."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        stop_ids: Sequence[int],
        context_length: int,
        dtype: torch.dtype | None = None,
        version: int = 0,
        max_rows: int = 64,
    ) -> None:
        """`max_rows` answers grow at a time."""
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        self.context_length = context_length
        self.max_rows = max_rows
        self._dtype = dtype or model.dtype
        self._model = cast_weights(copy.deepcopy(model), self._dtype).eval().requires_grad_(False)
        # What the model's own settings would add to ours: stop ids, penalties, forced tokens.
        self._model.generation_config = GenerationConfig()
        self.version = version
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
        return weights_hash(dict(self._model.named_parameters()), self._dtype)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in the order of the requests and of their samples."""
        return in_order(requests, self.stream(requests))

    @torch.no_grad()
    def stream(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Answers, a batch at a time."""
        vocabulary = self._model.get_input_embeddings().num_embeddings
        check_requests(requests, context_length=self.context_length, vocabulary=vocabulary)
        rows = [(r, r.first_sample + i) for r in requests for i in range(r.n)]
        # A call of generate has one set of sampling settings and one limit of tokens, so that no row grows beyond the
        # context while it waits for the others. Prompts of like length go together.
        rows.sort(key=lambda row: (repr(row[0].sampling), len(row[0].prompt_ids)))
        way = self._way = self._way or self._find_way()

        def alike_key(row: tuple[Request, int]) -> tuple[Any, ...]:
            length = 0 if way == "padded" else len(row[0].prompt_ids)
            return row[0].sampling, self._limit(row[0]), length

        for (_, limit, _), group in groupby(rows, key=alike_key):
            alike = list(group)
            for start in range(0, len(alike), self.max_rows):
                yield from self._run(alike[start : start + self.max_rows], limit, way)

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
            answers = self._run([(r, 0) for r in requests], sampling.max_new_tokens, way)
        except Exception:  # a family's generate and cache raise what they like
            return False
        gaps = []
        for request, answer in zip(requests, answers, strict=True):
            ids = torch.tensor([[*request.prompt_ids, *answer.ids]])
            logits = outputs_of(self._model, ids).logits[0, -len(answer.ids) - 1 : -1].float()
            expected = logits.log_softmax(-1).gather(1, ids[0, -len(answer.ids) :, None])[:, 0]
            gaps.append((torch.tensor(answer.behaviour_logprobs) - expected).abs())
        return bool(torch.cat(gaps).mean() <= _AGREE.get(self._dtype, 0.05))

    def _limit(self, request: Request) -> int:
        """The most tokens an answer can have."""
        return min(request.sampling.max_new_tokens, self.context_length - len(request.prompt_ids))

    def _run(self, rows: list[tuple[Request, int]], limit: int, way: str) -> list[Completion]:
        sampling = rows[0][0].sampling
        width = max(len(r.prompt_ids) for r, _ in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        present = torch.zeros_like(ids)  # by length, never by token value
        for i, (request, _) in enumerate(rows):
            ids[i, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            present[i, width - len(request.prompt_ids) :] = 1
        drawer = _Drawer(rows, width)
        stops = StopRule.of(sampling, self.stop_ids, self.tokenizer)
        ends = _Ends(drawer, stops, limit)
        if way == "plain":
            while None in ends.finish:
                scores = outputs_of(self._model, ids).logits[:, -1].float()
                ids = torch.cat([ids, drawer(ids, scores).argmax(-1, keepdim=True)], dim=1)
                ends(ids, scores)
        else:
            self._model.generate(
                ids,
                attention_mask=present,
                generation_config=GenerationConfig(
                    do_sample=False, max_new_tokens=limit, pad_token_id=0, use_cache=True
                ),
                logits_processor=LogitsProcessorList([drawer]),
                stopping_criteria=StoppingCriteriaList([ends]),
            )
        return [
            Completion(
                ids=tuple(drawer.tokens[i][: ends.length[i]]),
                behaviour_logprobs=tuple(drawer.logprobs[i][: ends.length[i]]),
                finish=finish,
                policy_version=self.version,
                prompt=request.prompt,
                sample=sample,
                seed=request.seed,
                supports=tuple(drawer.supports[i][: ends.length[i]]) if sampling.records_support else None,
            )
            for i, ((request, sample), finish) in enumerate(zip(rows, ends.finish, strict=True))
            if finish is not None
        ]


class _Drawer(LogitsProcessor):
    """Draws each row's token and leaves it as the only one that greedy search can pick."""

    def __init__(self, rows: list[tuple[Request, int]], width: int) -> None:
        self._sampling = rows[0][0].sampling
        self._keys = np.concatenate([row_keys(r.seed, r.step, r.prompt, [s]) for r, s in rows])
        self._offsets = np.array([len(r.prompt_ids) - width for r, _ in rows])
        self.tokens: list[list[int]] = [[] for _ in rows]
        self.logprobs: list[list[float]] = [[] for _ in rows]
        self.supports: list[list[bytes]] = [[] for _ in rows]
        """Only where the sampling records them."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        u = torch.from_numpy(uniforms(self._keys, input_ids.shape[1] + self._offsets)).to(scores.device)
        drawn = draw(scores, self._sampling, u)
        for i, (token, logprob) in enumerate(zip(drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True)):
            self.tokens[i].append(token)
            self.logprobs[i].append(logprob)
        for held, ids in zip(self.supports, drawn.supports or (), strict=False):
            held.append(ids)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn.tokens[:, None], 0.0)


class _Ends(StoppingCriteria):
    """Says which rows have ended, and remembers where and why."""

    def __init__(self, drawer: _Drawer, stops: StopRule, limit: int) -> None:
        self._drawer, self._stops, self._limit = drawer, stops, limit
        self.finish: list[Finish | None] = [None] * len(drawer.tokens)
        self.length = [0] * len(drawer.tokens)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        for i, answer in enumerate(self._drawer.tokens):
            if self.finish[i] is None:
                self.length[i] = len(answer)
                self.finish[i] = self._stops.finish(answer, full=len(answer) >= self._limit)
        return torch.tensor([finish is not None for finish in self.finish], device=input_ids.device)
