"""What sampling ahead of training is worth where sampling waits for something else than this machine's cores.

    python benchmarks/ahead.py [--steps 12] [--kind answers|episodes]

A GPU, a server or an environment elsewhere costs this machine no work: it is stood for by an engine (or an environment) that
takes as long as the update does, most of it asleep. The built-in model, one thread. Prints seconds per step with async.ahead
0, 1 and 2, and how many times as fast as 0 that is.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import rolecall
from rolecall.jobs import rl as job
from rolecall.rollout.engine import Engine, StreamFlight

ANSWERS: dict[str, Any] = {
    "rows": "addition", "prompts": 16, "samples": 8, "sampling.max_new_tokens": 8, "algorithm.epochs": 4,
}  # fmt: skip
EPISODES: dict[str, Any] = {
    "env": "calculator", "prompts": 8, "samples": 4, "sampling.max_new_tokens": 12, "agent.max_turns": 2,
    "algorithm.epochs": 4,
}  # fmt: skip


def letters(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs from answer to answer, also of a model that knows nothing."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(ord(letter) % 7 for letter in text) / (6 * max(1, len(text))) for text in texts]


class Elsewhere(Engine):
    """An engine whose answers come `seconds` after they were asked for."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.engine, self.seconds, self.calls = engine, seconds, 0

    version = property(lambda self: self.engine.version)

    def load(self, weights: Any, version: int) -> None:
        self.engine.load(weights, version)

    def hash(self) -> str:
        return self.engine.hash()

    def open(self) -> StreamFlight:
        return StreamFlight(self.stream)

    def stream(self, requests: Any) -> Any:
        self.calls, begun = self.calls + 1, time.monotonic()
        answers = list(self.engine.stream(requests))
        time.sleep(max(0.0, self.seconds - (time.monotonic() - begun)))
        yield from answers


def measure(kind: dict[str, Any], *, seconds: float, ahead: int, steps: int) -> tuple[float, float, float]:
    """Median seconds of a step, the first three left out, and of its update and scoring; and calls of the engine per step."""
    real, made = job.sampler, []

    def elsewhere(*args: Any, **how: Any) -> Elsewhere:
        made.append(Elsewhere(real(*args, **how), seconds))
        return made[0]

    job.sampler = elsewhere
    try:
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "run"
            rolecall.rl(reward=letters, steps=steps, ahead=ahead, out=str(out), quiet=True, **kind, **{"save.every": 0})
            lines = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()][3:]
    finally:
        job.sampler = real
    step = statistics.median(line["step_time"] for line in lines)
    return step, statistics.median(line["update"] + line["score"] for line in lines), made[0].calls / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kind", choices=["answers", "episodes"], default="answers")
    chosen = parser.parse_args()
    kind = ANSWERS if chosen.kind == "answers" else EPISODES
    torch.set_num_threads(1)
    _, update, calls = measure(kind, seconds=0.0, ahead=0, steps=chosen.steps)
    print(f"{chosen.kind}: the update takes {update:.3f} s; so does the engine")
    base = None
    for ahead in (0, 1, 2):
        step, _, _ = measure(kind, seconds=update / calls, ahead=ahead, steps=chosen.steps)
        base = base or step
        print(f"async.ahead {ahead}: {step:.3f} s per step, {base / step:.2f} x")


if __name__ == "__main__":
    main()
