"""`rolecall rescore`: another reward for stored answers, as a new run that `rolecall rl --from` trains on."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rolecall.config.merge import make
from rolecall.config.parts import HeldOutOptions
from rolecall.config.rescore import RescoreOptions
from rolecall.errors import UserError
from rolecall.experience.parquet import StoreError
from rolecall.experience.store import RolloutDetails, Rollouts, write_rollouts
from rolecall.experience.stored import RolloutStore
from rolecall.files import DiskError, write_atomically
from rolecall.jobs.data import label, open_reward, prompt_rows
from rolecall.recipes.records import as_json
from rolecall.recipes.sampling import as_completion
from rolecall.rewards.records import Reward, Sample, Scored
from rolecall.tasks.rows import Rows
from rolecall.train.exit_codes import ExitCode
from rolecall.train.lock import LockedError
from rolecall.train.progress import Lines, Progress, Quiet
from rolecall.train.rundir import RunDir, RunDirError, check_new


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """What came out."""

    path: Path
    """The new run."""
    steps: int
    """Files that were written."""
    answers: int
    """Answers that were scored."""
    failed: int
    """How many of them have no score now."""
    before: float | None
    """Their mean score in the old run, over those that had one."""
    after: float | None
    """Their mean score now, likewise."""


def rescore(
    run: str | Path,
    *,
    reward: Any = None,
    rows: str | Sequence[Mapping[str, Any]] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Rescored:
    """Score stored answers anew: `rescore("runs/first", reward=my_reward)`, then `rl(from_run=...)`.

    `reward` is a function, a name or a list of them; `rows` the rows that the run answered, if they came from Python.
    """
    rewards = [] if reward is None else list(reward) if isinstance(reward, list | tuple) else [reward]
    given = {**settings, "run": str(run)}
    if isinstance(rows, str):
        given["rows"] = rows
    if rewards and all(isinstance(source, str) for source in rewards):
        given["reward"] = tuple(rewards)
    named = rows is None or isinstance(rows, str)
    return run_from(
        make(RescoreOptions, given), rows=None if named else rows, rewards=rewards or None, progress=progress
    )


def run_from(
    options: RescoreOptions,
    *,
    rows: Any = None,
    rewards: Sequence[Any] | None = None,
    progress: Progress | None = None,
) -> Rescored:
    """Run from options; rows and rewards that are objects take the place of the named ones."""
    progress = progress or (Quiet() if options.quiet else Lines())
    source, out = Path(options.run).expanduser(), _place(options)
    try:
        store = RolloutStore(source)
        check_new(out.parent, out.name)
        with ExitStack() as stack:
            config = _config(source)
            table, task_reward = _rows(options, rows, config)
            reward = open_reward(
                rewards or options.reward,
                task_reward,
                stack,
                weights=options.reward_weights,
                deadline_s=options.reward_deadline,
                columns=table.columns,
            )
            _check_rows(store, table)
            run = stack.enter_context(RunDir(out.parent, out.name))
            names = [r if isinstance(r, str) else label([r]) for r in rewards or options.reward]
            write_atomically(run.config, json.dumps({**config, "reward": names}, indent=1).encode())
            about = {"command": "rescore", "from": str(source), "reward": names}
            write_atomically(run.run, json.dumps(about, indent=1).encode())
            return _rescore(store, table, reward, run, progress)
    except (StoreError, RunDirError, LockedError) as error:
        raise UserError(str(error)) from error
    except DiskError as error:
        raise UserError(str(error), exit_code=ExitCode.DISK) from error


def _rescore(store: RolloutStore, table: Rows, reward: Reward, run: RunDir, progress: Progress) -> Rescored:
    before: list[float] = []
    after: list[float] = []
    answers = 0
    progress.begin(f"rescore into {run.path}", start=0, steps=len(store))
    try:
        for number, (path, old) in enumerate(zip(store.files, store, strict=True), start=1):
            scored = reward.score(_samples(old, table), state={"global_step": old.step})
            _write(run.rollouts / path.name, old, scored)
            before += [d.total for d in old.details if d.total is not None]
            totals = [s.total for s in scored if s.total is not None]
            after += totals
            answers += len(scored)
            numbers = {"reward": _mean(totals) or 0.0, "rewards/failed": 1 - len(totals) / len(scored)}
            run.metrics.append({"step": old.step, **numbers})
            progress.step(number, numbers, f"reward {numbers['reward']:.3f}")
    finally:
        progress.end()
    return Rescored(
        path=run.path,
        steps=len(store),
        answers=answers,
        failed=answers - len(after),
        before=_mean(before),
        after=_mean(after),
    )


def _samples(old: Rollouts, table: Rows) -> list[Sample]:
    numbers: dict[int, int] = {}
    samples = []
    for trajectory, details in zip(old.trajectories, old.details, strict=True):
        row = table[details.prompt or 0]
        start = trajectory.turns[0][0] if trajectory.turns else 0
        samples.append(
            Sample(
                prompt=row["prompt"],
                completion=as_completion(row["prompt"], details.answer_text),
                completion_ids=trajectory.ids[start:],
                row=row,
                prompt_index=numbers.setdefault(trajectory.group, len(numbers)),
                sample_index=details.sample or 0,
            )
        )
    return samples


def _write(path: Path, old: Rollouts, scored: Sequence[Scored]) -> None:
    """The same behaviour with other scores; what was computed from the old ones is gone."""
    trajectories = [
        dataclasses.replace(t, scores=dict(s.scores)) for t, s in zip(old.trajectories, scored, strict=True)
    ]
    totals = [float("nan") if s.total is None else s.total for s in scored]
    batch = dataclasses.replace(
        old.batch,
        scores=torch.tensor(totals, dtype=torch.float64),
        verdicts=None,
        values=None,
        rewards=None,
        advantages=None,
        returns=None,
        weights=None,
    )
    details: list[RolloutDetails] = [
        dataclasses.replace(d, total=s.total, reward_failure=s.failure, extras=as_json(s.extras))
        for d, s in zip(old.details, scored, strict=True)
    ]
    write_rollouts(path, trajectories, batch, step=old.step, details=details, model=old.model, tokenizer=old.tokenizer)


def _rows(options: RescoreOptions, rows: Any, config: Mapping[str, Any]) -> tuple[Rows, str | None]:
    """The rows in the order that the run numbered them, and the task's own reward."""
    source = rows if rows is not None else options.rows or config.get("rows")
    if source is None:
        raise UserError(f"{options.run} does not say which rows it answered; give them with --rows")
    if isinstance(source, str) and source.startswith("(given in Python)"):
        raise UserError(f"the rows of {options.run} came from Python; give them with --rows, or call rolecall.rescore")
    evaluation = HeldOutOptions(**config.get("eval", {}))
    train, _, task_reward = prompt_rows(source, evaluation, seed=int(config.get("seed") or 0))
    return train, task_reward


def _check_rows(store: RolloutStore, table: Rows) -> None:
    """Refuse rows that are not those the answers answer."""
    for path, old in zip(store.files, store, strict=True):
        for number, details in enumerate(old.details):
            where = f"{path}, row {number}"
            if details.prompt is None:
                raise UserError(f"{where} does not say which row it answers, so it cannot be scored")
            if details.prompt >= len(table):
                raise UserError(
                    f"{where} answers row {details.prompt}, but there are {len(table)}; give the run's own rows with --rows"
                )
            prompt = table[details.prompt]["prompt"]
            text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
            if text.strip() not in details.prompt_text:
                raise UserError(
                    f"{where} answers {details.prompt_text!r}, but row {details.prompt} asks {text!r}; give the run's own "
                    "rows with --rows"
                )


def _config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise UserError(f"{path} cannot be read; bring back a copy") from None


def _place(options: RescoreOptions) -> Path:
    if options.out is not None:
        return Path(options.out).expanduser()
    source, number = Path(options.run).expanduser(), 1
    source = source if source.name else source.resolve()
    while (source.parent / f"{source.name}-rescored-{number}").exists():
        number += 1
    return source.parent / f"{source.name}-rescored-{number}"


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
