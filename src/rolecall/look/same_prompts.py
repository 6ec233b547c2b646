"""Answers of several runs to the same prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

from rolecall.experience.parquet import StoreError, read_table
from rolecall.experience.rollout_schema import ROLLOUTS
from rolecall.look.records import sample_set, shortened, unit_of
from rolecall.look.run import RunFiles
from rolecall.look.tokens import Sample, SampleSet

_STEPS = 24
"""Recorded steps of a run that are searched for prompts, the last ones."""
_ROWS = 8
"""Answers of a run to a prompt that are shown."""

Place = tuple[int, Sequence[int]]
"""The last step that asked a prompt, and its rows there."""


def prompts_of(run: RunFiles) -> dict[str, Place]:
    """The prompts of a run's last recorded steps."""
    found: dict[str, Place] = {}
    for step in sorted(run.rollouts, reverse=True)[:_STEPS]:
        try:
            table = read_table(run.rollouts[step], ROLLOUTS, columns=["prompt_text"])[0]
        except (StoreError, FileNotFoundError):  # damaged, or made room for newer ones
            continue
        rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(table["prompt_text"].to_pylist()):
            rows.setdefault(prompt, []).append(row)
        for prompt, held in rows.items():
            found.setdefault(prompt, (step, held[:_ROWS]))
    return found


def shared_prompts(runs: Mapping[str, RunFiles]) -> dict[str, dict[str, Place]]:
    """The prompts that all runs were asked, each with where every run answers it."""
    places = {name: prompts_of(run) for name, run in runs.items()}
    first = next(iter(places.values()))
    if len({unit_of(run) for run in runs.values()}) > 1:
        return {}
    return {
        prompt: {name: held[prompt] for name, held in places.items()}
        for prompt in first
        if all(prompt in held for held in places.values())
    }


def side_by_side(runs: Mapping[str, RunFiles], prompt: str, places: Mapping[str, Place]) -> SampleSet:
    """All answers to one prompt, run after run."""
    samples: list[Sample] = []
    for name, (step, rows) in places.items():
        made = sample_set(runs[name], step, unit=unit_of(runs[name]), rows=rows).samples
        for row, sample in zip(rows, (sample for sample in made if sample.labels), strict=True):
            short, labels = f"{name}, step {step}, answer {row}", [name] if row == rows[0] else []
            group, place = f"“{shortened(prompt)}”", len(samples)
            samples.append(replace(sample, title=short, short=short, group=group, place=place, labels=labels))
    return SampleSet(label=shortened(prompt), samples=samples)


def key_of(prompt: str) -> str:
    """A short name of a prompt for an address."""
    return sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]
