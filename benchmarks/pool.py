"""What a pool of workers costs beside the work itself: local processes, and actors of Ray.

    python benchmarks/pool.py [--prompts 8] [--samples 8] [--tokens 64] [--steps 2] [--tiny]

A step of SmolLM2-135M: weights are published, every prompt is answered, and one update trains on the answers. Seconds are those of processors,
of this process and all it has started (with Ray, its own processes too), so that a busy machine does not change them. The same step is made
with an engine in this process, which answers each prompt by itself as a worker does; whatever a pool takes more is its overhead. One
thread each.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from rolecall.config.parts import EngineOptions
from rolecall.policy.load import LoadedModel, load
from rolecall.rollout.engine import Engine
from rolecall.rollout.open import open_engine
from rolecall.rollout.pool import EnginePool
from rolecall.types import Completion, Request, Sampling

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
    for name, default in (("prompts", 8), ("samples", 8), ("tokens", 64), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tiny", action="store_true", help="the built-in model, to try the script")
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
        "engine in this process": lambda: open_engine(loaded, **HOW),
        "pool, one process": lambda: EnginePool(loaded, options, how=HOW, reads={}),
        "pool, one Ray actor": lambda: ray_pool(loaded),
    }
    alone = trained = 0.0
    for name, make in made.items():
        engine = make()
        answers = step(engine, loaded, asked, 1, one_by_one=not alone)  # the first one warms up
        if not trained:
            update(loaded, answers[:8], asked)
            before = spent()
            update(loaded, answers, asked)
            trained = spent() - before
        found, walls = [], []
        for version in range(2, 2 + given.steps):
            before, begun = spent(), time.monotonic()
            step(engine, loaded, asked, version, one_by_one=not alone)
            found.append(spent() - before)
            walls.append(time.monotonic() - begun)
        seconds = statistics.median(found)
        alone = alone or seconds
        more = (
            ""
            if seconds == alone
            else f": {seconds - alone:+.2f} s, {100 * (seconds - alone) / (alone + trained):+.1f} % of a step"
        )
        print(
            f"{name}: {seconds:.2f} s of processors to publish and sample ({statistics.median(walls):.2f} s by the clock), "
            f"{trained:.2f} s to update{more}",
            flush=True,
        )
        getattr(engine, "close", lambda: None)()


def ray_pool(loaded: LoadedModel) -> Engine:
    from rolecall.rollout.ray_pool import RayPool

    os.environ.pop("RAY_ADDRESS", None)
    return RayPool(loaded, EngineOptions(workers=1, cluster="ray"), how=HOW, reads={})


if __name__ == "__main__":
    main()
