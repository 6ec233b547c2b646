"""The engine for every other architecture: transformers' own generate, drawing with this library's sampler.

Slower than the native engine (prompts are prefilled once per sample, rows that end wait for the last one), but the
random numbers, the log-probs and the reasons to stop are the same.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from rolecall.rollout.engine import check_requests, in_order, weights_hash
from rolecall.rollout.sampler import draw, row_key, uniforms
from rolecall.rollout.stops import StopRule
from rolecall.types import Completion, Finish, Request


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
        self._model = copy.deepcopy(model).to(self._dtype).eval().requires_grad_(False)
        self.version = version

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights."""
        own = dict(self._model.named_parameters())
        if own.keys() != weights.keys():
            odd = sorted(own.keys() ^ weights.keys())[0]
            raise ValueError(f"the weights do not fit the engine's model: {odd} is on one side only")
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
        # One set of sampling settings per call of generate, prompts of like length together.
        rows.sort(key=lambda row: (str(row[0].sampling), len(row[0].prompt_ids)))
        while rows:
            sampling = rows[0][0].sampling
            batch = [row for row in rows[: self.max_rows] if row[0].sampling == sampling]
            rows = rows[len(batch) :]
            yield from self._run(batch)

    def _run(self, rows: list[tuple[Request, int]]) -> list[Completion]:
        sampling = rows[0][0].sampling
        width = max(len(r.prompt_ids) for r, _ in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        present = torch.zeros_like(ids)  # by length, never by token value
        for i, (request, _) in enumerate(rows):
            ids[i, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            present[i, width - len(request.prompt_ids) :] = 1
        drawer = _Drawer(rows, width)
        stops = StopRule.of(sampling, self.stop_ids, self.tokenizer)
        ends = _Ends(rows, width, stops, self.context_length)
        self._model.generate(
            ids,
            attention_mask=present,
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=sampling.max_new_tokens, pad_token_id=0),
            logits_processor=LogitsProcessorList([drawer]),
            stopping_criteria=StoppingCriteriaList([ends]),
        )
        return [
            Completion(
                ids=tuple(drawer.tokens[i][: ends.length[i]]),
                behaviour_logprobs=tuple(drawer.logprobs[i][: ends.length[i]]),
                finish=ends.finish[i] or Finish.LENGTH,
                policy_version=self.version,
                prompt=request.prompt,
                sample=sample,
                seed=request.seed,
            )
            for i, (request, sample) in enumerate(rows)
        ]


class _Drawer(LogitsProcessor):
    """Draws each row's token and leaves it as the only one that greedy search can pick."""

    def __init__(self, rows: list[tuple[Request, int]], width: int) -> None:
        self._sampling = rows[0][0].sampling
        self._keys = np.array([row_key(r.seed, r.step, r.prompt, s) for r, s in rows], dtype=np.uint64)
        self._offsets = np.array([len(r.prompt_ids) - width for r, _ in rows])
        self.tokens: list[list[int]] = [[] for _ in rows]
        self.logprobs: list[list[float]] = [[] for _ in rows]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        u = torch.from_numpy(uniforms(self._keys, input_ids.shape[1] + self._offsets))
        drawn = draw(scores, self._sampling, u)
        for i, (token, logprob) in enumerate(zip(drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True)):
            self.tokens[i].append(token)
            self.logprobs[i].append(logprob)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn.tokens[:, None], 0.0)


class _Ends(StoppingCriteria):
    """Says which rows have ended, and remembers where and why."""

    def __init__(self, rows: list[tuple[Request, int]], width: int, stops: StopRule, context_length: int) -> None:
        self._width, self._stops = width, stops
        self._room = [context_length - len(r.prompt_ids) for r, _ in rows]
        self.finish: list[Finish | None] = [None] * len(rows)
        self.length = [0] * len(rows)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        for i, answer in enumerate(input_ids[:, self._width :].tolist()):
            if self.finish[i] is None:
                self.length[i] = len(answer)
                self.finish[i] = self._stops.finish(answer, full=len(answer) >= self._room[i])
        return torch.tensor([finish is not None for finish in self.finish], device=input_ids.device)
