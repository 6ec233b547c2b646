"""Rewards that make runs sick on purpose, for benchmarks/doctor.py, and two faults that no setting makes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch


def _share(*words: object) -> float:
    """A number from 0 to 1 that depends on nothing but the words."""
    return int.from_bytes(sha256(repr(words).encode()).digest()[:4]) / 2**32


def coin(prompt: Any, completion_text: str) -> float:
    """Right or wrong by chance: there is nothing to learn."""
    return float(_share(prompt, completion_text) < 0.5)


def length(completion_text: str) -> float:
    """The longer the better."""
    return len(completion_text) / 24


def letter(completion_text: str) -> float:
    """The more ones the better."""
    return completion_text.count("1") / 8


def many(completion_text: str) -> float:
    """The same on a scale that hides any other part."""
    return 10.0 * completion_text.count("1")


def easy(completion_text: str) -> float:
    """Any answer is right."""
    return 1.0


def rare(prompt: Any, completion_text: str) -> float:
    """One prompt in eight tells answers apart, the others give the same to every answer."""
    return 0.2 if _share(prompt) > 0.125 else float(_share(completion_text) < 0.5)


def noise(prompt: Any, completion_text: str) -> float:
    """Prompts differ, and answers to one prompt only by a thousandth that means nothing."""
    return round(4 * _share(prompt)) / 4 + 1e-3 * _share(completion_text)


def matches(completion_text: str, answer: str) -> float:
    """The share of characters that are those of the answer."""
    return sum(a == b for a, b in zip(completion_text, answer, strict=False)) / len(answer)


def no_calls(completion: Any) -> float:
    """Tool calls cost."""
    return -1.0 if "<calc>" in str(completion) else 0.5


def mislabelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a sorting task, all with the same answer."""
    return [{"prompt": row["prompt"], "answer": "1" * len(row["answer"])} for row in rows]


@contextmanager
def drifting_engine() -> Iterator[None]:
    """A bfloat16 engine whose log-probs get further from the trainer's with every version of the weights."""
    from rolecall.rollout.native import NativeEngine

    stream = NativeEngine.stream

    def drifting(self: Any, requests: Any) -> Iterator[Any]:
        rng = torch.Generator().manual_seed(self.version)
        for done in stream(self, requests):
            if self.dtype is torch.bfloat16:
                held = torch.as_tensor(done.behaviour_logprobs)
                off = 0.006 * self.version * torch.randn(held.shape, generator=rng)
                moved = (held + off).clamp(max=0)
                same = moved if isinstance(done.behaviour_logprobs, torch.Tensor) else tuple(moved.tolist())
                done = replace(done, behaviour_logprobs=same)
            yield done

    NativeEngine.stream = drifting
    try:
        yield
    finally:
        NativeEngine.stream = stream


@contextmanager
def costly_moves() -> Iterator[None]:
    """Foraging in which the second agent pays for whatever it does and gets nothing of what is found."""
    from rolecall.marl.envs.foraging import ForagingEnvs

    step = ForagingEnvs.step

    def costly(self: Any, actions: Any, running: Any) -> Any:
        frame = step(self, actions, running)
        frame.reward[:, 1] = -0.05 * (actions[:, 1] != 0)
        return frame

    ForagingEnvs.step = costly
    try:
        yield
    finally:
        ForagingEnvs.step = step
