"""TRL's GRPO on the same task, start, reward and number of answers, in an environment of its own."""

import json
import subprocess
import sys
import time
from pathlib import Path

from results_runs import ANSWERS, LR, ROOM, STEPS, TASK, Place, greedy, is_done, start

from rolecall.tasks.names import find_task

HERE = Path(__file__).parents[1]
ENVIRONMENT = HERE / ".venv-trl"
PINS = ("trl==1.16.0", "torch==2.13.0", "datasets")
EVERY = 20
"""Steps between the models that are evaluated."""


def python() -> str:
    """The interpreter of TRL's environment, made at the first call. torch is pinned: without it gigabytes would come."""
    found = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / "ready").is_file():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        pip = [str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", str(HERE / "constraints.txt"), *PINS], check=True)
        (ENVIRONMENT / "ready").touch()
    return str(found)


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
    subprocess.run([python(), script, json.dumps(settings)], check=True)
    seconds = time.monotonic() - begun
    models = {0: Path(start(place, seed))}
    models |= {int(p.name.rpartition("-")[2]): p for p in (path / "trl").glob("checkpoint-*")}
    curve = [{"step": step, **greedy(models[step])} for step in sorted(models)]
    log = json.loads((path / "trl" / "log.json").read_text())
    result = {"seconds": seconds, "train_seconds": log["train_seconds"], "curve": curve, "rewards": log["rewards"]}
    (path / "result.json").write_text(json.dumps(result, indent=1))
