"""Multi-agent runs that are killed and resumed, in forked children."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from resume_driver import differing, forked

from rolecall.config.marl import MARLOptions
from rolecall.config.merge import resolve
from rolecall.jobs.running import run

STEPS = 8
COMMON = {
    "env": "lbf:5x5-2p-1f",
    "steps": STEPS,
    "episodes": 4,
    "agent.hidden": 8,
    "eval.every": 3,
    "eval.episodes": 2,
    "save.every": 1,
    "record.every": 2,
    "quiet": True,
    "optim.schedule": "linear",
}
KINDS: dict[str, dict[str, Any]] = {
    # A buffer that wraps, draws by priority, an epsilon that is still falling, a target that was copied in between.
    "qmix": {
        "q.buffer": 10, "q.batch": 4, "q.updates": 2, "q.alpha": 0.6, "q.epsilon_steps": 900, "q.tau": None,
        "q.target_every": 3, "agent.recurrent": True,
    },
    "mappo": {"ppo.minibatches": 2, "agent.share": False, "ppo.entropy_coef": 0.02, "ppo.entropy_end": 0.0},
}  # fmt: skip


def options(algo: str, out: Path, **more: Any) -> MARLOptions:
    return resolve(MARLOptions, [("test", {**COMMON, **KINDS[algo], "algo": algo, "out": str(out), **more})]).options


def train(algo: str, out: Path, **more: Any) -> int:
    """One run in this process; its exit code."""
    return int(run(options(algo, out, **more)).outcome.exit_code)


def interrupt(algo: str, place: Path, seed: int, kills: int) -> dict[str, Any]:
    """Kill a run with SIGKILL, each time a little after another checkpoint is there, then let it finish: how the children
    ended, and in which files the result differs from a run that was left alone."""
    rng = random.Random(seed)
    whole, broken = place / "whole", place / "broken"
    assert os.waitstatus_to_exitcode(os.waitpid(forked(lambda: train(algo, whole)), 0)[1]) == 0
    ended = []
    for step in sorted(rng.sample(range(1, STEPS), kills)):
        resume = (broken / "config.json").is_file()
        child = forked(lambda resume=resume: train(algo, broken, resume=resume))
        end = time.monotonic() + 120
        while not list(broken.glob(f"checkpoints/step-{step:06d}")) and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    last = os.waitstatus_to_exitcode(os.waitpid(forked(lambda: train(algo, broken, resume=True)), 0)[1])
    return {"ended": ended, "last": last, "differing": differing(whole, broken)}
