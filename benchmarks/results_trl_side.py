"""TRL's GRPO on the same task, start, reward and number of answers, in an environment of its own."""

import json
import subprocess
import time
from pathlib import Path

import peers
from results_runs import ANSWERS, LR, ROOM, STEPS, TASK, Place, greedy, is_done, start

from rolecall.tasks.names import find_task

EVERY = 5
"""Steps between the models that are evaluated."""


def compare(place: Place, seed: int, *, steps: int = STEPS) -> None:
    """Train with TRL and evaluate its models with our evaluator. TRL's own resuming is not used: it starts over."""
    path = place.at("trl", f"grpo-seed-{seed}")
    if is_done(path):
        return
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
    }
    begun = time.monotonic()
    script = str(Path(__file__).with_name("results_trl.py"))
    subprocess.run([peers.python(peers.TRL), script, json.dumps(settings)], check=True)
    seconds = time.monotonic() - begun
    models = {0: Path(start(place, seed))}
    models |= {int(p.name.rpartition("-")[2]): p for p in (path / "trl").glob("checkpoint-*")}
    curve = [{"step": step, **greedy(models[step])} for step in sorted(models)]
    log = json.loads((path / "trl" / "log.json").read_text())
    result = {"seconds": seconds, "curve": curve, **log}
    (path / "result.json").write_text(json.dumps(result, indent=1))
