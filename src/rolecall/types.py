"""The records that travel between layers: requests, completions, trajectories, episodes, groups, batches.

Alignment, everywhere: index t means token t. `logprobs[t]` is log p(token t | tokens before t). `values[t]` is V before
token t, read from the hidden state at t - 1. Nothing is shifted by one anywhere else.

One sequence is plain Python (tuples: comparable, picklable, really frozen); a `Batch` is tensors. Records check their
lengths when they are made, so that a misaligned one never exists.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isnan
from typing import Any

import torch
from torch import Tensor

from rolecall.config.sampling import Finish as Finish
from rolecall.config.sampling import Sampling as Sampling
from rolecall.transfer import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt to answer n times.

    Every random number of a completion is a function of (seed, step, prompt, sample, position), where position is the
    token's index in the whole sequence; the engine keeps no random state.
    """

    prompt_ids: tuple[int, ...]
    """Everything before the answer: the prompt, or the conversation so far."""
    sampling: Sampling
    """How to draw."""
    n: int = 1
    """How many answers."""
    seed: int = 0
    """The run's seed."""
    step: int = 0
    """The training step; another step draws other numbers."""
    prompt: int = 0
    """Which prompt of the step this is."""
    first_sample: int = 0
    """The number of the first answer; the others count on from it."""
    conversation: str | None = None
    """A name under which an engine may keep this answer's cache for the next turn; needs n = 1."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(
                f"prompt {self.prompt} is empty: a language model needs at least one token to continue from"
            )
        if self.n < 1:
            raise ValueError(f"n must be at least 1 answer, got {self.n}")
        if self.conversation is not None and self.n != 1:
            raise ValueError(f"conversation {self.conversation!r} asks for n={self.n} answers; a conversation has one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled answer, as the engine knows it."""

    ids: tuple[int, ...]
    """The sampled tokens, the stop token included."""
    behaviour_logprobs: tuple[float, ...]
    """log p of each token under the tempered distribution it was drawn from (see `Sampling.logprobs`)."""
    finish: Finish
    """Why it ended."""
    policy_version: int
    """The weights that sampled it; the oldest, if they changed while it grew."""
    prompt: int
    """The request's prompt number."""
    sample: int
    """Which of the request's answers this is."""
    seed: int
    """The request's seed."""
    supports: tuple[bytes, ...] | None = None
    """Which tokens could be drawn in each one's place, if sampling cut the vocabulary: see `Trajectory.supports`."""
    versions: tuple[tuple[int, int, int], ...] | None = None
    """(start, end, version) of each run of tokens by one version, in order and without gaps; None: all by one."""

    def __post_init__(self) -> None:
        _check_lengths("completion", len(self.ids), behaviour_logprobs=self.behaviour_logprobs, supports=self.supports)
        edges = [0, *(end for _, end, _ in self.versions or ())]
        if self.versions is not None and [a for a, _, _ in self.versions] + [len(self.ids)] != edges:
            raise ValueError(f"the versions' runs do not cover the completion's {len(self.ids)} tokens one by one")
        if self.finish is Finish.STOP and not self.ids:
            raise ValueError("a completion that was stopped by an id holds at least that stop token")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One agent's positions, from the first prompt token to the last token it saw or chose."""

    ids: tuple[int, ...]
    """Token ids, prompt included."""
    roles: tuple[int, ...]
    """One `maths.roles.Role` per token, written where the token was born."""
    behaviour_logprobs: tuple[float, ...] | None = None
    """log p of each token when it was sampled; NaN where the policy did not sample. None for demonstrations."""
    author: str = "policy"
    """Who chose the content: "policy", "demonstrator", or the name of another model."""
    agent: str = "agent"
    """Which agent of the episode this is."""
    episode: int = 0
    """Number of the episode within its group."""
    group: int = 0
    """Number of the group: answers to one prompt share it."""
    turns: tuple[tuple[int, int], ...] = ()
    """[start, end) of each turn the policy wrote, in order."""
    authors: tuple[tuple[int, int, str], ...] | None = None
    """(start, end, who) of each run of tokens by one author, in order and without gaps: "prompt", "template", "policy",
    "history" (the policy's own words, encoded again), or who wrote a message. None: not known beyond the roles."""
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """Score by part (the reward's name). None: it failed, which is not 0."""
    finish: Finish = Finish.STOP
    """Why it ended."""
    policy_version: int = 0
    """The weights that sampled it; the oldest, if there were several."""
    versions: tuple[tuple[int, int, int], ...] | None = None
    """(start, end, version) of each run of sampled tokens by one version, in order, if the weights changed in between."""
    behaviour_prompt_ids: tuple[int, ...] | None = None
    """The prompt the behaviour saw, if it differs from the one trained on."""
    supports: tuple[bytes, ...] | None = None
    """The ids that could be drawn in each token's place, ascending, as the bytes of an int32 array (a list would take
    ten times the memory); empty: the whole vocabulary, or not sampled. None: the vocabulary was never cut."""

    def __post_init__(self) -> None:
        _check_lengths(
            "trajectory",
            len(self.ids),
            roles=self.roles,
            behaviour_logprobs=self.behaviour_logprobs,
            supports=self.supports,
        )
        if not self.ids:
            raise ValueError("a trajectory holds at least one token")
        for start, end in self.turns:
            if not 0 <= start <= end <= len(self.ids):
                raise ValueError(f"turn [{start}, {end}) does not lie within the trajectory's {len(self.ids)} tokens")
        if self.authors is not None:
            edges = [0, *(end for _, end, _ in self.authors)]
            if [start for start, _, _ in self.authors] != edges[:-1] or edges[-1] != len(self.ids):
                raise ValueError(f"the authors' runs do not cover the trajectory's {len(self.ids)} tokens one by one")

    @property
    def sampled(self) -> tuple[bool, ...]:
        """True at tokens that carry a behaviour log-prob."""
        if self.behaviour_logprobs is None:
            return (False,) * len(self.ids)
        return tuple(not isnan(logprob) for logprob in self.behaviour_logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Supports:
    """Which tokens could be drawn at each position, for positions of any shape. Log-probs, entropy and KL are of these.

    The ids of all positions lie end to end; picking positions shares them. They stay on the host.
    """

    ids: Tensor
    """[total] int32."""
    starts: Tensor
    """Where a position's ids begin."""
    counts: Tensor
    """How many there are; 0: the whole vocabulary."""

    def __getitem__(self, index: Any) -> "Supports":
        return replace(self, starts=self.starts[index], counts=self.counts[index])

    def allowed(self, vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
        """[n, vocabulary] bool on a device, of n positions in a row."""
        rows = torch.arange(len(self.counts)).repeat_interleave(self.counts)
        # A position's ids are starts + 0, 1, 2, …; in the list of all of them these count from its first entry.
        first = self.starts - (self.counts.cumsum(0) - self.counts)
        places = torch.arange(len(rows)) + first[rows]
        allowed = to_device(self.counts == 0, device)[:, None].repeat(1, vocabulary)
        allowed[to_device(rows, device), to_device(self.ids[places].long(), device)] = True
        return allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Trajectories as a rectangle. Fields are [batch, time] or [batch]; None means not computed.

    Positions that do not train may hold anything, NaN included.
    """

    ids: Tensor
    """[batch, time] int64. Whatever the padding holds is never looked at."""
    roles: Tensor
    """[batch, time] uint8, `maths.roles.Role`."""
    groups: Tensor
    """[batch] int64."""
    verdicts: Tensor | None = None
    """[batch, time] uint8, `maths.roles.Verdict`."""
    behaviour_logprobs: Tensor | None = None
    """[batch, time]: who sampled it."""
    old_logprobs: Tensor | None = None
    """[batch, time]: the policy at the start of the update."""
    ref_logprobs: Tensor | None = None
    """[batch, time]: the frozen reference."""
    values: Tensor | None = None
    """[batch, time]: the critic at the start of the update."""
    rewards: Tensor | None = None
    """[batch, time]: score and KL part, on eligible positions."""
    advantages: Tensor | None = None
    """[batch, time]."""
    returns: Tensor | None = None
    """[batch, time]: what the critic is fitted to."""
    weights: Tensor | None = None
    """[batch, time]: importance weights; None is 1 everywhere."""
    scores: Tensor | None = None
    """[batch]: NaN where the reward failed."""
    baselines: Tensor | None = None
    """[batch]: the score of the greedy answer to the same prompt, where one was requested; NaN where its reward failed."""
    policy_versions: Tensor | None = None
    """[batch] int64: the weights that sampled each row."""
    episodes: Tensor | None = None
    """[batch] int64: rows with the same number are the samples of one agent's episode, in order, and count as one
    sequence. None: every row is a sequence of its own."""
    replayed: Tensor | None = None
    """[batch] bool: rows of earlier steps that are trained on again; None: all are fresh."""
    guided: Tensor | None = None
    """[batch] bool: rows whose behaviour read lessons in its prompt that are not here; None: none did."""
    turns: Tensor | None = None
    """[batch, time] int64: which of the policy's turns a position belongs to, -1 outside of them. It and the three below are
    there if credit is given turn by turn (`maths.credit`); each says the same at all positions of a turn."""
    turn_rewards: Tensor | None = None
    """[batch, time]: what the environment gave for the turn."""
    turn_marks: Tensor | None = None
    """[batch, time]: how the turn was judged; NaN where it was not."""
    turn_states: Tensor | None = None
    """[batch, time] int64: what the policy had just read, as a number."""
    supports: Supports | None = None
    """[batch, time]: what could be drawn; None: the whole vocabulary everywhere."""

    def __post_init__(self) -> None:
        if self.ids.dim() != 2:
            raise ValueError(f"ids must be [batch, time], got shape {tuple(self.ids.shape)}")
        cut = {} if self.supports is None else {"supports": self.supports.counts}
        for name, tensor in (*self.tensors(), *cut.items()):
            expected = self.ids.shape[:1] if name in _PER_ROW else self.ids.shape
            if tensor.shape != expected:
                raise ValueError(f"batch.{name} has shape {tuple(tensor.shape)}, expected {tuple(expected)} to fit ids")

    def __len__(self) -> int:
        return self.ids.shape[0]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The fields that are computed, by name; `supports`, which is no tensor, is not among them."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                yield f.name, value

    def rows(self, index: Tensor | slice) -> "Batch":
        """The chosen rows, in the given order."""
        supports = None if self.supports is None else self.supports[index]
        return replace(self, supports=supports, **{name: tensor[index] for name, tensor in self.tensors()})

    def trimmed(self, time: int) -> "Batch":
        """The first `time` positions of every row."""
        supports = None if self.supports is None else self.supports[:, :time]
        held = {name: t if name in _PER_ROW else t[:, :time] for name, t in self.tensors()}
        return replace(self, supports=supports, **held)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device; supports stay on the host."""
        moved = {name: to_device(tensor, device) for name, tensor in self.tensors()}
        return replace(self, supports=self.supports, **moved)


_PER_ROW = frozenset({"groups", "scores", "baselines", "policy_versions", "episodes", "replayed", "guided"})


def _check_lengths(what: str, length: int, **parts: tuple[object, ...] | None) -> None:
    for name, part in parts.items():
        if part is not None and len(part) != length:
            raise ValueError(
                f"{what}: {name} has {len(part)} entries but there are {length} ids; index t must mean token t"
            )
