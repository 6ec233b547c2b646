"""The rollouts of a run, token by token: which trajectories to show, and all that is known of each position."""

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rolecall.config.sampling import Finish
from rolecall.errors import UserError
from rolecall.experience.parquet import Ragged, StoreError, read_table
from rolecall.experience.rollout_schema import ROLLOUTS, UPDATES
from rolecall.look.charts import is_number
from rolecall.look.losses import PREFIX, check_loss, loss_note, loss_terms, row_sums
from rolecall.look.page import Data, text
from rolecall.look.run import RunFiles
from rolecall.look.tokens import KEPT, Pass, Sample, SampleSet, Span, runs_of, token_view, words
from rolecall.maths.codes import Role, Verdict

BUDGET = 20_000
"""Positions that a step may put into a page; beyond it, only chosen trajectories are shown, without their group."""

_MARKS = re.compile(r"<\|[^|<>]*\|>(?:system|user|assistant|tool)?")
_COLUMNS = {
    "behaviour_logprobs": "behaviour_logprob",
    "old_logprobs": "old_logprob",
    "ref_logprobs": "ref_logprob",
    "values": "value",
    "rewards": "reward",
    "returns": "return",
    "advantages": "advantage",
    "weights": "weight",
}
"""The columns of a rollouts file, and what the view calls them."""
_UPDATE_COLUMNS = {"logprobs": "logprob", "ratio": "ratio", "weights": "weight"}


def rollouts_view(run: RunFiles, *, name: str, shown_steps: int) -> tuple[str, list[Data]]:
    """The token view of a run's rollouts, or a sentence why there is none."""
    steps = _steps_to_show(run, shown_steps)
    if not steps:
        if run.command in ("sft", "rm"):
            return f'<p class="note">A run of {text(run.command)} samples nothing, so it records no rollouts.</p>', []
        why = "<code>save.rollouts</code> says how many steps stay, and every 50th stays in any case"
        return f'<p class="note">This run has no rollouts in its directory: {why}.</p>', []
    unit = unit_of(run)
    view, drawn_from = token_view(name, [sample_set(run, step, unit=unit) for step in steps], unit=unit)
    about = {
        "token": "Every token of some answers, coloured by a number of your choice.",
        "step": "Every step of some agents' episodes, by the action taken, coloured by a number of your choice.",
    }[unit]
    solid = f"A solid line below a {unit} says that it trains."
    return f'<p class="note">{about} {solid}</p>{view}', [drawn_from]


def kl_kind_of(options: Mapping[str, Any]) -> str:
    """The estimate that the run used."""
    kind = str(options.get("kl_kind", "k1"))
    return kind if kind != "auto" else "k3" if options.get("kl_in") == "loss" else "k1"


def unit_of(run: RunFiles) -> str:
    """What a position is called."""
    return "step" if run.command == "marl" else "token"


def sample_set(run: RunFiles, step: int, *, unit: str, rows: Sequence[int] | None = None) -> SampleSet:
    """The answers of a step that are worth a look, or those in these rows; and others of their groups."""
    algorithm = run.config.get("algorithm")
    options: Mapping[str, Any] = algorithm if isinstance(algorithm, dict) else {}
    clip = None
    if options.get("name") in ("grpo", "ppo") and is_number(options.get("clip_low")):
        clip = (1 - float(options["clip_low"]), 1 + float(options["clip_high"]))
    record = read_step(step, run.rollouts[step], run.updates.get(step))
    wanted = None if rows is None else {row: [f"answer {row}"] for row in rows}
    chosen, left = samples(record, clip=clip, kl_kind=kl_kind_of(options), unit=unit, chosen=wanted)
    notes = []
    if record.updates is not None:
        logged = next((line.get("loss") for line in run.steps if line["step"] == step), None)
        notes.append(loss_note(check_loss(record.updates, step=step, logged=logged), run.about))
    elif unit == "token":
        why = "<code>save.updates</code> says how many steps stay"
        notes.append(
            f"What the optimiser did in step {step} is not kept, so there are no ratios and contributions; {why}."
        )
    if left:
        notes.append(f"{left} more of these groups are left out to keep the page small.")
    if unit == "token" and any(sample.pieces is None for sample in chosen):
        notes.append("This record does not say what tokens write, so boxes show ids.")
    html = "".join(note if note.startswith("<") else f'<p class="note">{note}</p>' for note in notes)
    return SampleSet(label=f"step {step}", samples=chosen, note=html, clip=clip)


def _steps_to_show(run: RunFiles, most: int) -> list[int]:
    """The last step with all its records, then the first."""
    full = [step for step in run.rollouts if step in run.updates]
    last = full[-1:] or list(run.rollouts)[-1:]
    first = [step for step in list(run.rollouts)[:1] if step not in last]
    return [*last, *first][:most]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The files of one step."""

    step: int
    rollouts: pa.Table
    updates: pa.Table | None
    """None if the file is not kept."""


def read_step(step: int, rollouts: Path, updates: Path | None) -> StepRecord:
    """Read them; a file that cannot be read is a `UserError`."""
    try:
        return StepRecord(
            step=step,
            rollouts=read_table(rollouts, ROLLOUTS)[0],
            updates=None if updates is None else read_table(updates, UPDATES)[0],
        )
    except StoreError as error:
        raise UserError(str(error)) from error


def choose(record: StepRecord, *, clip: tuple[float, float] | None) -> dict[int, list[str]]:
    """Rows worth a look, and why: the best, the worst, the longest, one cut off, the most clipped, one at random."""
    table = record.rollouts
    score = np.array([np.nan if s is None else s for s in table["score"].to_pylist()], np.float64)
    pull = _pull(record)
    chosen: dict[int, list[str]] = {}

    def take(label: str, rows: Iterable[int], key: Any) -> None:
        found = list(rows)
        if found:
            chosen.setdefault(max(found, key=key), []).append(label)

    known = np.flatnonzero(~np.isnan(score)).tolist()
    limited = [i for i, finish in enumerate(table["finish"].to_pylist()) if cut_off(finish)]
    lengths = _answer_lengths(table)
    take("best", known, lambda i: (score[i], pull[i], -i))
    take("worst", known, lambda i: (-score[i], pull[i], -i))
    take("longest", range(len(table)), lambda i: (lengths[i], -i))
    take("truncated", limited, lambda i: (pull[i], lengths[i], -i))
    clipped = _clipped_counts(record, clip)
    take("most clipped", np.flatnonzero(clipped).tolist(), lambda i: (clipped[i], -i))
    take("pulls hardest", np.flatnonzero(pull > 0).tolist(), lambda i: (pull[i], -i))
    take("reward failed", [i for i, why in enumerate(table["reward_failure"].to_pylist()) if why], lambda i: -i)
    by_chance = random.Random(record.step).randrange(len(table))
    take("random", [by_chance], lambda i: i)
    return chosen


def samples(
    record: StepRecord,
    *,
    clip: tuple[float, float] | None,
    kl_kind: str,
    unit: str,
    chosen: Mapping[int, list[str]] | None = None,
) -> tuple[list[Sample], int]:
    """The chosen trajectories, then as many others of their groups as there is room for; and how many had none."""
    table, chosen = record.rollouts, choose(record, clip=clip) if chosen is None else chosen
    lengths = np.minimum(Ragged.read(table["ids"]).lengths, 2 * KEPT)
    # The agents of an episode belong side by side, as the answers to a prompt do.
    groups = table["episode" if unit == "step" else "group"].to_pylist()
    wanted = [groups[row] for row in chosen]
    others = [row for row in range(len(table)) if groups[row] in wanted and row not in chosen]
    others.sort(key=lambda row: wanted.index(groups[row]))
    room = BUDGET - int(sum(lengths[row] for row in chosen))
    kept: list[int] = []
    for row in others:
        if lengths[row] <= room:
            kept.append(row)
            room -= int(lengths[row])
    passes = _passes(record, {*chosen, *kept})
    rows = [*chosen, *sorted(kept)]
    several = len(set(table["agent"].to_pylist())) > 1
    held = table.take(rows).to_pylist()
    made = [
        replace(
            _sample(row, chosen.get(i, []), passes.get(i, []), kl_kind=kl_kind, several=several, unit=unit), place=i
        )
        for i, row in zip(rows, held, strict=True)
    ]
    return made, len(others) - len(kept)


def _sample(
    row: Mapping[str, Any], labels: Sequence[str], passes: Sequence[Pass], *, kl_kind: str, several: bool, unit: str
) -> Sample:
    numbers = {name: row[column] for column, name in _COLUMNS.items() if row[column] is not None}
    now = row["old_logprobs"] or row["behaviour_logprobs"]
    if now is not None and row["ref_logprobs"] is not None:
        numbers["kl"] = _kl(now, row["ref_logprobs"], kl_kind)
    who = f", {row['agent']}" if several else ""
    number = row["episode"] if row["sample"] is None or several else row["sample"]
    what = "episode" if unit == "step" or several else "answer"
    facts = [("score", "none" if row["score"] is None else f"{row['score']:.4g}"), ("ended by", row["finish"])]
    parts = [(one["part"], one["score"]) for one in row["scores"]]
    facts += [(f"score, {name}", "failed" if score is None else f"{score:.4g}") for name, score in parts]
    if row["reward_failure"]:
        facts.append(("reward failed", row["reward_failure"]))
    facts.append((f"{unit}s", str(len(row["ids"]))))
    facts.append(("author", row["author"]))
    if several:
        facts.append(("agent", row["agent"]))
    if len(row["turns"]) > 1:
        facts.append(("turns", str(len(row["turns"]))))
    facts.append(("policy version", str(row["policy_version"])))
    if row["prompt"] is not None:
        facts.append(("row of the data", str(row["prompt"])))
    short, prompt = f"{what} {number}{who}", shortened(row["prompt_text"])
    beside = f"episode {row['episode']}" if unit == "step" else f"group {row['group']}"
    return Sample(
        title=f"{short}{' of' if unit == 'step' else ' to'} “{prompt}”" if prompt else f"{short} of {beside}",
        short=short,
        labels=labels,
        pieces=[str(i).encode() for i in row["ids"]] if row["pieces"] is None and unit == "step" else row["pieces"],
        ids=row["ids"],
        roles=row["roles"],
        verdicts=row["verdicts"],
        numbers=numbers,
        passes=passes,
        spans=spans_of(row, acts="acts" if unit == "step" else "answer"),
        facts=facts,
        group=beside + (f", “{prompt}”" if prompt else ""),
    )


def shortened(prompt: str, most: int = 48) -> str:
    """The end of a text, where the question stands, on one line and without a chat template's marks."""
    line = " ".join(_MARKS.sub(" ", prompt).split())
    return line if len(line) <= most else f"…{line[1 - most :]}"


def spans_of(row: Mapping[str, Any], *, acts: str = "answer") -> list[Span]:
    """Who wrote what: the turns of the policy, and between them what was given or observed.

    `acts` is what its part is called where there are no turns to count.
    """
    roles, turns = row["roles"], [(t["start"], t["end"]) for t in row["turns"]]
    turn_of = {i: k for k, (start, end) in enumerate(turns) for i in range(start, end)}
    author_of = {i: run["author"] for run in row["authors"] or () for i in range(run["start"], run["end"])}

    def label_of(i: int, role: int) -> str:
        turn, name = turn_of.get(i), words(Role(role).name)
        if turn is not None and len(turns) > 1:
            return f"turn {turn + 1}, {row['author']}"
        if turn is not None or (not turns and role in (Role.CONTENT, Role.STOP)):
            return f"{acts}, {row['author']}"
        return name if author_of.get(i, name) == name else f"{name}, {author_of[i]}"

    return runs_of(label_of(i, role) for i, role in enumerate(roles))


def _passes(record: StepRecord, wanted: set[int]) -> dict[int, list[Pass]]:
    """What the first and the last optimiser step that saw a trajectory did with it."""
    if record.updates is None:
        return {}
    table, terms = record.updates, loss_terms(record.updates)
    rows: dict[int, list[int]] = {}
    places = zip(table["rollout_step"].to_pylist(), table["trajectory"].to_pylist(), strict=True)
    for i, (step, trajectory) in enumerate(places):
        if step == record.step and trajectory in wanted:
            rows.setdefault(trajectory, []).append(i)
    out: dict[int, list[Pass]] = {}
    for trajectory, found in rows.items():
        ends = [found[0], found[-1]] if len(found) > 1 else found
        out[trajectory] = [_pass(row, terms) for row in table.take(ends).to_pylist()]
    return out


def _pass(row: Mapping[str, Any], terms: Sequence[str]) -> Pass:
    numbers = {name: row[column] for column, name in _UPDATE_COLUMNS.items() if row[column] is not None}
    shares = {term: row[PREFIX + term] for term in terms if row[PREFIX + term] is not None}
    trained = [verdict == Verdict.TRAINED for verdict in row["verdicts"]]
    if shares:
        total = [sum(parts) for parts in zip(*shares.values(), strict=True)]
        numbers["contribution"] = _where(trained, total)
    if len(shares) > 1:
        numbers |= {f"contribution/{term}": _where(trained, share) for term, share in shares.items()}
    label = f"epoch {row['epoch'] + 1}, mini-batch {row['minibatch'] + 1}"
    return Pass(label=label, numbers=numbers, verdicts=row["verdicts"])


def _where(trained: Sequence[bool], values: Sequence[float]) -> list[float | None]:
    """None where a position does not train, unless something is there nevertheless: that must show."""
    return [value if here or value != 0 else None for here, value in zip(trained, values, strict=True)]


_KL: dict[str, Callable[[NDArray], NDArray]] = {
    "k1": lambda x: x,
    "clamp": lambda x: np.maximum(x, 0),
    "k2": lambda x: 0.5 * x * x,
    "k3": lambda x: np.exp(-np.maximum(x, -20)) - 1 + np.maximum(x, -20),
    "abs": np.abs,
}
"""`maths.kl.kl_estimate` without torch, which a page that is left open need not hold in memory."""


def _kl(now: Sequence[float | None], ref: Sequence[float | None], kind: str) -> list[float | None]:
    """The run's own estimate at each position that has both log-probs."""
    first, second = (np.array([np.nan if v is None else v for v in values], np.float32) for values in (now, ref))
    found = _KL.get(kind, _KL["k1"])(first - second)
    return [None if np.isnan(value) else float(value) for value in found]


def cut_off(finish: str) -> bool:
    """Whether a limit ended it."""
    return finish in set(Finish) and Finish(finish).truncated


def _answer_lengths(table: pa.Table) -> NDArray:
    roles = Ragged.read(table["roles"])
    return roles.sums((roles.values == Role.CONTENT) | (roles.values == Role.STOP))


def _pull(record: StepRecord) -> NDArray:
    """How hard each trajectory pulls: its absolute contributions, or absolute advantages where those are not kept."""
    out = np.zeros(len(record.rollouts))
    if record.updates is None:
        held = np.abs(row_sums(record.rollouts["advantages"], absolute=True)[0])
        return np.nan_to_num(held)
    owner = np.array(record.updates["trajectory"].to_pylist(), np.int64)
    own = np.array(record.updates["rollout_step"].to_pylist(), np.int64) == record.step
    for term in loss_terms(record.updates):
        sums, _ = row_sums(record.updates[PREFIX + term], absolute=True)
        np.add.at(out, owner[own], np.nan_to_num(sums[own]))
    return out


def _clipped_counts(record: StepRecord, clip: tuple[float, float] | None) -> NDArray:
    """Positions of each trajectory whose ratio left the clip range on the side its advantage pushes to."""
    counts = np.zeros(len(record.rollouts))
    if clip is None or record.updates is None:
        return counts
    low, high = clip
    ratios, verdicts = Ragged.read(record.updates["ratio"]), Ragged.read(record.updates["verdicts"])
    advantages = Ragged.read(record.rollouts["advantages"]).arrays()
    places = zip(record.updates["rollout_step"].to_pylist(), record.updates["trajectory"].to_pylist(), strict=True)
    for (step, trajectory), ratio, verdict in zip(places, ratios.arrays(), verdicts.arrays(), strict=True):
        advantage = advantages[trajectory] if step == record.step else None
        if ratio is not None and verdict is not None and advantage is not None:
            out = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))  # NaN is neither
            counts[trajectory] += (out & (verdict == Verdict.TRAINED)).sum()
    return counts
