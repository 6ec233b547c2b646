"""What a pool of workers costs beside the work itself: local processes, and actors of Ray.

    python benchmarks/pool.py [--prompts 8] [--samples 8] [--tokens 64] [--steps 5] [--tiny] [--page]

A step of SmolLM2-135M: weights are published, every prompt is answered, and one update trains on the answers. The same step is made
with an engine in this process, which answers each prompt by itself as a worker does; whatever a pool takes more is its overhead. They take
turns, so that a machine that changes its speed changes it for all; what is printed is the middle of all turns. Seconds are those of
processors, of this process and all it has started (Ray's own processes are counted for the whole step), and those of the clock. One
thread each. `--page` puts the figures into docs/cluster.md.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from in_page import put

from rolecall.config.parts import EngineOptions
from rolecall.policy.load import LoadedModel, load
from rolecall.rollout.engine import Engine
from rolecall.rollout.open import open_engine
from rolecall.rollout.pool import EnginePool
from rolecall.types import Completion, Request, Sampling

HERE, RAY = "engine in this process", "pool, one Ray actor"
HOW: dict[str, Any] = {"name": "native", "dtype": None, "max_rows": 256}


def spent() -> float:
    """Seconds of processors of this process and of those it started, Ray's included."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def step(
    engine: Engine, loaded: LoadedModel, asked: list[Request], version: int, *, one_by_one: bool
) -> list[Completion]:
    """Publish, then sample. What a worker does in one unit, an engine of this process does in one call."""
    engine.load(dict(loaded.model.named_parameters()), version)
    if one_by_one:
        return [answer for request in asked for answer in engine.generate([request])]
    return engine.generate(asked)


def update(loaded: LoadedModel, answers: list[Completion], asked: list[Request]) -> None:
    """Forward and backward over all answers, eight at a time; weights stay as they are."""
    width = max(len(r.prompt_ids) for r in asked) + max(len(a.ids) for a in answers)
    for start in range(0, len(answers), 8):
        rows = [(*asked[a.prompt].prompt_ids, *a.ids) for a in answers[start : start + 8]]
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        loaded.model(ids, labels=ids).loss.backward()
    loaded.model.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("prompts", 8), ("samples", 8), ("tokens", 64), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tiny", action="store_true", help="the built-in model, to try the script")
    parser.add_argument("--page", action="store_true", help="put the figures into docs/cluster.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = "tiny"
    if not given.tiny:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        from smollm2 import smollm2_path

        model = str(smollm2_path())
    loaded = load(model)
    sampling = Sampling(max_new_tokens=given.tokens, stop_ids=())
    asked = [
        Request(prompt_ids=tuple(range(65, 97 + i)), sampling=sampling, n=given.samples, prompt=i, seed=1, step=0)
        for i in range(given.prompts)
    ]
    options = EngineOptions(workers=1)
    made = {
        HERE: lambda: open_engine(loaded, **HOW),
        "pool, one process": lambda: EnginePool(loaded, options, how=HOW, reads={}),
        RAY: lambda: ray_pool(loaded),
    }
    engines = {name: make() for name, make in made.items()}
    answers = [step(engine, loaded, asked, 1, one_by_one=name == HERE) for name, engine in engines.items()]  # warms up
    if any(found != answers[0] for found in answers):
        raise SystemExit("they do not answer alike")
    update(loaded, answers[0][:8], asked)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in [*engines, "update"]}
    idle = measured(lambda: time.sleep(5.0))[0] / 5.0
    for version in range(2, 2 + given.steps):
        for name, engine in engines.items():
            found[name].append(measured(partial(step, engine, loaded, asked, version, one_by_one=name == HERE)))
        found["update"].append(measured(partial(update, loaded, answers[0], asked)))
    whole = [sum(pair) for pair in zip(*(middle(found[name]) for name in (HERE, "update")), strict=True)]
    lines = [
        f"A step with an {HERE}: {whole[0]:.2f} s of processors, {whole[1]:.2f} s by the clock. Ray's own processes take {idle:.1%} of a processor.",
        "",
    ]
    for name, engine in engines.items():
        more = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(found[name], found[HERE], strict=True)]
        shares = [100 * seconds / all_of_it for seconds, all_of_it in zip(middle(more), whole, strict=True)]
        seconds = middle(found[name])
        if name == RAY:  # its processes work whoever's turn it is: they are counted for the whole step
            shares[0] += 100 * idle * whole[1] / whole[0]
        if name != HERE:
            each = ", ".join(f"{a:+.2f} and {b:+.2f}" for a, b in more)
            lines.append(
                f"- {name}: {shares[0]:+.1f} % of a step's seconds of processors, {shares[1]:+.1f} % by the clock. To publish and sample it "
                f"takes {seconds[0]:.2f} s of processors, {seconds[1]:.2f} s by the clock; more than the engine in this process, in each turn: {each} s."
            )
        getattr(engine, "close", lambda: None)()
    print("\n".join(lines), flush=True)
    if given.page:
        words = " ".join(f"--{name} {getattr(given, name)}" for name in ("prompts", "samples", "tokens", "steps"))
        put(
            "cluster.md",
            "pool",
            f"`python benchmarks/pool.py {words} --page`, {time.strftime('%Y-%m-%d')}. " + "\n".join(lines),
        )


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of processors, and by the clock."""
    before, begun = spent(), time.monotonic()
    work()
    return spent() - before, time.monotonic() - begun


def middle(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """The median of each of the two."""
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def ray_pool(loaded: LoadedModel) -> Engine:
    from rolecall.rollout.ray_pool import RayPool

    os.environ.pop("RAY_ADDRESS", None)
    return RayPool(loaded, EngineOptions(workers=1, cluster="ray"), how=HOW, reads={})


if __name__ == "__main__":
    main()
