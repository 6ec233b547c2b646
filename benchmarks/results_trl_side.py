"""TRL's GRPO on the same task, start, reward and number of answers, in an environment of its own."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import peers
from results_runs import ANSWERS, LR, ROOM, STEPS, TASK, Place, greedy, is_done, start

from rolecall.tasks.names import find_task

EVERY = 5
"""Steps between the models that are evaluated."""


def compare(place: Place, seed: int, *, bf16: bool = False) -> None:
    """Train with TRL and evaluate its models with our evaluator. TRL's own resuming is not used: it starts over."""
    path = place.at("trl", f"grpo-seed-{seed}")
    if is_done(path):
        return
    begun = time.monotonic()
    log = train(place, path, seed, steps=STEPS, bf16=bf16)
    seconds = time.monotonic() - begun
    models = {0: Path(start(place, seed))}
    models |= {int(p.name.rpartition("-")[2]): p for p in (path / "trl").glob("checkpoint-*")}
    curve = [{"step": step, **greedy(models[step])} for step in sorted(models)]
    (path / "result.json").write_text(json.dumps({"seconds": seconds, "curve": curve, **log}, indent=1))


def train(place: Place, path: Path, seed: int, *, steps: int, bf16: bool) -> dict[str, Any]:
    """Train into a directory; what TRL logged. `bf16` is its mixed precision."""
    path.mkdir(parents=True, exist_ok=True)
    rows = path / "rows.jsonl"
    problems = find_task(TASK).rows("train", n=8000, seed=seed)
    rows.write_text("".join(json.dumps({"prompt": r["prompt"], "answer": r["answer"]}) + "\n" for r in problems))
    settings = {
        "model": start(place, seed),
        "rows": str(rows),
        "out": str(path / "trl"),
        "steps": steps,
        "samples": 8,
        "answers": ANSWERS,
        "lr": LR,
        "max_new_tokens": ROOM["max_new_tokens"],
        "every": EVERY,
        "seed": seed,
        "bf16": bf16,
    }
    script = str(Path(__file__).with_name("results_trl.py"))
    subprocess.run([peers.python(peers.TRL), script, json.dumps(settings)], check=True)
    log: dict[str, Any] = json.loads((path / "trl" / "log.json").read_text())
    return log
