"""What sampling ahead of training is worth where sampling waits for something else than this machine's cores.

    python benchmarks/ahead.py [--steps 12] [--rounds 3] [--kind answers|episodes|environments|busy] [--workers 0] [--page]

A GPU, a server or an environment elsewhere costs this machine no work: it is stood for by an engine (`answers`, `episodes`) or
by environments (`environments`) that wait, so that sampling a step takes as long as the update does, most of it asleep. The
built-in model, one thread; `--workers` as engine.workers. With `busy` nothing waits, and sampling and training both use all cores. Runs with async.ahead 0, 1 and 2 take turns, and each is compared with
the 0 of its round: seconds per step and of its parts, and how many times as fast as 0 that is. `--page` puts every round into
docs/cluster.md.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from in_page import put

import rolecall
from rolecall.jobs import models
from rolecall.rollout.engine import Engine, StreamFlight

ANSWERS: dict[str, Any] = {
    "rows": "addition", "prompts": 16, "samples": 8, "sampling.max_new_tokens": 8, "algorithm.epochs": 4,
}  # fmt: skip
EPISODES: dict[str, Any] = {
    "env": "calculator", "prompts": 8, "samples": 4, "sampling.max_new_tokens": 12, "agent.max_turns": 2,
    "algorithm.epochs": 4,
}  # fmt: skip
ENVIRONMENTS: dict[str, Any] = {
    "prompts": 8, "samples": 4, "sampling.max_new_tokens": 4, "agent.max_turns": 2, "agent.workers": 4,
    "algorithm.epochs": 12,
}  # fmt: skip
BUSY: dict[str, Any] = {
    "rows": "addition", "prompts": 16, "samples": 8, "sampling.max_new_tokens": 64, "algorithm.epochs": 1,
}  # fmt: skip
KINDS = {"answers": ANSWERS, "episodes": EPISODES, "environments": ENVIRONMENTS, "busy": BUSY}

Play = Callable[[int], dict[str, float]]
"""Steps ahead -> median seconds of a step and of its parts."""


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


class Waiting:
    """Two turns, each of which the environment thinks about for so many seconds; bytes pay."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.left = seconds, 2

    def reset(self, row: Any, seed: int) -> str:
        return "letters:"

    def step(self, message: Any) -> Any:
        from rolecall.tasks.env import Step

        time.sleep(self.seconds)
        self.left -= 1
        text = message["content"].encode()
        paid = sum(byte % 7 for byte in text) / (6 * max(1, len(text)))
        return Step(messages="more", reward=paid, done=self.left == 0)


def timed(*, steps: int, **how: Any) -> dict[str, float]:
    """Median seconds of a step and of its parts, the first three left out."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        rolecall.rl(steps=steps, out=str(out), quiet=True, **how, **{"save.every": 0})
        lines = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()][3:]
    return {
        name: statistics.median(line[name] for line in lines) for name in ("step_time", "generate", "update", "score")
    }


def measure(kind: dict[str, Any], *, seconds: float, ahead: int, steps: int) -> tuple[dict[str, float], float]:
    """Median seconds of a step and of its parts, by an engine that waits; and calls of the engine per step."""
    real, made = models.sampler, []

    def elsewhere(*args: Any, **how: Any) -> Elsewhere:
        made.append(Elsewhere(real(*args, **how), seconds))
        return made[0]

    models.sampler = elsewhere
    try:
        found = timed(reward=letters, ahead=ahead, steps=steps, **kind)
    finally:
        models.sampler = real
    return found, made[0].calls / steps


def waiting_engine(kind: dict[str, Any], *, steps: int) -> tuple[str, Play]:
    """An engine that waits as long as the update takes: what was found out, and what plays a run so many steps ahead."""
    found, calls = measure(kind, seconds=0.0, ahead=0, steps=steps)
    update = found["update"] + found["score"]
    play = lambda ahead: measure(kind, seconds=update / calls, ahead=ahead, steps=steps)[0]
    return f"the update takes {update:.3f} s; so does the engine", play


def waiting_environments(kind: dict[str, Any], *, steps: int) -> tuple[str, Play]:
    """Environments that wait: how long is chosen so that sampling a step takes as long as its update."""

    def play(seconds: float, ahead: int, steps: int) -> dict[str, float]:
        def make() -> Waiting:
            return Waiting(seconds)

        return timed(env=make, ahead=ahead, steps=steps, **kind)

    found = play(0.0, 0, 8)
    calls = kind["prompts"] * kind["samples"] * 2 / kind["agent.workers"]
    wait = max(0.0, found["update"] + found["score"] - found["generate"]) / calls
    busy = found["generate"] / (found["update"] + found["score"])
    said = f"an environment thinks for {wait:.3f} s; without, sampling takes {busy:.2f} of the update"
    return said, lambda ahead: play(wait, ahead, steps)


def nothing_waits(kind: dict[str, Any], *, steps: int) -> tuple[str, Play]:
    """An engine and an update that use all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    said = f"nothing waits, and both use {torch.get_num_threads()} cores"
    return said, lambda ahead: timed(reward=letters, ahead=ahead, steps=steps, **kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kind", choices=list(KINDS), default="answers")
    parser.add_argument("--page", action="store_true", help="put the figures into docs/cluster.md")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    kind = KINDS[chosen.kind] | {"engine.workers": chosen.workers}
    prepare = {"environments": waiting_environments, "busy": nothing_waits}.get(chosen.kind, waiting_engine)
    said, play = prepare(kind, steps=chosen.steps)
    print(f"{chosen.kind}: {said}", flush=True)
    took: dict[int, list[dict[str, float]]] = {0: [], 1: [], 2: []}
    for number in range(chosen.rounds):
        for ahead, found in took.items():
            found.append(play(ahead))
            parts = ", ".join(f"{name} {found[-1][name]:.3f}" for name in ("generate", "score", "update"))
            ratio = took[0][number]["step_time"] / found[-1]["step_time"]
            print(f"async.ahead {ahead}: {found[-1]['step_time']:.3f} s per step ({parts}), {ratio:.2f} x", flush=True)
    lines = []
    for ahead in (1, 2):
        ratios = sorted(a["step_time"] / b["step_time"] for a, b in zip(took[0], took[ahead], strict=True))
        middle = statistics.median(ratios)
        lines.append(
            f"async.ahead {ahead}: {middle:.2f} x, the middle of {len(ratios)} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
        print(lines[-1])
    if chosen.page:
        words = (
            f"--kind {chosen.kind} --workers {chosen.workers} --steps {chosen.steps} --rounds {chosen.rounds} --page"
        )
        head = f"`python benchmarks/ahead.py {words}`, {time.strftime('%Y-%m-%d')}: {said}. {'; '.join(lines)}."
        put("cluster.md", f"ahead-{chosen.kind}", f"{head}\n\n{table(took)}")


def table(took: dict[int, list[dict[str, float]]]) -> str:
    """Every round, by steps ahead."""
    rows = [
        "| round | async.ahead | a step | sampling | scoring and update | times as fast |",
        "|---|---|---|---|---|---|",
    ]
    for number, whole in enumerate(took[0]):
        for ahead, found in took.items():
            one = found[number]
            trained = one["score"] + one["update"]
            rows.append(
                f"| {number + 1} | {ahead} | {one['step_time']:.2f} s | {one['generate']:.2f} s | {trained:.2f} s | "
                f"{whole['step_time'] / one['step_time']:.2f} |"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
