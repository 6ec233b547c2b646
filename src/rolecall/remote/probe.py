"""Whether a server has the weights it says it has: it scores fixed sequences, and the trainer does too.

Every token of a sequence passes through the embedding, every layer and the head, so a stale part of the weights shows in the log-probs.
Then it goes on from fixed prompts, and scores what it drew: where the two differ, it drew with a cache of other weights. A
checksum of what was sent shows neither.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolecall.experience.batches import collate
from rolecall.maths.roles import Role
from rolecall.policy.load import LoadedModel
from rolecall.train.score import score
from rolecall.train.tripwires import engine_band
from rolecall.types import Batch, Request, Sampling, Trajectory

Scores = Sequence[Sequence[float]]
"""log p of every token but the first, of each sequence."""
Scorer = Callable[[Batch, Tensor], Tensor]
"""(batch, [batch, time] which tokens) -> their log-probs at temperature 1, by the trainer's weights of this moment."""

_TEXTS = (
    "The train leaves at 7:45 from platform 9, and 128 + 64 = 192. What is the capital of France? It is Paris.",
    "def area(width, height):\n    return width * height  # in square metres\n\nprint(area(3, 4.5))",
    "Question: Anna has 17 apples and gives 5 away. How many are left? Answer: she has 17 - 5 = 12 apples.",
)
_LENGTH, _SPREAD, _DRAWN = 48, 32, 4
_STEP = 2**41
"""Probes draw their random numbers as if at this step."""
_FLOORS = {1e-4: 1e-5}
"""The narrowest band, by the widest one."""
_MARGIN = 10.0
"""How far a later difference may exceed that of the start, which grows as distributions sharpen."""


def probe_sequences(policy: LoadedModel) -> tuple[tuple[int, ...], ...]:
    """Three texts, and ids from all over the vocabulary."""
    length = min(_LENGTH, policy.context_length)
    texts = [tuple(policy.tokenizer(text, add_special_tokens=False)["input_ids"])[:length] for text in _TEXTS]
    count = int(policy.model.get_input_embeddings().num_embeddings)
    spread = tuple((7 + i * (count // _SPREAD or 1) * 5) % count for i in range(min(_SPREAD, length)))
    return tuple(ids for ids in (*texts, spread) if len(ids) > 1)


def probe_requests(sequences: Sequence[Sequence[int]]) -> list[Request]:
    """A few tokens after the first half of each sequence, always under the same name, by which caches are found again."""
    sampling = Sampling(max_new_tokens=_DRAWN, stop_ids=())
    return [
        Request(
            prompt_ids=tuple(ids[: len(ids) // 2]), sampling=sampling, step=_STEP, prompt=i, conversation=f"probe/{i}"
        )
        for i, ids in enumerate(sequences)
    ]


def scored(module: torch.nn.Module, batch: Batch, wanted: Tensor, **how: Any) -> Tensor:
    """A `Scorer` but for its first argument; `how` is for `train.score.score`."""
    return score(module, batch, wanted, **how).logprobs


def trainer_scores(scorer: Scorer, sequences: Sequence[Sequence[int]]) -> Scores:
    """What the trainer says of the sequences."""
    batch = collate([Trajectory(ids=tuple(ids), roles=(int(Role.PROMPT),) * len(ids)) for ids in sequences])
    wanted = batch.roles == Role.PROMPT
    wanted[:, 0] = False
    found = scorer(batch, wanted).tolist()
    return [row[1 : len(ids)] for row, ids in zip(found, sequences, strict=True)]


@torch.no_grad()
def scores_with(model: Any, weights: Mapping[str, Tensor], sequences: Sequence[Sequence[int]]) -> Scores:
    """What a causal language model of transformers would say of the sequences if it had these weights."""
    own = dict(model.named_parameters())
    put = {name: w.to(own[name].device, own[name].dtype) for name, w in weights.items()}
    found = []
    for ids in sequences:
        given = torch.tensor([list(ids)], device=model.device)
        logits = torch.func.functional_call(model, put, (), {"input_ids": given}).logits[0, :-1]
        found.append(logits.float().log_softmax(dim=-1).gather(1, given[0, 1:, None])[:, 0].tolist())
    return found


@dataclass(slots=True)
class Expected:
    """What servers must say of the sequences, and what it would mean if they said something else."""

    sequences: Sequence[Sequence[int]]
    widest: float
    """The largest mean |difference| that is ever allowed."""
    now: Scores = ()
    """By the weights that were published last."""
    before: Scores | None = None
    """By those before them, if they were others."""
    first: Scores | None = None
    """By those that the run began with here, if they were others."""

    @classmethod
    def of(cls, policy: LoadedModel, *, trainer: torch.dtype, servers: torch.dtype) -> "Expected":
        """For servers and a trainer that compute in these dtypes."""
        return cls(probe_sequences(policy), engine_band(trainer, servers))

    def publish(self, scores: Scores) -> None:
        """New weights give these."""
        if self.now:
            self.before = self.now
            self.first = self.first or self.before
        self.now = scores

    @property
    def noticeable(self) -> float:
        """A mean change of the trainer's log-probs that cannot leave a server's as they were, to the last bit."""
        return self.widest / 100

    def band(self, start: float) -> float:
        """The mean |difference| that is allowed, given that of the start."""
        return min(self.widest, max(_FLOORS.get(self.widest, self.widest / 100), _MARGIN * start))

    def forget(self) -> None:
        """What was published so far was a rehearsal."""
        self.before = self.first = None

    def why(self, said: Scores, band: float) -> str:
        """The likely cause of a difference."""
        if self.before is not None and difference(said, self.before) <= band < difference(self.now, self.before):
            return "it answers with the weights before these: the load was confirmed and not done"
        if self.first is not None and difference(said, self.first) <= band < difference(self.now, self.first):
            return "it answers with the weights that the run began with: it was restarted, or an adapter never arrived"
        return (
            "a part of its weights is stale, such as a head that is tied to the embedding, a cache was not cleared, or it "
            "scores at another temperature"
        )


def difference(a: Scores, b: Scores) -> float:
    """Mean |difference| of log-probs; infinite if they are not of the same tokens, or one is not finite."""
    if [len(x) for x in a] != [len(x) for x in b]:
        return float("inf")
    gap = (_flat(a) - _flat(b)).abs().mean()
    return float(gap) if bool(gap.isfinite()) else float("inf")


def _flat(scores: Scores) -> Any:
    return torch.tensor([x for row in scores for x in row], dtype=torch.float64)
