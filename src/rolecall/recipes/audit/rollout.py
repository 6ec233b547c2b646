"""The first prompts of the first step answered and scored as training would, and checks of the answers."""

from collections.abc import Sequence
from time import perf_counter

import torch

from rolecall.errors import UserError
from rolecall.maths.advantages import flat_groups
from rolecall.maths.roles import Role, TrainRule, Verdict
from rolecall.policy.token_text import token_bytes
from rolecall.recipes.audit.records import (
    Finding,
    Rolled,
    Scores,
    Setup,
    TokenSample,
    error,
    named,
    ok,
    quoted,
    share,
    skipped,
    warning,
)
from rolecall.recipes.audit.rows import Prompts
from rolecall.recipes.collect import answer_text, prompt_request, run_state, sample_of, trajectory_of
from rolecall.rewards.records import Sample
from rolecall.tasks.rows import place_of
from rolecall.train.data import RowOrder
from rolecall.types import Finish, Request, Trajectory

_MOSTLY_FLAT = 0.9
_SMALL = 0.05
"""Of what being right is worth."""
_MANY_SMALL = 0.25
_MANY_CUT = 0.5
_SOME_GOLD_CUT = 0.05


def roll(setup: Setup, prompts: Prompts, *, scored: bool = True) -> Rolled:
    """Answer the first prompts of step 0 with its random numbers, and score the answers twice."""
    o = setup.options
    taken = RowOrder(len(setup.rows), seed=o.seed).take(max(setup.groups, o.prompts))[: setup.groups]
    rows: list[int] = []
    requests: list[Request] = []
    for place, index in enumerate(taken):
        if not prompts.usable(index):
            continue
        try:
            request = prompt_request(
                setup.policy, setup.rows[index], o.chat, o.sampling, n=o.samples, seed=o.seed, step=0, prompt=place
            )
        except Exception:  # a row beyond those looked at, or a template that raises; `check_prompts` tells
            continue
        if len(request.prompt_ids) < setup.policy.context_length:
            rows.append(index)
            requests.append(request)
    if not requests:
        return Rolled(failure="no prompt of the first step can be given to the model")
    start = perf_counter()
    completions = setup.engine.generate(requests)
    seconds = perf_counter() - start
    by_prompt = {request.prompt: i for i, request in enumerate(requests)}
    answers = [answer_text(setup.policy, c) for c in completions]
    samples = [
        sample_of(setup.rows[rows[by_prompt[c.prompt]]], c, answer)
        for c, answer in zip(completions, answers, strict=True)
    ]
    scores, failure = score_twice(setup, samples) if scored else (None, "the reward cannot be used")
    return Rolled(
        rows=rows,
        requests=requests,
        completions=completions,
        answers=answers,
        scores=scores,
        seconds=seconds,
        failure=failure,
        by_prompt=by_prompt,
    )


def score_twice(setup: Setup, samples: Sequence[Sample]) -> tuple[Scores | None, str]:
    """The rewards of the same answers, two times; or None and why not."""
    reward, state = setup.reward, run_state(setup.options, None, 0)
    try:
        first = reward.score(samples, state=state)
        start = perf_counter()
        second = reward.score(samples, state=state)
    except UserError as problem:  # the wrong number of rewards, a column that is not there
        return None, str(problem)
    seconds = perf_counter() - start
    return Scores(
        totals=tuple(s.total for s in first),
        again=tuple(s.total for s in second),
        failures=tuple(s.failure for s in first),
        seconds=seconds,
    ), ""


def check_groups(setup: Setup, rolled: Rolled, *, worth: float | None) -> Finding:
    """Whether the answers to a prompt score differently, which is all that a group can teach.

    `worth`: how much more a right answer scores than one that says nothing, if that is known.
    """
    check, totals = "groups", rolled.scores.totals if rolled.scores else ()
    if not any(total is not None for total in totals):
        return skipped(check, rolled.failure or "no answer has a score")
    lone = setup.options.samples == 1
    groups: dict[int, list[float]] = {}
    for c, total in zip(rolled.completions, totals, strict=True):
        if total is not None:
            groups.setdefault(0 if lone else c.prompt, []).append(total)
    known = [total for group in groups.values() for total in group]
    spreads = [max(group) - min(group) for group in groups.values()]
    flat = sum(spread == 0 for spread in spreads)
    numbers = f"rewards from {min(known):g} to {max(known):g}, mean {sum(known) / len(known):.3g}"
    if not lone:
        numbers = f"{share(flat, len(groups))} groups are flat; {numbers}"
    if flat > _MOSTLY_FLAT * len(groups):
        row = rolled.row_of[0]
        return warning(
            check,
            f"the answers of {'the batch' if lone else 'nearly all groups' if flat < len(groups) else 'all groups'} "
            f"score the same: the first step has nothing to learn from",
            numbers,
            f"{place_of(setup.rows, row)}: {quoted(setup.rows[row]['prompt'])}, answered "
            f"{', '.join(quoted(answer) for answer in rolled.answers[:3])}",
            advice="start from a model that is right sometimes (SFT), or take easier rows"
            if min(known) == max(known) <= 0
            else "take rows that the model gets right sometimes and wrong sometimes, or more samples",
        )
    # What differs only because the reward is noisy is told by `check_determinism`.
    small = [s for s in spreads if worth is not None and 2 * rolled.noise < s < _SMALL * worth]
    o = setup.options.algorithm
    if o.name == "grpo" and o.scale == "group" and len(small) > _MANY_SMALL * (len(spreads) - flat):
        return warning(
            check,
            f"in {share(len(small), len(groups))} groups scores differ by next to nothing, and grpo scales each group's "
            "differences up to full advantages",
            f"a right answer is worth {worth:g} more than nonsense; these groups span {min(small):.2g} to {max(small):.2g}",
            numbers,
            advice="drop the small part of the reward, give it to right answers only, or set algorithm.scale to none",
        )
    return ok(check, f"answers {'' if lone else 'to the same prompt '}score differently", numbers)


def check_truncation(setup: Setup, rolled: Rolled, golds: dict[int, tuple[int, ...]]) -> Finding:
    """Whether answers end before they are cut off, and right answers could. `golds` are token ids by row."""
    check, limit = "truncation", setup.options.sampling.max_new_tokens
    long = {row: len(ids) + 1 for row, ids in golds.items() if len(ids) + 1 > limit}
    if long and len(long) > _SOME_GOLD_CUT * len(golds):
        row = max(long, key=lambda i: long[i])
        return error(
            check,
            f"{share(len(long), len(golds))} right answers are longer than max_new_tokens={limit}",
            f"{place_of(setup.rows, row)}: {long[row]} tokens with the stop token",
            advice=f"raise sampling.max_new_tokens to at least {long[row]}",
        )
    if not rolled.completions:
        return skipped(check, rolled.failure)
    cut = [c for c in rolled.completions if c.finish is Finish.LENGTH]
    mean = sum(len(c.ids) for c in rolled.completions) / len(rolled.completions)
    numbers = f"{share(len(cut), len(rolled.completions))} answers are cut off (max_new_tokens is {limit}); mean length {mean:.0f}"
    if len(cut) > _MANY_CUT * len(rolled.completions):
        return warning(
            check,
            "most answers are cut off: the model does not end them, or has too little room",
            numbers,
            f"one ends in {quoted(answer_text(setup.policy, cut[0])[-40:])}",
            advice="raise sampling.max_new_tokens, check the stop ids, or teach the model to stop (SFT)",
        )
    return ok(check, "most answers end themselves" if cut else "all answers end themselves", numbers)


def check_stops_in_gold(setup: Setup, golds: dict[int, tuple[int, ...]]) -> Finding:
    """Whether a right answer can be written without being ended half-way."""
    check, tokenizer = "stop-in-answer", setup.policy.tokenizer
    if not golds:
        return skipped(check, "the rows have no answers")
    for row, ids in golds.items():
        inside = [i for i in ids if i in setup.stop_ids]
        text = tokenizer.decode(list(ids))
        strings = [s for s in setup.options.sampling.stop_strings if s in text]
        if inside or strings:
            what = named(tokenizer, inside[0]) if inside else quoted(strings[0])
            held = sum(
                bool(set(i) & set(setup.stop_ids)) or any(s in tokenizer.decode(list(i)) for s in strings)
                for i in golds.values()
            )
            return warning(
                check,
                f"right answers hold {what}, at which an answer ends: the model cannot write them whole",
                f"{share(held, len(golds))} answers looked at; {place_of(setup.rows, row)}: {quoted(text)}",
                advice="take it out of the stop ids and stop strings, or out of the rows' answers",
            )
    return ok(check, "no right answer holds what would end it")


def check_sampling(setup: Setup) -> Finding:
    """Whether answers are drawn from the policy that is trained."""
    check, s = "sampling", setup.options.sampling
    if s.records_support:
        return ok(check, f"answers are drawn and trained within what {s.cuts} leaves of the vocabulary")
    if s.cuts_support:
        return warning(
            check,
            f"{s.cuts} draws from a part of the vocabulary, so the policy that answers is not the one that trains",
            "the gradient is biased, and the KL to the reference with it",
            advice="set sampling.logprobs drawn, or train without top_k, top_p and min_p",
        )
    return ok(check, f"answers are drawn from the whole vocabulary, at temperature {s.temperature:g}")


def token_samples(setup: Setup, rolled: Rolled) -> list[TokenSample]:
    """Answers to different prompts, with the verdicts that training would give their tokens."""
    o, totals = setup.options.algorithm, rolled.scores.totals if rolled.scores else (None,) * len(rolled.completions)
    flat = torch.zeros(len(totals), dtype=torch.bool)
    if o.drop_flat and totals:
        scores = torch.tensor([float("nan") if total is None else total for total in totals])
        groups = torch.tensor([c.prompt for c in rolled.completions])
        flat = flat_groups(scores, groups, include=~scores.isnan())
    shown: list[TokenSample] = []
    order = sorted(range(len(rolled.completions)), key=lambda i: (rolled.completions[i].sample, i))
    for i in order[: setup.shown]:
        c = rolled.completions[i]
        trajectory = trajectory_of(rolled.requests[rolled.by_prompt[c.prompt]], c, group=c.prompt)
        scored = "no score" if totals[i] is None else f"reward {totals[i]:g}"
        shown.append(
            token_sample(
                setup.policy.tokenizer,
                trajectory,
                rule=TrainRule(stop=o.train_stop),
                title=f"{place_of(setup.rows, rolled.row_of[i])}, answer {c.sample}",
                note=f"{c.finish}, {len(c.ids)} tokens, {scored}",
                score=totals[i],
                reward_failed=torch.tensor([totals[i] is None and rolled.scores is not None]),
                truncated=torch.tensor([c.finish.truncated]) if o.drop_truncated else None,
                flat_group=flat[i : i + 1] if o.drop_flat else None,
            )
        )
    return shown


def token_sample(
    tokenizer: object,
    trajectory: Trajectory,
    *,
    rule: TrainRule,
    title: str,
    note: str,
    score: float | None = None,
    **facts: torch.Tensor | None,
) -> TokenSample:
    """A sequence token by token. `facts` are what `TrainRule.verdicts` takes."""
    roles = torch.tensor([trajectory.roles], dtype=torch.uint8)
    verdicts = [Verdict(v) for v in rule.verdicts(roles, **facts)[0].tolist()]
    chosen = trajectory.sampled
    logprobs = trajectory.behaviour_logprobs or (0.0,) * len(chosen)
    return TokenSample(
        title=title,
        note=note,
        ids=trajectory.ids,
        pieces=tuple(token_bytes(tokenizer, trajectory.ids)),
        roles=tuple(Role(role).name for role in trajectory.roles),
        verdicts=tuple(verdict.name for verdict in verdicts),
        reasons={verdict.name: verdict.sentence for verdict in sorted(set(verdicts))},
        logprobs=tuple(p if known else None for p, known in zip(logprobs, chosen, strict=True)),
        score=score,
    )
