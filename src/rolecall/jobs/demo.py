"""`rolecall demo`: the whole pipeline on the built-in model and task.

The demonstrations are of mixed quality: half of them sort the wrong way round, so the SFT model knows how to sort but not
which way. A reward model learns from preferences between right answers and the SFT model's own wrong ones; PPO learns
from that reward model, GRPO from the exact verifier, both from the same start. All four are ordinary runs; nothing here can do what the other commands cannot.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.errors import UserError
from rolecall.files import write_atomically
from rolecall.jobs.eval import eval as evaluate
from rolecall.jobs.generate import generate
from rolecall.jobs.notebook import spoken
from rolecall.jobs.report import report_at_the_end
from rolecall.jobs.rl import rl
from rolecall.jobs.rm import rm
from rolecall.jobs.running import Run, next_free
from rolecall.jobs.sft import sft
from rolecall.look.run import FORMAT
from rolecall.recipes.evaluate import Evaluation
from rolecall.tasks.builtin import demonstrations
from rolecall.tasks.names import find_task
from rolecall.train.exit_codes import ExitCode
from rolecall.train.progress import Progress, Quiet

TASK = "sorting"
_FULL = {"sft": 150, "rm": 60, "ppo": 30, "ppo_prompts": 256, "grpo": 40, "rows": 400}
_QUICK = {"sft": 100, "rm": 20, "ppo": 10, "ppo_prompts": 64, "grpo": 15, "rows": 100}
"""Steps of each run, PPO's prompts per step, and held-out problems that every model is asked."""
_DEMONSTRATIONS = 4000
_ASKED = 1000
"""Problems whose wrong answers become preference pairs."""
_SAMPLING = {"max_new_tokens": 8}
_SHOWN = 8
"""Problems that the start got wrong, for the report."""
LEARNS_FROM = {"sft": "imitation", "ppo": "reward model", "grpo": "exact verifier"}
"""What each policy of the demo learns from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A model of the demo and how it does on held-out rows."""

    name: str
    path: Path
    seconds: float
    evaluation: Evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """What the demo made."""

    path: Path
    start: Stage
    """After SFT: where PPO and GRPO begin."""
    reward_model: Run
    ppo: Stage
    grpo: Stage
    seconds: float

    @property
    def report(self) -> Path:
        """The page to look at it."""
        return self.path / "report.html"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The three policies."""
        return (self.start, self.ppo, self.grpo)


def demo(
    *, out: str | None = None, quick: bool = False, seed: int = 0, quiet: bool = False, progress: Progress | None = None
) -> Demo:
    """Run the demo: `demo().grpo.evaluation.numbers["accuracy"]`."""
    begun = time.monotonic()
    size = _QUICK if quick else _FULL
    if progress is None:
        progress = Quiet() if quiet else spoken()
    place = _place(out)
    common: dict[str, Any] = {"seed": seed, "progress": progress, "save": {"every": 0}}

    def stage(name: str, job: Callable[..., Run], **settings: Any) -> Stage:
        """Train, and look how good the model is."""
        since = time.monotonic()
        run = job(steps=size[name], out=str(place / name), **settings, **common)
        if run.outcome.exit_code != ExitCode.DONE:
            raise UserError(f"the demo's {name} run ended early: {run.outcome.reason}", exit_code=run.outcome.exit_code)
        found = evaluate(model=str(run.path), rows=TASK, n=size["rows"], samples=4, sampling=_SAMPLING, seed=seed)
        return Stage(name=name, path=run.path, seconds=time.monotonic() - since, evaluation=found)

    start = stage("sft", sft, model="tiny", rows=mixed_demonstrations(), **_batches(lr=2e-3, warmup_steps=20))
    judge = rm(
        model=str(start.path),
        rows=mistakes(str(start.path), seed=seed),
        steps=size["rm"],
        eval={"every": 1000, "rows": size["rows"], "held_out": 0.1},
        out=str(place / "reward-model"),
        **_batches(lr=1e-3, warmup_steps=10),
        **common,
    )
    from_start: dict[str, Any] = {"model": str(start.path), "rows": TASK, "sampling": _SAMPLING}
    ppo = stage(
        "ppo",
        rl,
        preset="ppo",
        reward=str(judge.path),
        prompts=size["ppo_prompts"],
        # The reward model knows which way is preferred but little about digits: without the KL, PPO exploits that.
        algorithm={"kl_coef": 0.5, "critic": "separate", "critic_from": str(judge.path)},
        optim={"lr": 1e-4, "critic_lr": 1e-3, "warmup_steps": 5},
        **from_start,
    )
    optim = {"lr": 2e-4, "warmup_steps": 5}
    grpo = stage("grpo", rl, preset="grpo", prompts=32, samples=8, optim=optim, **from_start)
    made = Demo(path=place, start=start, reward_model=judge, ppo=ppo, grpo=grpo, seconds=time.monotonic() - begun)
    write_atomically(place / "demo.json", json.dumps(_about(made), indent=1).encode())
    report_at_the_end(place)
    return made


def _batches(*, lr: float, warmup_steps: int) -> dict[str, Any]:
    return {"batch": 64, "optim": {"lr": lr, "warmup_steps": warmup_steps, "schedule": "cosine"}}


def _about(made: Demo) -> dict[str, Any]:
    """demo.json: what the runs' own files do not say."""
    start = made.start.evaluation
    wrong = [i for i, score in enumerate(start.scores) if not score][:_SHOWN]
    rows = {row["prompt"]: row for row in find_task(TASK).rows("test", n=len(start.answers))}
    return {
        "format": FORMAT,
        "task": TASK,
        "rows": len(start.answers),
        "runs": ["sft", "reward-model", "ppo", "grpo"],
        "stages": [
            {
                "name": stage.name,
                "learns_from": LEARNS_FROM[stage.name],
                "seconds": stage.seconds,
                "numbers": stage.evaluation.numbers,
            }
            for stage in made.stages
        ],
        "answers": [
            {
                "prompt": start.prompts[i],
                "answers": [stage.evaluation.answers[i] for stage in made.stages],
                "gold": find_task(TASK).gold(rows[start.prompts[i]]) if start.prompts[i] in rows else "",
            }
            for i in wrong
        ],
    }


def mixed_demonstrations() -> list[dict[str, Any]]:
    """Demonstrations, every second one the wrong way round."""
    rows = demonstrations(find_task(TASK), "train", n=_DEMONSTRATIONS)
    return [row if i % 2 else row | {"completion": row["completion"][::-1]} for i, row in enumerate(rows)]


def mistakes(model: str, *, seed: int) -> list[dict[str, Any]]:
    """Preference pairs from a model's own samples: the right answer against each different wrong one."""
    task = find_task(TASK)
    rows = list(task.rows("train", n=_ASKED, seed=seed + 1))
    answers = generate(
        model=model,
        prompts=[row["prompt"] for row in rows],
        n=4,
        chat=False,
        sampling=_SAMPLING,
        seed=seed,
    )
    wrong = {(a.group, a.text) for a in answers if not task.score(a.text, rows[a.group])}
    return [
        {"prompt": rows[group]["prompt"], "chosen": task.gold(rows[group]), "rejected": text}
        for group, text in sorted(wrong)
        if text
    ]


def _place(out: str | None) -> Path:
    if out is not None:
        path = Path(out).expanduser()
        if (path / "run.json").exists():
            raise UserError(f"{out} is a run; the demo makes four runs inside a directory of its own: choose another")
        if path.exists() and not path.is_dir():
            raise UserError(f"{out} is a file; the demo makes four runs inside a directory: choose another")
        for name in ("sft", "reward-model", "ppo", "grpo"):
            if (path / name).exists():
                raise UserError(f"{path / name} is there already; choose another directory for the demo's four runs")
        return path
    return next_free("demo")
