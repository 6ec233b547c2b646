"""The audit before training: for this model, template, rows and reward, what would go wrong without a word.

Everything is looked at as training would see it: the prompts it would render, the answers it would draw at its first
step, the tokens it would train. Each check gives one `Finding`. Nothing is trained and nothing is changed.
"""

from collections.abc import Sequence
from dataclasses import replace

from rolecall.recipes.audit.demonstrations import audit_demonstrations
from rolecall.recipes.audit.model import model_checks
from rolecall.recipes.audit.records import Audit, Finding, Level, Setup, Subject, TokenSample, encoded, skipped
from rolecall.recipes.audit.reward import (
    check_determinism,
    check_gold,
    check_latency,
    check_works,
    probe,
    worth_of,
)
from rolecall.recipes.audit.rollout import (
    check_groups,
    check_sampling,
    check_stops_in_gold,
    check_truncation,
    roll,
    token_samples,
)
from rolecall.recipes.audit.rows import (
    ENCODED,
    check_duplicates,
    check_held_out,
    check_lengths,
    check_prompts,
    check_round_trip,
    check_seam,
    gold_of,
    look_at_prompts,
    texts_of,
)
from rolecall.types import Finish

__all__ = ["Audit", "Finding", "Level", "Setup", "Subject", "TokenSample", "audit_demonstrations", "audit_rl"]


def audit_rl(setup: Setup, *, about: dict[str, str], problem: str = "") -> Audit:
    """What `rolecall rl` would train on. `problem`: why the reward cannot be called, if it is known already."""
    prompts = look_at_prompts(setup)
    rolled = roll(setup, prompts, scored=not problem)
    golds = _golds(setup, rolled.rows)
    tokenizer = setup.policy.tokenizer
    gold_ids = {row: ids for row, text in golds.items() if (ids := encoded(tokenizer, text)) is not None}
    probes, failure = probe(setup, golds, rolled) if golds and not problem else ([], "")
    problem = problem or (rolled.failure if rolled.requests else "") or failure
    contents = [c.ids[:-1] if c.finish is Finish.STOP else c.ids for c in rolled.completions]
    gold = skipped("gold", "the reward cannot be used") if problem else check_gold(setup, rolled, probes)
    findings = (
        *model_checks(setup, rolled, prompts.ids),
        check_prompts(setup, prompts),
        check_lengths(setup, prompts),
        check_duplicates(setup, prompts),
        check_held_out(setup, prompts),
        check_round_trip(tokenizer, setup.rows, texts_of(setup.rows, setup.gold), contents),
        check_seam(setup, prompts),
        check_stops_in_gold(setup, gold_ids),
        check_works(setup, rolled, probes, problem),
        gold,
        check_determinism(setup, rolled),
        check_latency(setup, rolled),
        check_groups(setup, rolled, worth=worth_of(probes)),
        check_truncation(setup, rolled, gold_ids),
        check_sampling(setup),
    )
    samples = tuple(token_samples(setup, rolled))
    return Audit(about=about, findings=without_consequences(findings), samples=samples)


def without_consequences(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings with warnings that only follow from an error taken back, so that the cause stands out."""
    wrong = [f.check for f in findings if f.level is Level.ERROR]
    out = []
    for finding in findings:
        cause = next((name for name in wrong if name in _FOLLOWS.get(finding.check, ())), None)
        if cause is not None and finding.level is Level.WARNING:
            summary = f"not judged before {cause} is put right: {finding.summary}"
            finding = replace(finding, level=Level.SKIPPED, summary=summary, advice="")
        out.append(finding)
    return tuple(out)


_FOLLOWS = {
    "groups": ("bos", "gold", "padding", "reward", "round-trip", "stop-ids", "truncation"),
    "truncation": ("bos", "stop-ids"),
    "padding": ("stop-ids",),
    "stop-in-answer": ("stop-ids",),
    "gold": ("reward",),
    "latency": ("reward",),
}
"""The errors that a check's warnings may come from."""


def _golds(setup: Setup, sampled: Sequence[int]) -> dict[int, str]:
    """The right answers of the sampled rows and of the first ones."""
    rows = dict.fromkeys([*sampled, *range(min(len(setup.rows), ENCODED))])
    found = {row: gold_of(setup, setup.rows[row]) for row in rows}
    return {row: text for row, text in found.items() if text is not None}
