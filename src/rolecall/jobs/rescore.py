"""`rolecall rescore`: another reward for stored answers, as a new run that `rolecall rl --from` trains on."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rolecall.agents.episodes import with_env
from rolecall.config.given import GIVEN, GivenObject
from rolecall.config.parts import HeldOutOptions
from rolecall.config.use import RescoreOptions
from rolecall.errors import UserError
from rolecall.experience.batches import Joined
from rolecall.experience.parquet import StoreError
from rolecall.experience.places import Place, is_address
from rolecall.experience.store import RolloutDetails, Rollouts, write_rollouts
from rolecall.experience.stored import RolloutStore
from rolecall.files import DiskError, write_atomically
from rolecall.jobs.agents import env_source, episode_rows
from rolecall.jobs.arguments import options_of
from rolecall.jobs.data import open_reward, prompt_rows
from rolecall.jobs.notebook import spoken
from rolecall.recipes.collect import as_completion
from rolecall.recipes.records import as_json
from rolecall.rewards.records import Reward, Sample, Scored, trainer_state
from rolecall.tasks.names import is_task
from rolecall.tasks.rows import Rows
from rolecall.tasks.sources import RowsSource
from rolecall.tasks.streams import Stream
from rolecall.train.exit_codes import ExitCode
from rolecall.train.lock import LockedError
from rolecall.train.progress import Progress, Quiet
from rolecall.train.rundir import RunDir, RunDirError, check_new
from rolecall.types import Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """What came out."""

    path: Path
    """The new run."""
    steps: int
    """Files that were written."""
    answers: int
    """Answers, or players' episodes, that were scored."""
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
    rows: RowsSource | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Rescored:
    """Score stored answers again: `rescore("runs/first", reward=my_reward)`, then `rl(from_run=...)`.

    `reward` is a function, a name or a list of them; `rows` the rows that the run answered, if they came from Python.
    """
    options = options_of(RescoreOptions, {**settings, "run": str(run), "rows": rows, "reward": reward})
    return run_from(options, progress=progress)


def run_from(options: RescoreOptions, *, progress: Progress | None = None) -> Rescored:
    progress = progress or (Quiet() if options.quiet else spoken())
    source, out = options.run, _place(options)
    try:
        store = RolloutStore(source)
        check_new(out.parent, out.name)
        with ExitStack() as stack:
            config = _config(source)
            table, task_reward, checked = _rows(options, config)
            reward = open_reward(
                options.reward, task_reward, stack, options, weights=options.reward_weights, rows=table
            )
            _check_rows(store, table, prompts=checked)
            run = stack.enter_context(RunDir(out.parent, out.name))
            names = [str(name) for name in options.reward]
            write_atomically(run.config, json.dumps({**config, "reward": names}, indent=1).encode())
            about = {"command": "rescore", "from": str(source), "reward": names}
            write_atomically(run.run, json.dumps(about, indent=1).encode())
            return _rescore(store, table, reward, run, progress, steps=int(config.get("steps", 0)))
    except (StoreError, RunDirError, LockedError) as error:
        raise UserError(str(error)) from error
    except DiskError as error:
        raise UserError(str(error), exit_code=ExitCode.DISK) from error


def _rescore(
    store: RolloutStore, table: Rows, reward: Reward, run: RunDir, progress: Progress, *, steps: int
) -> Rescored:
    before: list[float] = []
    after: list[float] = []
    answers = 0
    progress.begin(f"rescore into {run.path}", start=0, steps=len(store))
    try:
        for number, (file, old) in enumerate(zip(store.files, store, strict=True), start=1):
            scored = _scored(old, table, reward, steps)
            _write(run.rollouts / file.name, old, scored)
            firsts = [rows[0] for rows in Joined(old.trajectories).rows]  # an episode counts once
            before += [total for row in firsts if (total := old.details[row].total) is not None]
            totals = [total for row in firsts if (total := scored[row].total) is not None]
            after += totals
            answers += len(firsts)
            numbers = {"reward": _mean(totals) or 0.0, "rewards/failed": 1 - len(totals) / len(firsts)}
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


def _scored(old: Rollouts, table: Rows, reward: Reward, steps: int) -> list[Scored]:
    """What the reward says of every row; the samples of an episode are one answer, to which its environment's reward is
    added, and one that was broken off stays without a score."""
    numbers: dict[int, int] = defaultdict(lambda: len(numbers))
    answers = [rows for rows in Joined(old.trajectories).rows if not _broken_off(old, rows[0])]
    samples = [_sample(old, rows, table, numbers[old.trajectories[rows[0]].group]) for rows in answers]
    told = reward.score(samples, state=trainer_state(step=old.step, steps=steps))
    found = {
        row: s if old.details[row].messages is None else with_env(old.trajectories[row].scores.get("env"), s)
        for rows, s in zip(answers, told, strict=True)
        for row in rows
    }
    nothing = {"env": None, **dict.fromkeys(reward.names)}
    return [
        found.get(row) or Scored(scores=nothing, total=None, failure=details.reward_failure or "it was broken off")
        for row, details in enumerate(old.details)
    ]


def _broken_off(old: Rollouts, row: int) -> bool:
    return old.details[row].messages is not None and old.trajectories[row].finish is Finish.ABORT


def _sample(old: Rollouts, rows: Sequence[int], table: Rows, number: int) -> Sample:
    """An answer, or the messages after an episode's prompt, as they were scored in the run."""
    trajectories, details = [old.trajectories[row] for row in rows], old.details[rows[0]]
    row, said = table[details.prompt or 0], details.messages
    if said is None:
        prompt, completion = row["prompt"], as_completion(row["prompt"], details.answer_text)
        ids: Sequence[int] = trajectories[0].ids[trajectories[0].turns[0][0] if trajectories[0].turns else 0 :]
    else:
        start = next(i for i, message in enumerate(said) if message["role"] == "assistant")
        prompt, completion = said[:start], said[start:]
        ids = [i for t in trajectories for first, last in t.turns for i in t.ids[first:last]]
    return Sample(
        prompt=prompt,
        completion=completion,
        completion_ids=ids,
        row=row,
        prompt_index=number,
        sample_index=details.sample or 0,
    )


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


def _rows(options: RescoreOptions, config: Mapping[str, Any]) -> tuple[Rows, str | None, bool]:
    """The rows in the order that the run numbered them, the task's own reward, and whether their prompts are what was
    asked: an environment of the user's own may ask anything."""
    source: Any = options.rows or config.get("rows")
    env = env_source(config.get("env"), source)
    if source is None and env is None:
        raise UserError(f"{options.run} does not say which rows it answered; give them with --rows")
    if isinstance(source, str) and source.startswith(GIVEN) and not isinstance(source, GivenObject):
        raise UserError(f"the rows of {options.run} came from Python; give them with --rows, or call rolecall.rescore")
    evaluation, seed = _evaluation(config), int(config.get("seed") or 0)
    if env is not None:
        train, _ = episode_rows(env, source, evaluation, seed=seed)
        return train, None, isinstance(env, str) and is_task(env)
    found = prompt_rows(source, evaluation, seed=seed)
    return found.train, found.reward, True


def _evaluation(config: Mapping[str, Any]) -> HeldOutOptions:
    """How the run held rows out; those of `eval.data` were never among the ones it answered."""
    found = HeldOutOptions(**config.get("eval", {}))
    return found if found.data is None else HeldOutOptions()


def _check_rows(store: RolloutStore, table: Rows, *, prompts: bool) -> None:
    """Refuse rows that are not those the answers answer, and episodes of which only tokens are there."""
    for file, old in zip(store.files, store, strict=True):
        for number, details in enumerate(old.details):
            where = f"{file}, row {number}"
            if details.prompt is None:
                raise UserError(f"{where} does not say which row it answers, so it cannot be scored")
            if not isinstance(table, Stream) and details.prompt >= len(table):
                raise UserError(
                    f"{where} answers row {details.prompt}, but there are {len(table)}; give the run's own rows with --rows"
                )
            if details.messages is None and old.trajectories[number].authors is not None:
                raise UserError(
                    f"{where} is of an episode whose messages were not kept yet when it was written, so it cannot be scored"
                )
            if not prompts:
                continue
            prompt = table[details.prompt]["prompt"]
            text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
            if text.strip() not in details.prompt_text:
                raise UserError(
                    f"{where} answers {details.prompt_text!r}, but row {details.prompt} asks {text!r}; give the run's own "
                    "rows with --rows"
                )


def _config(source: str) -> dict[str, Any]:
    """What the run's config.json says, at an address too; nothing if there is none."""
    try:
        if is_address(source):
            place = Place(source)
            return dict(json.loads(place.read("config.json"))) if "config.json" in place.names() else {}
        return dict(json.loads((Path(source).expanduser() / "config.json").read_text()))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        if isinstance(error, StoreError):
            raise
        raise UserError(f"{source}/config.json cannot be read; bring back a copy") from None


def _place(options: RescoreOptions) -> Path:
    if options.out is not None:
        return Path(options.out).expanduser()
    source, number = Path(options.run).expanduser(), 1
    if is_address(options.run):
        source = Path("runs") / source.name
    source = source if source.name else source.resolve()
    while (source.parent / f"{source.name}-rescored-{number}").exists():
        number += 1
    return source.parent / f"{source.name}-rescored-{number}"


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
