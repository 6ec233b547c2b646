"""Runs to look at: a real one of a few steps, and records written by hand where text or length must be special."""

import json
import shutil
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import torch

import rolecall
from rolecall.experience.batches import collate
from rolecall.experience.store import RolloutDetails, write_rollouts
from rolecall.experience.updates import MiniBatch, write_updates
from rolecall.maths.roles import Role, TrainRule
from rolecall.types import Finish, Trajectory

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">",
    "</script><script>document.title='owned'</script>",
    "<!--<script>",
    "\u202egnp.exe",
    "\x1b[31mred\x1b[0m",
    "\x00",
    "[click](javascript:alert(1))",
    "<svg onload=\"document.title='owned'\">",
    "a\u2028b",
)


def real_run(place: Path, **more: object) -> Path:
    """Three steps of PPO with two epochs of two mini-batches, a critic, a reference and evaluations."""
    settings = {
        "preset": "ppo",
        "model": "tiny",
        "rows": "sorting",
        "steps": 3,
        "prompts": 4,
        "samples": 4,
        "algorithm": {"kl_coef": 0.1, "critic": "shared", "epochs": 2, "minibatches": 2, "entropy_coef": 0.01},
        "optim": {"lr": 1e-2, "critic_lr": 1e-2},
        "sampling": {"max_new_tokens": 6},
        "eval": {"every": 3, "rows": 8},
        "out": str(place),
        "quiet": True,
        **more,
    }
    return rolecall.rl(**settings).path


def copied(run: Path, place: Path) -> Path:
    """A run without its weights, to change."""
    shutil.copytree(run, place, ignore=shutil.ignore_patterns("model", "checkpoints", "report.html"))
    return place


def record(
    run: Path, trajectories: list[Trajectory], details: list[RolloutDetails], *, step: int = 3, loss: float = 0.5
) -> None:
    """Put these into the run in place of the step's record, with an update that trains all they chose."""
    batch = collate(trajectories)
    verdicts = TrainRule().verdicts(batch.roles)
    trained = verdicts == 1
    shape = batch.ids.shape
    advantages = torch.where(trained, torch.linspace(-1, 1, shape[1]).expand(shape), nan)
    scores = torch.tensor([sum(v for v in t.scores.values() if v is not None) for t in trajectories])
    batch = replace(batch, verdicts=verdicts, advantages=advantages, scores=scores)
    for folder in ("rollouts", "updates"):
        for path in (run / folder).iterdir():
            path.unlink()
    name = f"step-{step:06d}.parquet"
    write_rollouts(run / "rollouts" / name, trajectories, batch, step=step, details=details, model="", tokenizer="")
    share = torch.where(trained, loss / trained.sum(), 0).double()
    minibatch = MiniBatch(
        step=step,
        epoch=0,
        minibatch=0,
        rollout_steps=[step] * len(trajectories),
        trajectories=range(len(trajectories)),
        lengths=[len(t.ids) for t in trajectories],
        verdicts=verdicts,
        contributions={"policy": share},
        logprobs=torch.where(trained, -0.5, nan),
        ratio=torch.where(trained, 1.25, nan),
    )
    write_updates(run / "updates" / name, [minibatch])
    relog(run, step, loss=str(loss) if isnan(loss) else loss)


def relog(run: Path, step: int, **numbers: float) -> None:
    """Change numbers of a step's line in the metrics."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == step and "loss" in line:
            line.update(numbers)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def details_of(pieces: list[bytes], *, prompt: str = "a prompt") -> RolloutDetails:
    return RolloutDetails(
        prompt_text=prompt,
        answer_text=b"".join(pieces).decode("utf-8", "replace"),
        seed=0,
        sampling=None,
        sample=0,
        pieces=tuple(pieces),
    )


def hostile_run(run: Path) -> Path:
    """All that would act on a page, in the prompt, the answer, the reward's failure, the settings and the metrics."""
    pieces = [b"p", *(text.encode() for text in HOSTILE), b"<|end|>"]
    n = len(pieces)
    trajectory = Trajectory(
        ids=tuple(range(n)),
        roles=(Role.PROMPT, *(Role.CONTENT,) * (n - 2), Role.STOP),
        behaviour_logprobs=(nan, *(-1.0,) * (n - 1)),
        scores={HOSTILE[0]: 1.0},
        agent=HOSTILE[0],
        author=HOSTILE[1],
    )
    details = replace(details_of(pieces, prompt="".join(HOSTILE)), reward_failure=HOSTILE[1])
    record(run, [trajectory], [details])
    config = json.loads((run / "config.json").read_text())
    config["model"] = HOSTILE[1]
    config[HOSTILE[0]] = HOSTILE[3] + "\ud800"
    (run / "config.json").write_text(json.dumps(config))
    relog(run, 3, **{HOSTILE[0]: 1.0, f"rewards/{HOSTILE[1]}/mean": 0.5})
    return run


def long_run(run: Path, tokens: int) -> Path:
    """One answer of so many tokens, some of them new lines."""
    pieces = [b"\n" if i % 60 == 59 else b" word" for i in range(tokens)]
    trajectory = Trajectory(
        ids=tuple(range(tokens)),
        roles=(Role.PROMPT,) * 10 + (Role.CONTENT,) * (tokens - 10),
        behaviour_logprobs=(nan,) * 10 + (-1.0,) * (tokens - 10),
        scores={"task": 1.0},
        finish=Finish.LENGTH,
    )
    record(run, [trajectory], [details_of(pieces)])
    return run


def talk_run(run: Path) -> Path:
    """An episode of two turns with an observation between them, and Chinese and an emoji split over tokens."""
    said, face = "中文".encode(), "😀".encode()
    end = b"<|end|>"
    pieces = [b"ask", said[:1], said[1:2], said[2:5], said[5:], end, b"tool: 42", face[:2], face[2:], end]
    roles = (1, 2, 2, 2, 2, 3, 4, 2, 2, 3)
    trajectory = Trajectory(
        ids=tuple(range(10)),
        roles=roles,
        behaviour_logprobs=tuple(-1.0 if role in (2, 3) else nan for role in roles),
        turns=((1, 6), (7, 10)),
        scores={"task": 1.0},
    )
    record(run, [trajectory], [details_of(pieces)])
    return run


def demo_of(run: Path, place: Path) -> Path:
    """A demo's directory whose runs are copies of one."""
    names = ["sft", "reward-model", "ppo", "grpo"]
    for name in names:
        copied(run, place / name)
    stages = [
        {"name": name, "learns_from": HOSTILE[0], "seconds": 3.0, "numbers": {"accuracy": 0.5, "avg@4": 0.25}}
        for name in ("sft", "ppo", "grpo")
    ]
    answers = [{"prompt": "sort 21=", "answers": ["21", "12", HOSTILE[1]], "gold": "12"}]
    about = {"format": 1, "task": "sorting", "rows": 4, "runs": names, "stages": stages, "answers": answers}
    (place / "demo.json").write_text(json.dumps(about))
    return place
