"""What a training step saw, on disk: `rollouts/step-000012.parquet`, one row per trajectory.

Plain Parquet, with one list entry per token: index t means token t in every list. Written once, whole or not at all.
In memory NaN means "not computed at this position"; on disk that is null. docs/files.md explains the columns.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolecall.experience.batches import as_numpy, flat_supports, split_supports
from rolecall.experience.parquet import (
    CODES,
    FLOATS,
    IDS,
    Ragged,
    StoreError,
    flattened,
    nested,
    read_table,
    row_by_row,
    table_of,
    write_table,
)
from rolecall.experience.rollout_schema import COMPUTED, PIECES, PINNED, UNCUT
from rolecall.experience.rollout_schema import ROLLOUTS as ROLLOUTS
from rolecall.maths.roles import Role, Verdict
from rolecall.types import Batch, Finish, Sampling, Trajectory

_TOKENS = {"ids": np.int32, "roles": np.uint8, "behaviour_logprobs": np.float32}
"""The fields of a trajectory that hold one entry per token, and the columns of the same names."""


_SPAN = ("start", "end", "version")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutDetails:
    """What is known of a trajectory besides its tokens."""

    prompt_text: str
    """The prompt, as people read it."""
    answer_text: str
    """The answer, as people read it."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """Of an episode: all that its agent read and said, its prompt first; None of a single answer."""
    seed: int | None
    """The seed it was sampled with; None if nothing was sampled."""
    sampling: Sampling | None
    """How it was sampled; None if nothing was sampled."""
    prompt: int | None = None
    """The row of the data it answers."""
    sample: int | None = None
    """Which of the prompt's answers it is, as the engine counts them."""
    total: float | None = None
    """What the rewards gave, before clipping and penalties make it the score; None if one failed or none was asked."""
    reward_failure: str | None = None
    """Why there is no score."""
    pieces: tuple[bytes, ...] | None = None
    """What each token writes, in UTF-8, to look at; a character may be spread over several tokens. For an episode, what
    was done at each step. None if nobody said."""
    extras: Mapping[str, object] = field(default_factory=dict)
    """Anything else that JSON can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """A rollouts file in memory."""

    step: int
    """The training step."""
    trajectories: tuple[Trajectory, ...]
    """Row by row."""
    batch: Batch
    """The same as a rectangle just wide enough, with what was computed. Behind a row's end: id 0, NaN, `PAD`."""
    details: tuple[RolloutDetails, ...]
    """Row by row."""
    model: str
    """Fingerprint of the weights that were trained, as given when it was written."""
    tokenizer: str
    """Fingerprint of the tokenizer, as given when it was written."""
    version: str
    """The rolecall that wrote it."""


def write_rollouts(
    path: Path,
    trajectories: Sequence[Trajectory],
    batch: Batch,
    *,
    step: int,
    details: Sequence[RolloutDetails],
    model: str,
    tokenizer: str,
) -> None:
    """Record a step's trajectories and what was computed from them. `batch` holds the trajectories in the same order.

    Per-position numbers are kept as float32, scores in full.
    """
    rollouts_file(path, trajectories, batch, step=step, details=details, model=model, tokenizer=tokenizer)()


def rollouts_file(
    path: Path,
    trajectories: Sequence[Trajectory],
    batch: Batch,
    *,
    step: int,
    details: Sequence[RolloutDetails],
    model: str,
    tokenizer: str,
) -> Callable[[], None]:
    """`write_rollouts` in two parts: this one copies all that will be written, and what it returns writes the file.

    The second part does not hold Python's lock for long, so another thread can do it while training goes on.
    """
    if not trajectories:
        raise ValueError(f"there are no trajectories to write to {path}")
    if not len(trajectories) == len(batch) == len(details):
        raise ValueError(
            f"{len(trajectories)} trajectories, {len(batch)} batch rows and {len(details)} details do not fit together"
        )
    tokens = {name: Ragged.of([getattr(t, name) for t in trajectories], dtype) for name, dtype in _TOKENS.items()}
    lengths = tokens["ids"].lengths
    for row, (trajectory, held) in enumerate(zip(trajectories, details, strict=True)):
        if held.pieces is not None and len(held.pieces) != len(trajectory.ids):
            raise ValueError(
                f"row {row} has {len(held.pieces)} pieces but {len(trajectory.ids)} ids; give one for each"
            )
    _check_same(trajectories, batch, tokens)
    cut = any(t.supports is not None for t in trajectories) or any(
        d.sampling and d.sampling.cuts_support for d in details
    )
    form = ROLLOUTS if any(t.versions for t in trajectories) else PINNED if cut else UNCUT
    columns = _from_trajectories(trajectories) | _from_details(details, form.schema.field("sampling").type)
    columns["supports"] = _nested(trajectories, lengths) if form is not UNCUT else None
    columns |= {name: rows.column(ROLLOUTS.schema.field(name).type) for name, rows in tokens.items()}
    columns["step"] = [step] * len(trajectories)
    columns["score"] = _nullable(batch.scores, len(batch))
    columns["baseline"] = _nullable(batch.baselines, len(batch))
    columns["verdicts"] = _cut(batch.verdicts, lengths, torch.uint8).column(CODES)
    for name in COMPUTED:
        columns[name] = _cut(getattr(batch, name), lengths, torch.float32).column(FLOATS)
    scored = {} if batch.scores is None else {"score_dtype": str(batch.scores.dtype).removeprefix("torch.")}
    facts = {"model": model, "tokenizer": tokenizer, **scored}
    return partial(write_table, path, table_of(columns, form.schema), form, facts)


def read_rollouts(path: Path | str, *, source: Any = None, group: int | None = None) -> Rollouts:
    """What `write_rollouts` wrote, bit for bit; padding aside, and NaN is NaN whatever its bits. `source` and `group` as in
    `read_table`."""
    table, facts = read_table(path, ROLLOUTS, source=source, group=group)
    if not len(table):
        raise StoreError(f"{path} holds no trajectories; remove it")
    ragged = {name: Ragged.read(table[name]) for name in (*_TOKENS, "verdicts", *COMPUTED)}
    lengths = ragged["ids"].lengths
    for name, rows in (ragged | {"supports": Ragged.read(table["supports"])}).items():
        if ((rows.lengths != lengths) & rows.present).any():
            raise StoreError(f"column {name!r} of {path} is not as long as the ids; bring back a copy of the file")
    time = int(lengths.max())
    fills = {"ids": 0, "roles": int(Role.PAD), "verdicts": int(Verdict.PADDING)}
    tensors = {
        name: torch.from_numpy(rows.rectangle(time, fills.get(name, np.nan)))
        for name, rows in ragged.items()
        if rows.present.any()
    }
    if "score_dtype" in facts:
        dtype = getattr(torch, facts["score_dtype"])
        tensors["scores"] = torch.from_numpy(table["score"].to_numpy().copy()).to(dtype)
        if table["baseline"].null_count < len(table):
            tensors["baselines"] = torch.from_numpy(table["baseline"].to_numpy().copy()).to(dtype)
    batch = Batch(
        ids=tensors.pop("ids").long(),
        groups=torch.from_numpy(table["group"].to_numpy().copy()),
        policy_versions=torch.from_numpy(table["policy_version"].to_numpy().copy()),
        supports=None,  # of trajectories: `collate` makes them a rectangle
        **tensors,
    )
    return Rollouts(
        step=table["step"][0].as_py(),
        trajectories=_to_trajectories(table, ragged),
        batch=batch,
        details=_to_details(table),
        model=facts.get("model", ""),
        tokenizer=facts.get("tokenizer", ""),
        version=facts.get("version", ""),
    )


def _from_trajectories(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    plain = ("group", "episode", "agent", "author", "finish", "policy_version")
    columns: dict[str, Any] = {name: [getattr(t, name) for t in trajectories] for name in plain}
    prompts = Ragged.of([t.behaviour_prompt_ids for t in trajectories], np.int32)
    columns["behaviour_prompt_ids"] = prompts.column(IDS)
    columns["turns"] = [[{"start": start, "end": end} for start, end in t.turns] for t in trajectories]
    columns["authors"] = [
        None if t.authors is None else [{"start": a, "end": b, "author": who} for a, b, who in t.authors]
        for t in trajectories
    ]
    columns["versions"] = [
        t.versions and [dict(zip(_SPAN, span, strict=True)) for span in t.versions] for t in trajectories
    ]
    columns["scores"] = [[{"part": part, "score": score} for part, score in t.scores.items()] for t in trajectories]
    return columns


def _nested(trajectories: Sequence[Trajectory], lengths: NDArray) -> pa.Array:
    given = [t.supports for t in trajectories]
    present = np.array([supports is not None for supports in given])
    return nested(*flat_supports(given, lengths.tolist()), lengths, present)


def _to_trajectories(table: pa.Table, ragged: Mapping[str, Ragged]) -> tuple[Trajectory, ...]:
    names = ("group", "episode", "agent", "author", "policy_version")
    columns = {name: table[name].to_pylist() for name in names}
    columns["finish"] = [Finish(finish) for finish in table["finish"].to_pylist()]
    for name in _TOKENS:
        columns[name] = ragged[name].tuples()
    columns["behaviour_prompt_ids"] = Ragged.read(table["behaviour_prompt_ids"]).tuples()
    lengths = ragged["ids"].lengths
    columns["supports"] = split_supports(*flattened(table["supports"], lengths), lengths.tolist())
    columns["turns"] = [tuple((turn["start"], turn["end"]) for turn in turns) for turns in table["turns"].to_pylist()]
    columns["authors"] = [
        None if runs is None else tuple((run["start"], run["end"], run["author"]) for run in runs)
        for runs in table["authors"].to_pylist()
    ]
    columns["versions"] = [
        spans and tuple(tuple(span[name] for name in _SPAN) for span in spans)
        for spans in table["versions"].to_pylist()
    ]
    columns["scores"] = [{one["part"]: one["score"] for one in scores} for scores in table["scores"].to_pylist()]
    return tuple(Trajectory(**row) for row in row_by_row(columns))


def _from_details(details: Sequence[RolloutDetails], sampling: pa.DataType) -> dict[str, Any]:
    columns: dict[str, Any] = {
        name: [getattr(d, name) for d in details] for name in ("prompt", "sample", "seed", "total")
    }
    columns["pieces"] = _pieces(details)
    columns["messages"] = [
        None if d.messages is None else [{key: _storable(held) for key, held in m.items()} for m in d.messages]
        for d in details
    ]
    for name in ("prompt_text", "answer_text", "reward_failure"):
        columns[name] = [_storable(getattr(d, name)) for d in details]
    columns["sampling"] = _samplings(details, sampling)
    columns["extras"] = [_json(d.extras, row) for row, d in enumerate(details)]
    return columns


def _pieces(details: Sequence[RolloutDetails]) -> pa.Array:
    given = [d.pieces for d in details]
    offsets = np.cumsum([0, *(len(pieces or ()) for pieces in given)])
    flat = pa.array(list(chain.from_iterable(pieces for pieces in given if pieces is not None)), pa.binary())
    absent = pa.array([pieces is None for pieces in given])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, type=PIECES, mask=absent)


def _samplings(details: Sequence[RolloutDetails], kind: pa.DataType) -> pa.Array:
    """As a rule all rows share one object, which is spelt out once."""
    settings = {id(d.sampling): d.sampling for d in details}
    places = {key: place for place, key in enumerate(settings)}
    made = pa.array([None if sampling is None else asdict(sampling) for sampling in settings.values()], kind)
    return made.take(pa.array([places[id(d.sampling)] for d in details]))


def _to_details(table: pa.Table) -> tuple[RolloutDetails, ...]:
    names = ("prompt", "sample", "seed", "total", "prompt_text", "answer_text", "reward_failure")
    columns = {name: table[name].to_pylist() for name in names}
    columns["sampling"] = [_to_sampling(settings) for settings in table["sampling"].to_pylist()]
    columns["pieces"] = [None if pieces is None else tuple(pieces) for pieces in table["pieces"].to_pylist()]
    columns["messages"] = [
        None if said is None else tuple({key: held for key, held in m.items() if held is not None} for m in said)
        for said in table["messages"].to_pylist()
    ]
    columns["extras"] = [json.loads(extras) for extras in table["extras"].to_pylist()]
    return tuple(RolloutDetails(**row) for row in row_by_row(columns))


def _to_sampling(settings: Mapping[str, Any] | None) -> Sampling | None:
    if settings is None:
        return None
    lists = {name: None if settings[name] is None else tuple(settings[name]) for name in ("stop_ids", "stop_strings")}
    sampling = Sampling(**{**settings, **lists, "logprobs": settings["logprobs"] or "drawn"})
    # Before version 4 log-probs were of the whole vocabulary.
    return replace(sampling, logprobs="full") if sampling.cuts_support and not settings["logprobs"] else sampling


def _storable(text: str | None) -> str | None:
    """Parquet holds UTF-8 only; half a surrogate pair, as broken file names have, is spelt out."""
    return text if text is None or text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _json(extras: Mapping[str, object], row: int) -> str:
    if not extras:
        return "{}"
    try:
        return json.dumps(dict(extras), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the extras of row {row} cannot be JSON: {error}; make them plain values") from error


def _check_same(trajectories: Sequence[Trajectory], batch: Batch, tokens: Mapping[str, Ragged]) -> None:
    """Refuse a batch whose rows are not the trajectories: numbers would be recorded beside tokens they are not of."""
    time, lengths = batch.ids.shape[1], tokens["ids"].lengths
    if time < lengths.max():
        raise ValueError(f"the batch has {time} positions but a trajectory has {lengths.max()} tokens")
    inside = torch.arange(time) < torch.from_numpy(lengths)[:, None]
    fills = {"ids": 0, "roles": int(Role.PAD), "behaviour_logprobs": np.nan}
    # After a row's end anything may stand, except for the role, which says that it is the end.
    expected = {name: torch.from_numpy(rows.rectangle(time, fills[name])) for name, rows in tokens.items()}
    expected["groups"] = torch.tensor([t.group for t in trajectories])
    expected["policy_versions"] = torch.tensor([t.policy_version for t in trajectories])
    for name, tensor in batch.tensors():
        if name not in expected:
            continue
        found = tensor.detach().to("cpu", expected[name].dtype)
        if name in ("ids", "behaviour_logprobs"):
            found = found.where(inside, fills[name])
        differs = (found != expected[name]) & ~(found.isnan() & expected[name].isnan())
        if differs.any():
            row = int(differs.nonzero()[0, 0])
            raise ValueError(
                f"batch.{name} differs from the trajectories' in row {row}; "
                "give the batch and its trajectories in the same order"
            )


def _nullable(scores: Tensor | None, rows: int) -> pa.Array:
    if scores is None:
        return pa.nulls(rows, pa.float64())
    held = as_numpy(scores, torch.float64).copy()
    return pa.array(held, mask=np.isnan(held))


def _cut(rectangle: Tensor | None, lengths: NDArray, dtype: torch.dtype) -> Ragged:
    return Ragged.cut(None if rectangle is None else as_numpy(rectangle, dtype), lengths)
