"""Runs of the tiny model that are killed and resumed, in forked children of a process that has torch loaded."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rolecall.config.merge import resolve
from rolecall.config.rl import RLOptions
from rolecall.experience.parquet import first_table
from rolecall.jobs import building, data, running
from rolecall.jobs.arguments import settings_of
from rolecall.rewards.records import Scored

STEPS = 6
COMMON = {
    "steps": STEPS,
    "prompts": 3,
    "sampling.max_new_tokens": 6,
    "optim.lr": 1e-3,
    "save.every": 1,
    "quiet": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {
        **COMMON, "samples": 4, "algorithm.kl_coef": 0.1, "algorithm.minibatches": 2, "algorithm.epochs": 2,
        "algorithm.reference_every": 2, "algorithm.kl_target": 1.0,
    },
    "ppo": {**COMMON, "samples": 2, "algorithm.critic": "separate", "eval.every": 2, "eval.rows": 2},
    "agents": {
        **COMMON, "samples": 4, "algorithm.minibatches": 2, "env": f"{Path(__file__).with_name('letters_env.py')}:Letters",
        "agent.when_full": "cut", "agent.context_tokens": 75, "agent.workers": 1,
    },
    "lessons": {
        **COMMON, "samples": 4, "env": f"{Path(__file__).with_name('letters_env.py')}:Letters", "agent.workers": 1,
        "lessons.share": 0.5, "lessons.max_tokens": 6, "lessons.size": 5, "lessons.trial": 2, "lessons.clip_high": 0.6,
    },
    "summary": {
        **COMMON, "samples": 4, "algorithm.minibatches": 2, "env": f"{Path(__file__).with_name('letters_env.py')}:Letters",
        "agent.context": "summary", "agent.context_tokens": 260, "agent.workers": 1,
    },
    "replay": {
        **COMMON, "samples": 4, "algorithm.minibatches": 2, "replay.share": 0.5, "replay.sampler": "random",
        "replay.size": 8, "replay.max_uses": 2, "replay.max_staleness": 3, "replay.weights": "mask",
    },
}  # fmt: skip
KINDS |= {
    "ahead": {**KINDS["grpo"], "ahead": 2, "eval.every": 2, "eval.rows": 2},
    "ahead-agents": {**KINDS["agents"], "ahead": 1},
    "ahead-replay": {**KINDS["replay"], "ahead": 3},
    "ahead-lessons": {**KINDS["lessons"], "ahead": 1},
}
ROWS = [{"prompt": f"{word}:"} for word in ("go", "on", "up", "at", "in")]


class Letters:
    """Scores the bytes of the answer, in this process: a forked child needs no workers."""

    names = ("letters",)

    def score(self, samples, *, state=None):
        totals = [sum(i % 7 for i in s.completion_ids) / (6 * max(1, len(s.completion_ids))) for s in samples]
        return [Scored(scores={"letters": total}, total=total) for total in totals]

    def take_metrics(self):
        return {}


def options(kind: str, out: Path, **more: Any) -> RLOptions:
    """The options of a kind of run; of agents none but the environment scores, others are answered and scored here."""
    preset = RLOptions.presets.get(kind, RLOptions.presets["grpo"])
    objects = (
        {}
        if kind.endswith(("agents", "lessons", "summary"))
        else settings_of({"rows": more.pop("rows", ROWS), "reward": reward})
    )
    settings = {**KINDS[kind], "out": str(out), **objects, **more}
    return resolve(RLOptions, [("preset", preset), ("test", settings)]).options


def train(kind: str, out: Path, **more: Any) -> int:
    """One run in this process; its exit code."""
    data.open_reward = lambda *args, **kwargs: Letters()
    return int(running.run(options(kind, out, **more)).outcome.exit_code)


def reward(completions, **kwargs):
    raise AssertionError("Letters stands in for it")


def forked(work: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            code = work()
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
        os._exit(code)
    return child


def die_in_save(call: int) -> None:
    """SIGKILL right before the `call`-th call to the system after the first checkpoint of this child was begun."""
    count = -1

    def counted(real: Callable) -> Callable:
        def inner(*args: object, **options: object) -> object:
            nonlocal count
            if count >= 0:
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
            return real(*args, **options)

        return inner

    write = building.write_checkpoint

    def begun(*args: object, **options: object) -> None:
        nonlocal count
        count = max(count, 0)
        write(*args, **options)

    building.write_checkpoint = begun
    for name in ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


def promised(run: Path) -> dict[str, bytes]:
    """Every byte that must not depend on interruptions: the model, the latest checkpoint, metrics, rollouts, updates."""
    latest = sorted(run.glob("checkpoints/step-??????"))[-1]
    places = [latest, run / "model", run / "rollouts", run / "updates"]
    files = [path for place in places for path in place.rglob("*") if path.is_file()] + [run / "metrics.jsonl"]
    files += run.glob("lessons.jsonl")
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(files)}


def differing(one: Path, other: Path) -> list[str]:
    """The files in which two runs differ."""
    a, b = promised(one), promised(other)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def interrupt(kind: str, place: Path, seed: int, saves: int, terms: int) -> dict[str, Any]:
    """A reference run, then the same run killed `saves` times inside a save and `terms` times at random moments, with
    SIGTERM and SIGKILL in turn: how the children ended, and in which files each result differs from the reference."""
    first_table()  # here, or every child would spend its first moments on it
    rng = random.Random(seed)
    whole, broken = place / "whole", place / "broken"
    begun = time.monotonic()
    assert os.waitpid(forked(lambda: train(kind, whole)), 0)[1] == 0
    length = time.monotonic() - begun
    plan: list[str | int] = [rng.randrange(0, 30) for _ in range(saves)] + ["TERM", "KILL"] * (terms // 2)
    rng.shuffle(plan)
    ended: list[str] = []
    compared: list[list[str]] = []
    for how in [*plan, "finish"]:
        resume = (broken / "config.json").is_file()

        def work(how: str | int = how, resume: bool = resume) -> int:
            if isinstance(how, int):
                die_in_save(how)
            return train(kind, broken, resume=resume)

        child = forked(work)
        if how in ("TERM", "KILL"):
            time.sleep(rng.uniform(0.1, 0.7) * length)
            os.kill(child, getattr(signal, f"SIG{how}"))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        unfinished = bool(list(broken.glob("checkpoints/*.tmp-*")))
        ended.append(f"{'save' if isinstance(how, int) else how}:{status}{':unfinished' if unfinished else ''}")
        if (broken / "model").is_dir():
            compared.append(differing(whole, broken))
            shutil.rmtree(broken)  # the next one starts over
    return {"ended": ended, "differing": compared}
