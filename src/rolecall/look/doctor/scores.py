"""Checks of what is rewarded: hacks, flat and phantom comparisons, parts, evaluations, ends of answers."""

import numpy as np
from numpy.typing import NDArray

from rolecall.look.charts import is_number
from rolecall.look.doctor.finding import Evidence, Seen
from rolecall.look.doctor.reading import Answers, Curve, RunRecord

_LOOKED_AT = 20
"""Recorded steps of a stretch whose answers are read, the last ones."""


def length_hacking(run: RunRecord) -> Seen | None:
    """Answers half as long again as at the start, in groups where the longer answer scores higher."""
    length = run.curve("completions/mean_length")
    if len(length) < 8 or run.files.command != "rl":
        return None
    steps = length.lasting(lambda n: n > 1.5 * length.first)
    answers = run.answers(steps) if steps else None
    early = run.answers((0, steps[1]), first=True) if steps else None
    if steps is None or answers is None or early is None:
        return None
    tied = max(_length_pays(answers), _length_pays(early))
    if not tied > 0.6:
        return None
    said = (
        f"answers grew from {length.first:.1f} to {length.last:.1f} tokens, and among answers to a prompt the score goes with "
        f"the length (correlation {tied:.2f}): the reward pays for length"
    )
    longest = answers.most(np.array([len(ids) for ids in answers.own()], np.float64))
    return Seen("likely", steps, said, "--algorithm.overlong_buffer 0.9", longest)


def repetition(run: RunRecord) -> Seen | None:
    """Half of the three-token runs of an answer are repeats, and 0.3 more than at the start."""
    early, late = run.answers(first=True), run.answers()
    if early is None or late is None or late.step - early.step < 5 or run.files.command == "marl":
        return None
    before, after = _repeats(early), _repeats(late)
    if np.isnan(after).all():
        return None
    grown = float(np.nanmean(after)) - (0.0 if np.isnan(before).all() else float(np.nanmean(before)))
    shared = float(np.mean(~np.isnan(after)))
    if not (np.nanmean(after) > 0.5 and grown > 0.3 and shared > 0.5):
        return None
    said = (
        f"in step {late.step} {np.nanmean(after):.0%} of all runs of three tokens repeat an earlier one of the same answer: "
        "the policy says the same again and again"
    )
    return Seen("likely", (early.step, late.step), said, run.more_kl(), late.most(after))


def reward_saturated(run: RunRecord) -> Seen | None:
    """Nine answers in ten have the best score that there is, for a fifth of the run at its end."""
    reward, spread = run.curve("reward"), run.curve("reward_std")
    if len(reward) < 8 or len(spread) != len(reward) or run.files.command != "rl":
        return None
    answers, early = run.answers(), run.answers(first=True)
    if answers is None or early is None:
        return None
    scores = answers.column("score")
    if np.isnan(scores).mean() > 0.5:  # most answers have no score at all
        return None
    seen = np.concatenate([scores, early.column("score"), [np.nan]])
    top, low = np.nanmax(seen, initial=-np.inf), np.nanmin(seen, initial=np.inf)
    if not (np.isfinite(top) and (top > 0 or top > low)):  # nothing but zeros is no success
        return None
    near = 0.1 * max(float(spread.values.max()), 0.1 * abs(top))
    steps = reward.lasting(lambda r: np.abs(r - top) <= near, least=max(5, len(reward) // 5))
    if steps is None or steps[1] < reward.steps[-1]:
        return None
    said = (
        f"since step {steps[0]} nearly every answer has the best score, {top:.3g}: there is nothing left to learn from this "
        "reward on these rows"
    )
    return Seen("certain", steps, said, "--reward FINER", answers.most(scores))


def flat_groups(run: RunRecord) -> Seen | None:
    """Three answers in four are in groups that score all the same, most of them below the best score."""
    flat = run.curve("frac_reward_zero_std")
    if not len(flat) or run.number("samples", 2) < 2 or reward_saturated(run) is not None:
        return None
    if run.option("algorithm.name") not in ("grpo", "rloo", "opo", "reinforce++-baseline"):
        return None
    steps = flat.lasting(lambda share: share > 0.75)
    if steps is None or _mostly_right(run, steps):
        return None
    said = f"{flat.mean(steps):.0%} of the answers are in groups in which all score the same, so they teach nothing"
    shown = run.evidence(steps, lambda answers: answers.most((_spread(answers) == 0).astype(float)))
    return Seen("certain", steps, said, "--algorithm.resample 4", shown)


def phantom_advantages(run: RunRecord) -> Seen | None:
    """A fifth of the answers differ from their group by less than a hundredth of all scores' spread, and train by it."""
    answers = run.answers()
    if answers is None or run.option("algorithm.name") != "grpo" or run.option("algorithm.scale") != "group":
        return None
    spread, scores = _spread(answers), answers.column("score")
    if np.isnan(scores).all():
        return None
    level = np.nanmax(np.abs(scores), initial=0.0)
    # Rounding of float32 is flat already; what is left differs, but by nothing that anybody meant.
    tiny = (spread > 0) & (spread < 0.01 * max(float(np.nanstd(scores)), 0.01 * level)) & answers.trained()
    size = np.array([0.0 if a is None else np.nanmax(np.abs(a), initial=0.0) for a in answers.lists("advantages")])
    tiny &= size > 0.1
    if not np.mean(tiny) > 0.2:
        return None
    first = run.answers(first=True) or answers
    said = (
        f"in step {answers.step} {np.mean(tiny):.0%} of the answers are in groups whose scores differ by about "
        f"{np.median(spread[tiny]):.1g}, and dividing by that makes advantages of {np.median(size[tiny]):.2g} out of noise"
    )
    shown = answers.most(np.where(tiny, -spread, np.nan))
    return Seen("certain", (first.step, answers.step), said, "--algorithm.scale batch", shown)


def dominating_part(run: RunRecord) -> Seen | None:
    """One part of the reward has over 98 % of the variance, though another one varies too."""
    names = [name for name in run.names("rewards/", "/std") if len(run.curve(f"rewards/{name}/std"))]
    if len(names) < 2 or run.files.command != "rl":
        return None
    weights = run.option("reward_weights") or [1.0] * len(names)
    if not isinstance(weights, list) or len(weights) != len(names) or not all(map(is_number, weights)):
        return None
    curves = [run.curve(f"rewards/{name}/std") for name in names]
    held = [dict(zip(curve.steps, curve.values.tolist(), strict=True)) for curve in curves]
    common = [step for step in curves[0].steps if all(step in one for one in held)]
    if len(common) < 5:
        return None
    parts = np.array([[(w * one[step]) ** 2 for step in common] for w, one in zip(weights, held, strict=True)])
    share = parts / np.maximum(parts.sum(axis=0), 1e-30)
    top = int(share.mean(axis=1).argmax())
    others = [i for i in range(len(names)) if i != top and weights[i]]
    varies = (parts[others] > 1e-12).any(axis=0) if others else np.zeros(len(common), bool)
    shared = Curve(steps=common, values=np.where(varies, share[top], 0.0))
    steps = shared.lasting(lambda s: s > 0.98) if others else None
    if steps is None:
        return None
    small = ", ".join(names[i] for i in others)
    said = f"{names[top]} makes {shared.mean(steps):.1%} of the variance of the reward, so {small} has no say"
    setting = "--reward_weights " + ",".join(f"{0.05 * w if i == top else w:g}" for i, w in enumerate(weights))
    return Seen("certain", steps, said, setting, run.evidence(steps, Answers.best))


def over_optimised(run: RunRecord) -> Seen | None:
    """On held-out rows the reward that trains rises and the other one falls."""
    return _apart(run, run.curve("eval_train_reward", evaluated=True), "the reward that trains")


def evaluation_falls(run: RunRecord) -> Seen | None:
    """The reward rises in training and falls on held-out rows."""
    told_apart = len(run.curve("eval_train_reward", evaluated=True)) > 0
    return None if told_apart else _apart(run, run.curve("reward"), "the reward in training")


def _apart(run: RunRecord, rises: Curve, name: str) -> Seen | None:
    judged = run.curve("eval_reward", evaluated=True)
    if len(judged) < 3 or len(rises) < 3:
        return None
    # Twice the deviation of a share of one half, of as many rows.
    noise = 1 / max(1.0, run.number("eval.rows", 256)) ** 0.5
    best = int(judged.values.argmax())
    fallen, grown = float(judged.values[best] - judged.values[-2:].mean()), rises.last - rises.first
    if not (fallen > max(noise, 0.1) and grown > 0.05 * max(1e-9, float(np.abs(rises.values).max()))):
        return None
    said = (
        f"{name} rose from {rises.first:.3g} to {rises.last:.3g} while the evaluated reward fell from "
        f"{judged.values[best]:.3g} to {judged.values[-1]:.3g}: what is learned is not what is wanted"
    )
    steps = max(1, judged.steps[best]), judged.steps[-1]
    return Seen("likely", steps, said, run.more_kl(), run.evidence(None, Answers.best))


def lost_stop(run: RunRecord) -> Seen | None:
    """Answers used to end by themselves, and now seven in ten are cut off."""
    cut = run.curve("completions/clipped_ratio")
    if len(cut) < 8 or cut.first > 0.35:
        return None
    steps = cut.lasting(lambda share: share > 0.7, least=3)
    if steps is None:
        return None
    said = (
        f"at the start {cut.first:.0%} of the answers were cut off, now {cut.last:.0%} are: the policy no longer stops"
    )
    trains = run.option("algorithm.train_stop", default=True)
    setting = "--algorithm.missing_stop_penalty 1" if trains else "--algorithm.train_stop true"
    return Seen("certain", steps, said, setting, run.evidence(steps, _last_tokens))


def truncation_wall(run: RunRecord) -> Seen | None:
    """From the start half of the answers and more are cut off."""
    cut = run.curve("completions/clipped_ratio")
    if len(cut) < 5 or cut.first < 0.5 or run.option("env") is not None:
        return None
    steps = cut.lasting(lambda share: share > 0.5)
    if steps is None:
        return None
    room = int(run.number("sampling.max_new_tokens", 64))
    said = f"{cut.mean(steps):.0%} of the answers are cut off at {room} tokens, from the first step on: there is no room to answer"
    return Seen("certain", steps, said, f"--sampling.max_new_tokens {2 * room}", run.evidence(steps, _last_tokens))


def _last_tokens(answers: Answers) -> Evidence:
    """Answers that were cut off, at their last token."""
    ends = [None if ids is None else len(ids) - 1 for ids in answers.lists("ids")]
    return answers.most(np.where(answers.cut_off(), 1.0, np.nan), ends)


def _groups(answers: Answers) -> list[NDArray]:
    names = answers.table["group"].to_pylist()
    return [np.flatnonzero(np.array(names) == name) for name in dict.fromkeys(names)]


def _spread(answers: Answers) -> NDArray:
    """The standard deviation of the scores of each answer's group; NaN for a group without scores."""
    scores, out = answers.column("score"), np.full(len(answers.table), np.nan)
    for rows in _groups(answers):
        if np.isfinite(scores[rows]).any():
            out[rows] = 0.0 if np.nanmax(scores[rows]) == np.nanmin(scores[rows]) else np.nanstd(scores[rows])
    return out


def _mostly_right(run: RunRecord, steps: tuple[int, int]) -> bool:
    """Whether most answers in flat groups of these steps have the best score that was seen."""
    within = [step for step in run.files.rollouts if steps[0] <= step <= steps[1]][-_LOOKED_AT:]
    recorded = [answers for step in within if (answers := run.answers((step, step))) is not None]
    if not recorded:
        return False
    seen = np.concatenate([answers.column("score") for answers in recorded])
    flat = np.concatenate([_spread(answers) == 0 for answers in recorded])
    top, low = np.nanmax(seen, initial=-np.inf), np.nanmin(seen, initial=np.inf)
    return bool(top > low and flat.any() and np.mean(seen[flat] >= top) > 0.5)


def _length_pays(answers: Answers) -> float:
    """The correlation of score and length, both less the mean of their group; 0 if either never differs."""
    scores, lengths = answers.column("total"), np.array([len(ids) for ids in answers.own()], np.float64)
    for rows in _groups(answers):
        scores[rows] -= np.nanmean(scores[rows]) if np.isfinite(scores[rows]).any() else 0.0
        lengths[rows] -= lengths[rows].mean()
    known = np.isfinite(scores)
    if known.sum() < 3 or scores[known].std() < 1e-9 or lengths[known].std() < 1e-9:
        return 0.0
    return float(np.corrcoef(scores[known], lengths[known])[0, 1])


def _repeats(answers: Answers) -> NDArray:
    """The share of each answer's runs of three tokens that stand in it before; NaN below eight tokens."""
    out = []
    for ids in answers.own():
        runs = list(zip(ids[:-2].tolist(), ids[1:-1].tolist(), ids[2:].tolist(), strict=True)) if len(ids) >= 8 else []
        out.append(1 - len(set(runs)) / len(runs) if runs else np.nan)
    return np.array(out)
