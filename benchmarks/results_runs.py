"""The runs behind docs/results.md on the built-in model: what is trained, from where, with which settings.

Fixed before anything was tuned: the task (`sorting`, five digits), its own held-out split, the start (SFT on
demonstrations of which every second one sorts the wrong way round) and 256 answers per step. Learning rates and lengths
of runs were chosen on problems of the *training* split (`--validation`); held-out problems are only looked at by the
runs that are reported.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rolecall
from rolecall.config.rl_presets import PRESETS
from rolecall.jobs.models import model_directory
from rolecall.jobs.running import Run
from rolecall.tasks.builtin import demonstrations
from rolecall.tasks.names import find_task

TASK = "sorting"
REWARD = "rolecall.tasks.scoring:task"
DEMONSTRATIONS = 4000
HELD_OUT = 400
"""Held-out problems that every model is asked, greedily."""
STEPS = 40
LR = 1e-4
ANSWERS = 256
"""Answers per step, however they are split into prompts and samples."""
ROOM = {"max_new_tokens": 8}
_SINGLE = ("ppo", "alpacafarm-ppo", "reinforce++", "remax")
"""Presets that sample one answer per prompt."""
_OWN: dict[str, dict[str, Any]] = {
    # The preset's clip range is that of large models with small steps; this one is in proportion to our learning rate.
    "gspo": {"algorithm": {"clip_low": 0.03, "clip_high": 0.04}},
}
"""What a preset needs beside, on this task."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where runs lie, and which problems evaluations use."""

    root: Path
    validation: bool = False

    def at(self, *parts: str) -> Path:
        """A run's directory; its parent is there."""
        path = self.root.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def rows(self) -> Any:
        """The task, whose evaluations use its test split; or problems of the training split, some held out of it."""
        return list(find_task(TASK).rows("train", n=8000)) if self.validation else TASK

    def evaluation(self, every: int, **more: Any) -> dict[str, Any]:
        """How often to evaluate, on how many problems."""
        return {"every": every, "rows": HELD_OUT, "held_out": 0.06, **more}


def is_done(path: Path) -> bool:
    """Whether the run ended as planned."""
    return (path / "result.json").is_file()


def finished(path: Path, work: Callable[..., Run | None], **facts: Any) -> dict[str, Any]:
    """Do the work unless it is done; it gets the options that say where, and whether to resume. Writes how long it took to
    result.json."""
    if not is_done(path):
        begun = time.monotonic()
        resume = (path / "checkpoints").is_dir() and any((path / "checkpoints").iterdir())
        run = work(out=str(path), resume=resume, overwrite=not resume, quiet=True)
        if run is not None and run.outcome.exit_code != 0:
            raise SystemExit(f"{path} ended early: {run.outcome.reason}; start again to go on")
        facts = {**facts, "seconds": time.monotonic() - begun}
        print(f"  {path.parent.name}/{path.name}: {facts['seconds']:.0f} s", flush=True)
        (path / "result.json").write_text(json.dumps(facts, indent=1))
    return json.loads((path / "result.json").read_text())


def start(place: Place, seed: int) -> str:
    """The SFT model that every run of this seed begins with."""
    path = place.at("start", f"seed-{seed}")
    rows = demonstrations(find_task(TASK), "train", n=DEMONSTRATIONS, seed=seed)
    mixed = [row if i % 2 else row | {"completion": row["completion"][::-1]} for i, row in enumerate(rows)]
    finished(
        path,
        lambda **how: rolecall.sft(
            model="tiny",
            rows=mixed,
            steps=200,
            batch=64,
            seed=seed,
            optim={"lr": 2e-3, "warmup_steps": 20, "schedule": "cosine"},
            save={"every": 0},
            **how,
        ),
    )
    return model_directory(str(path))


def reinforce(place: Place, name: str, seed: int, *, folder: str, preset: str, **settings: Any) -> Path:
    """An RL run of a preset from the start of its seed."""
    path = place.at(folder, f"{name}-seed-{seed}")
    single = preset in _SINGLE
    common: dict[str, Any] = {
        "model": start(place, seed),
        "reward": REWARD,
        "steps": STEPS,
        "prompts": ANSWERS if single else ANSWERS // 8,
        "samples": 1 if single else 8,
        "sampling": ROOM,
        "optim": {"lr": LR, "critic_lr": 1e-3 if preset == "alpacafarm-ppo" else None, "warmup_steps": 5},
        "eval": place.evaluation(5),
        "save": {"every": 20, "rollouts": 1, "updates": 1},
        "seed": seed,
    }
    settings = merged(common, _OWN.get(preset, {}), settings)
    finished(
        path,
        lambda **how: rolecall.rl(preset=preset, rows=place.rows, **how, **settings),
        preset=preset,
        seed=seed,
    )
    return path


def presets(place: Place, seed: int) -> None:
    """Every preset, on the same problems and with as many answers per step."""
    for preset in PRESETS:
        reinforce(place, preset, seed, folder="presets", preset=preset)


def rules(place: Place, seed: int) -> None:
    """GRPO with both train rules, and with room for answers that do not end."""
    for name, stop in (("content+stop", True), ("content", False)):
        reinforce(
            place,
            name,
            seed,
            folder="rules",
            preset="grpo",
            sampling={"max_new_tokens": 16},
            algorithm={"train_stop": stop},
        )


def preferences(place: Place, seed: int) -> None:
    """SFT → reward model → PPO with and without KL, best of n, expert iteration; and DPO on the same pairs."""
    pairs = preference_pairs(place, seed)
    judge = place.at("preferences", f"reward-model-seed-{seed}")
    finished(
        judge,
        lambda **how: rolecall.rm(
            model=start(place, seed),
            rows=pairs,
            steps=60,
            batch=32,
            seed=seed,
            optim={"lr": 5e-4, "warmup_steps": 10, "schedule": "cosine"},
            eval={"every": 60, "rows": 200, "held_out": 0.2},
            save={"every": 0},
            **how,
        ),
    )
    by_model: dict[str, Any] = {"reward": str(judge), "eval": place.evaluation(10, reward=(REWARD,))}
    for name, kl in (("ppo", 0.0), ("ppo-kl", 0.2)):
        critic = {"critic": "separate", "critic_from": str(judge), "kl_coef": kl}
        reinforce(
            place,
            name,
            seed,
            folder="preferences",
            preset="ppo",
            algorithm=critic,
            optim={"critic_lr": 1e-3},
            **by_model,
        )
    best = place.at("preferences", f"best-of-n-seed-{seed}")
    test = {"rows": place.rows, **({} if place.validation else {"split": "test"})}
    finished(
        best,
        lambda **how: rolecall.best_of_n(
            model=start(place, seed),
            reward=str(judge),
            judge=REWARD,
            n=64,
            count=200,
            sampling=ROOM,
            seed=seed,
            **how,
            **test,
        ),
    )
    expert = place.at("preferences", f"expert-iteration-seed-{seed}")
    finished(
        expert,
        lambda **how: rolecall.expert_iteration(
            model=start(place, seed),
            rows=place.rows,
            steps=6,
            prompts=256,
            samples=8,
            keep="best",
            sampling=ROOM,
            optim={"lr": 2e-4},
            seed=seed,
            **how,
            **merged(by_model, {"eval": {"every": 1}}),
        ),
    )
    direct = place.at("preferences", f"dpo-seed-{seed}")
    finished(
        direct,
        lambda **how: rolecall.dpo(
            model=start(place, seed),
            rows=pairs,
            steps=60,
            batch=32,
            beta=0.1,
            optim={"lr": 1e-4, "warmup_steps": 5},
            save={"every": 20},
            seed=seed,
            **how,
        ),
    )


def preference_pairs(place: Place, seed: int) -> list[dict[str, Any]]:
    """The right answer against each different wrong one that the start gives to 300 problems of the training split.

    So few that the reward model is a guide with faults: what it likes and what is right come apart under pressure.
    """
    task = find_task(TASK)
    rows = list(task.rows("train", n=300, seed=seed + 1000))
    answers = rolecall.generate(
        model=start(place, seed), prompts=[row["prompt"] for row in rows], n=4, chat=False, sampling=ROOM, seed=seed
    )
    wrong = {(a.trajectory.group, a.text) for a in answers if not task.score(a.text, rows[a.trajectory.group])}
    return [
        {"prompt": rows[group]["prompt"], "chosen": task.gold(rows[group]), "rejected": text}
        for group, text in sorted(wrong)
        if text
    ]


def greedy(model: Path, *, train_reward: str | None = None) -> dict[str, float]:
    """A model's numbers on the held-out problems; with another reward, its mean beside."""
    how: dict[str, Any] = {"model": str(model), "rows": TASK, "n": HELD_OUT, "sampling": ROOM}
    numbers = dict(rolecall.eval(**how).numbers)
    if train_reward is not None:
        numbers["train_reward"] = rolecall.eval(**how, reward=train_reward).numbers["reward"]
    return numbers


def merged(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, later ones stronger; None values of the outer levels stay out."""
    out: dict[str, Any] = {}
    for part in settings:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
            out[key] = merged(out[key], value) if both else value
    return out
