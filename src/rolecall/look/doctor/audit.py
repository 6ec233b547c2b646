"""All checks on a run."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from rolecall.errors import UserError
from rolecall.look.doctor import episodes, policy, scores
from rolecall.look.doctor.finding import Finding, Seen
from rolecall.look.doctor.reading import RunRecord
from rolecall.look.page import asset
from rolecall.look.run import RunFiles, read_single

CHECKS: tuple[Callable[[RunRecord], Seen | None], ...] = (
    policy.lr_too_large,
    policy.lr_too_small,
    policy.rounded_away,
    policy.entropy_collapse,
    policy.entropy_explosion,
    policy.kl_blow_up,
    policy.useless_critic,
    policy.mismatch,
    policy.degenerate_weights,
    policy.stale_replay,
    scores.length_hacking,
    scores.repetition,
    scores.lost_stop,
    scores.truncation_wall,
    scores.reward_saturated,
    scores.flat_groups,
    scores.phantom_advantages,
    scores.dominating_part,
    scores.over_optimised,
    scores.evaluation_falls,
    episodes.no_tool_calls,
    episodes.illegal_actions,
    episodes.turn_limit,
    episodes.epsilon_stuck,
    episodes.stale_target,
    episodes.idle_agent,
)
"""Every kind of finding; the function's name with dashes is the kind."""


def findings(run_directory: Path) -> list[Finding]:
    """What looks wrong with a run, in the order of docs/doctor.md; works while the run continues."""
    files = read_single(run_directory)
    if not files.steps:
        raise UserError(f"{run_directory} has no finished step yet, so there is nothing to look at; let it train first")
    return findings_of(files)


def findings_of(files: RunFiles) -> list[Finding]:
    """The same of a run whose files are read."""
    run = RunRecord(files=files)
    with np.errstate(all="ignore"):  # a file may hold any number
        seen = {check.__name__.replace("_", "-"): check(run) for check in CHECKS}
    return [Finding(kind=kind, did=_did(kind), **one._asdict()) for kind, one in seen.items() if one is not None]


def _did(kind: str) -> str:
    return _treated().get(kind, "not tried")


@cache
def _treated() -> dict[str, str]:
    """By kind: what the setting did in the run into which benchmarks/doctor.py planted the fault, which writes the file."""
    return dict(json.loads(asset("doctor.json")))
