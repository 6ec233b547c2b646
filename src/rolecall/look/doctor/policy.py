"""Checks of the policy: entropy, KL, the size of its steps, its critic, the engine that samples from it, and replay."""

import numpy as np

from rolecall.look.doctor.finding import Evidence, Seen
from rolecall.look.doctor.reading import Answers, RunRecord


def entropy_collapse(run: RunRecord) -> Seen | None:
    """Entropy below a fifth of its start and below 0.1 nats, while answers still fail."""
    entropy, reward = run.curve("entropy"), run.curve("reward")
    if len(entropy) < 8 or not len(reward) or run.files.command != "rl":
        return None
    steps = entropy.lasting(lambda e: (e < 0.2 * entropy.first) & (e < 0.1))
    answers = run.answers(steps) if steps else None
    if steps is None or answers is None:
        return None
    best = max(float(np.nanmax(answers.column("score"), initial=-np.inf)), float(reward.values.max()))
    least = min(0.0, float(np.nanmin(answers.column("score"), initial=np.inf)), float(reward.values.min()))
    if best > least and reward.mean(steps) - least >= 0.9 * (best - least):  # it is sure of itself because it is right
        return None
    texts = answers.table["answer_text"].to_pylist()
    same = np.array([texts.count(text) for text in texts], np.float64)
    said = (
        f"entropy fell from {entropy.first:.3g} to {entropy.mean(steps):.2g} nats per token while the mean score is "
        f"{reward.mean(steps):.3g} and {best:.3g} is possible: the policy no longer tries anything else"
    )
    setting = f"--algorithm.entropy_coef {max(0.01, run.number('algorithm.entropy_coef', 0.0) * 3):g}"
    return Seen("likely", steps, said, setting, answers.most(same))


def entropy_explosion(run: RunRecord) -> Seen | None:
    """Entropy over twice its start and half a nat above it."""
    entropy = run.curve("entropy")
    if len(entropy) < 8 or run.files.command != "rl":
        return None
    start = min(entropy.first, float(entropy.values[0]))  # one update may be enough
    steps = entropy.lasting(lambda e: (e > 2 * start) & (e > start + 0.5))
    if steps is None:
        return None
    said = f"entropy rose from {start:.3g} to {entropy.mean(steps):.3g} nats per token: answers turn into noise"
    paid = run.number("algorithm.entropy_coef", 0.0) > 0
    setting = "--algorithm.entropy_coef 0" if paid else f"--optim.lr {run.number('optim.lr', 1e-5) / 10:g}"
    return Seen("likely", steps, said, setting, run.evidence(steps, _least_likely))


def kl_blow_up(run: RunRecord) -> Seen | None:
    """More than half a nat per token away from the reference."""
    kl = run.curve("kl")
    steps = kl.lasting(lambda k: k > 0.5) if len(kl) else None
    if steps is None:
        return None
    said = (
        f"the KL to the reference reached {kl.values.max():.3g} nats per token ({kl.last:.3g} at the end): the policy has "
        "left the model that it started from"
    )
    return Seen("likely", steps, said, run.more_kl(), run.evidence(steps, _far_from_reference))


def lr_too_small(run: RunRecord) -> Seen | None:
    """After ten steps the policy is where it was, though there were gradients."""
    rate, pull = run.curve("learning_rate"), run.curve("grad_norm")
    if len(rate) < 10 or not rate.values.max() > 0 or not np.sum(pull.values > 0) > len(rate) / 2:
        return None
    taken = run.curve("optimizer_steps")
    count = float(taken.values.mean()) if len(taken) else 1.0
    kl, moved, margin = run.curve("kl"), run.curve("policy/ratio_max"), run.curve("rewards/margins")
    travel = float(rate.values.sum()) * count
    if len(kl) >= 10 and np.abs(kl.values).max() < 1e-5:
        said = f"after {len(rate)} steps the KL to the reference is {kl.values[-1]:.1g} nats per token"
    elif len(moved) and count > 1.5 and moved.values.max() < 1.001:
        said = f"within an update no token's probability changes by more than {moved.values.max() - 1:.1g}"
    elif len(margin) and np.abs(margin.values).max() < 1e-4:
        said = f"after {len(rate)} steps the margin between chosen and rejected answers is {margin.values[-1]:.1g}"
    elif travel < 1e-6:  # Adam moves no weight by much more than the learning rate
        said = f"{len(rate)} steps can move a weight by {travel:.1g} at most"
    else:
        return None
    top = float(rate.values.max())
    said = f"{said}: this learning rate ({top:g}) does nothing"
    return Seen("certain", (rate.steps[0], rate.steps[-1]), said, f"--optim.lr {max(1e-5, 100 * top):g}")


def lr_too_large(run: RunRecord) -> Seen | None:
    """Steps that are not finite, updates that move the policy by 0.2 nats, scores or losses that one update ruins."""
    lr = f"--optim.lr {float(run.curve('learning_rate').values.max(initial=0)) / 10:g}"
    skipped = run.curve("skipped")
    bad = [s for s, v in zip(skipped.steps, skipped.values, strict=True) if v > 0]
    if len(bad) > max(2, len(skipped) // 20):
        said = f"{len(bad)} steps had a loss or gradient that is not finite and were left out"
        return Seen("certain", (bad[0], bad[-1]), said, lr)
    for check in (_large_updates, _jumps, _scores_ruined, _loss_ruined):
        if (what := check(run)) is not None:
            steps, said = what
            return Seen("likely", steps, f"{said}: steps are too large", lr, run.evidence(steps, _least_likely))
    return None


def _large_updates(run: RunRecord) -> tuple[tuple[int, int], str] | None:
    """Several optimiser steps on one batch take the policy far from where it was sampled."""
    kl, clipped = run.curve("policy/approx_kl"), run.curve("clip_ratio/region_mean")
    steps = kl.lasting(lambda k: k > 0.2, least=3) if len(kl) else None
    if steps is None:
        return None
    outside = f", with {clipped.mean(steps):.0%} of its tokens outside the clip range" if len(clipped) else ""
    return steps, f"one update moves the policy by {kl.mean(steps):.2g} nats per token{outside}"


def _jumps(run: RunRecord) -> tuple[tuple[int, int], str] | None:
    """From one step to the next the entropy changes by 0.8 nats and by half."""
    entropy = run.curve("entropy")
    if len(entropy) < 5 or run.files.command != "rl":
        return None
    change = np.abs(np.diff(entropy.values))
    far = np.flatnonzero((change > 0.8) & (change > 0.5 * np.maximum(entropy.values[1:], entropy.values[:-1])))
    if not len(far):
        return None
    i = int(far[0])
    said = f"from step {entropy.steps[i]} to {entropy.steps[i + 1]} the entropy went from {entropy.values[i]:.2g} to "
    return (entropy.steps[i], entropy.steps[int(far[-1]) + 1]), f"{said}{entropy.values[i + 1]:.2g} nats per token"


def _scores_ruined(run: RunRecord) -> tuple[tuple[int, int], str] | None:
    """The reward falls to under a third of its start, by more than four standard errors of a step, and stays there."""
    reward, spread = run.curve("reward"), run.curve("reward_std")
    if len(reward) < 8 or len(spread) != len(reward) or run.files.command != "rl":
        return None
    begin, least = float(reward.values[0]), min(0.0, float(reward.values.min()))
    error = float(spread.values.max()) / max(1.0, run.number("prompts", 1)) ** 0.5
    steps = reward.lasting(lambda r: (r - least < (begin - least) / 3) & (r < begin - 4 * error))
    if steps is None or steps[1] < reward.steps[-1]:
        return None
    return steps, f"the mean score was {begin:.3g} before the first update and is {reward.last:.3g} now"


def _loss_ruined(run: RunRecord) -> tuple[tuple[int, int], str] | None:
    """Of learning from given answers: the loss is above that of the first step."""
    loss = run.curve("loss")
    if len(loss) < 10 or run.files.command not in ("sft", "dpo", "rm"):
        return None
    begin = float(loss.values[0])
    steps = loss.lasting(lambda x: x > 1.1 * begin + 0.05)
    return None if steps is None else (steps, f"the loss was {begin:.3g} at first and is {loss.mean(steps):.3g}")


def useless_critic(run: RunRecord) -> Seen | None:
    """A critic that after 15 steps explains nothing of the returns."""
    explained = run.curve("critic/explained_variance")
    late = explained.values[len(explained) * 2 // 3 :]
    if len(explained) < 15 or late.mean() > 0.02:
        return None
    rate = run.number("optim.critic_lr", run.number("optim.lr", 1e-5))
    setting = f"--optim.critic_lr {max(1e-3, 10 * rate):g}"
    if run.files.command == "marl":
        setting = f"--ppo.vf_coef {2 * run.number('ppo.vf_coef', 0.5):g}"
    said = f"the critic explains {late.mean():.1%} of the variance of the returns, so it is no better than a constant"
    steps = explained.steps[len(explained) * 2 // 3], explained.steps[-1]
    return Seen("certain" if late.max() < 0.02 else "likely", steps, said, setting)


def mismatch(run: RunRecord) -> Seen | None:
    """Log-probs of engine and trainer that are 0.03 apart, and at least three times as far as at the start."""
    gap = run.curve("sampling/sampling_logp_difference/mean")
    steps = gap.lasting(lambda g: (g > 0.03) & (g > 3 * gap.first)) if len(gap) >= 8 else None
    if steps is None:
        return None
    said = (
        f"engine and trainer disagree by {gap.last:.2g} nats per token, {gap.last / max(gap.first, 1e-9):.0f} times as much "
        "as at the start: answers come from another policy than the one that trains"
    )
    return Seen("certain", steps, said, _same_dtype(run), run.evidence(steps, _far_from_engine))


def degenerate_weights(run: RunRecord) -> Seen | None:
    """Importance weights that leave less than 30 % of the sample."""
    for name, what, setting in (
        ("sampling/weight_ess", "fresh", _same_dtype(run)),
        ("replay/ess", "replayed", "--replay.max_staleness 1"),
    ):
        ess = run.curve(name)
        steps = ess.lasting(lambda e: e < 0.3, least=3) if len(ess) else None
        if steps is not None:
            said = (
                f"the importance weights of {what} answers are worth {ess.mean(steps):.0%} of as many equal ones: a few "
                "tokens decide the update"
            )
            return Seen("certain", steps, said, setting, run.evidence(steps, _far_from_engine))
    return None


def _same_dtype(run: RunRecord) -> str:
    return f"--engine.dtype {run.option('policy.dtype', 'float32')}"


def stale_replay(run: RunRecord) -> Seen | None:
    """Replayed answers of five versions and more, a tenth of their tokens clipped, or weights worth less than 80 % of equal ones."""
    age, ess = run.curve("replay/age"), run.curve("replay/ess")
    if not len(age) or len(age) != len(ess):
        return None
    parts = [run.curve(f"replay/{name}") for name in ("clip_low", "clip_high", "clip_dual", "weighted_out")]
    lost = np.sum([p.smooth() for p in parts if len(p) == len(age)], axis=0)
    steps = age.lasting(lambda a: (a >= 5) & ((lost > 0.1) | (ess.smooth() < 0.8)), least=3)
    if steps is None:
        return None
    said = (
        f"replayed answers are {age.mean(steps):.1f} versions old, and their weights are worth {ess.mean(steps):.0%} of as "
        "many equal ones: the policy that wrote them is long gone"
    )
    return Seen("likely", steps, said, "--replay.max_staleness 1")


def rounded_away(run: RunRecord) -> Seen | None:
    """Nine updates in ten are lost in bfloat16."""
    lost = run.curve("rounded_away")
    steps = lost.lasting(lambda share: share > 0.9, least=3) if len(lost) else None
    if steps is None:
        return None
    said = f"{lost.mean(steps):.1%} of the weights with an update stayed bit for bit where they were: bfloat16 is too coarse"
    said += f" for a learning rate of {run.number('optim.lr', 0):g}"
    return Seen("certain", steps, said, "--policy.dtype float32")


def _least_likely(answers: Answers) -> Evidence:
    """Answers with their least likely token."""
    return _largest(answers, [None if x is None else -x for x in answers.lists("behaviour_logprobs")])


def _far_from_reference(answers: Answers) -> Evidence:
    """Answers with the token at which policy and reference are furthest apart."""
    pairs = zip(answers.lists("old_logprobs"), answers.lists("behaviour_logprobs"), strict=True)
    return _furthest(answers, [a if a is not None else b for a, b in pairs], "ref_logprobs")


def _far_from_engine(answers: Answers) -> Evidence:
    """Answers with the token at which trainer and engine are furthest apart."""
    return _furthest(answers, answers.lists("old_logprobs"), "behaviour_logprobs")


def _furthest(answers: Answers, now: list, other: str) -> Evidence:
    pairs = zip(now, answers.lists(other), strict=True)
    return _largest(answers, [None if a is None or b is None else np.abs(a - b) for a, b in pairs])


def _largest(answers: Answers, numbers: list) -> Evidence:
    there = [None if x is None or not np.isfinite(x).any() else np.nan_to_num(x, nan=-np.inf) for x in numbers]
    best = np.array([np.nan if x is None else float(x.max()) for x in there])
    return answers.most(best, [None if x is None else int(x.argmax()) for x in there])
