"""Every preset against its formula, worked out token by token in float64; dynamic sampling; greedy baselines."""

import dataclasses
import math

import pytest
import torch
from learners import STOP, learner_of, options_of, weights_of

from rolecall.config.rl import AlgorithmOptions, RLOptions
from rolecall.maths.reduce import aggregate
from rolecall.maths.roles import Verdict
from rolecall.policy.model import Outputs
from rolecall.recipes.algorithms import Coefficients, algorithm_of, clipped
from rolecall.train.data import RowOrder
from rolecall.train.step import trained

A, B = ord("a"), ord("b")
ANSWERS = [(A, STOP), (A, B, STOP), (B, B, B, B), (STOP,)]
"""Lengths 2, 3, 4 (cut off) and 1."""
SCORES = (1.0, 0.5, 0.0, 0.25)
GREEDY = 0.4
LENGTHS = [2, 3, 4, 1]


def small(preset, **settings):
    settings = {"prompts": 2, "samples": 4, "sampling.max_new_tokens": 4, "optim.lr": 1e-3, **settings}
    return options_of(preset, **settings)


def script(request, sample):
    return (A, A, STOP) if request.sampling.temperature == 0 else ANSWERS[sample]


def score(sample):
    return GREEDY if sample.completion == "aa" else SCORES[sample.sample_index]


def rolled_out(preset, **settings):
    learner = learner_of(small(preset, **settings), score, script=script)
    return learner, learner.collect(0)


def by_answer(batch):
    """The advantages of the first prompt's answers, one list of tokens each."""
    mask = trained(batch)[:4]
    return [row[keep].tolist() for row, keep in zip(batch.advantages[:4], mask, strict=True)]


def flat_list(rows):
    return [x for row in rows for x in row]


MEAN = sum(SCORES) / 4
STD = math.sqrt(sum((s - MEAN) ** 2 for s in SCORES) / 3)
WEIGHTED = sum(n * s for n, s in zip(LENGTHS, SCORES, strict=True)) / sum(LENGTHS)
# DAPO: of 4 tokens the last ceil(0.2 x 4) = 1 is the buffer, so the answer of 4 tokens pays 1.
DAPO = (1.0, 0.5, -1.0, 0.25)
DAPO_MEAN = sum(DAPO) / 4
DAPO_STD = math.sqrt(sum((s - DAPO_MEAN) ** 2 for s in DAPO) / 3)

PER_ANSWER = {
    "grpo": [(s - MEAN) / (STD + 1e-4) for s in SCORES],
    "gspo": [(s - MEAN) / (STD + 1e-4) for s in SCORES],
    "cispo": [(s - MEAN) / (STD + 1e-4) for s in SCORES],
    "dr-grpo": [s - MEAN for s in SCORES],
    "dapo": [(s - DAPO_MEAN) / (DAPO_STD + 1e-4) for s in DAPO],
    "rloo": [s - (sum(SCORES) - s) / 3 for s in SCORES],
    "opo": [s - WEIGHTED for s in SCORES],
    "remax": [s - GREEDY for s in SCORES],
    "reinforce": [s - MEAN for s in SCORES],
}


@pytest.mark.parametrize("preset", PER_ANSWER)
def test_advantages_per_answer(preset):
    _, rollout = rolled_out(preset)
    for found, expected, length in zip(by_answer(rollout.batch), PER_ANSWER[preset], LENGTHS, strict=True):
        assert found == pytest.approx([expected] * length, rel=1e-4)


def whitened(rows):
    """Over the tokens of both prompts, which are the same twice."""
    flat = flat_list(rows)
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((x - mean) ** 2 for x in flat) / len(flat))
    return [[(x - mean) / std for x in row] for row in rows]


def test_advantages_of_reinforce_pp_are_whitened_returns():
    """Without KL every token's return is the score; with it, what is still to be paid is taken off."""
    _, rollout = rolled_out("reinforce++", **{"algorithm.kl_coef": 0.0})
    expected = whitened([[s] * n for s, n in zip(SCORES, LENGTHS, strict=True)])
    assert flat_list(by_answer(rollout.batch)) == pytest.approx(flat_list(expected), rel=1e-3)

    learner = learner_of(small("reinforce++"), score, script=script)
    with torch.no_grad():
        for p in learner.policy.model.parameters():
            p.mul_(1.5)  # away from the reference
    rollout = learner.collect(0)
    mask, kl = trained(rollout.batch), rollout.kl
    rows = []
    for i, s in list(enumerate(SCORES)) * 2:
        tokens = kl[i + 4 * (len(rows) >= 4)][mask[i + 4 * (len(rows) >= 4)]].tolist()
        rows.append([s - 0.01 * sum(tokens[t:]) for t in range(len(tokens))])
    found = rollout.batch.advantages[mask].tolist()
    assert kl[mask].abs().max() > 0.1
    assert found == pytest.approx(flat_list(whitened(rows)), rel=1e-3, abs=1e-4)


def test_advantages_of_reinforce_pp_baseline_are_centred_then_whitened():
    _, rollout = rolled_out("reinforce++-baseline")
    expected = whitened([[s - MEAN] * n for s, n in zip(SCORES, LENGTHS, strict=True)])
    assert flat_list(by_answer(rollout.batch)) == pytest.approx(flat_list(expected), rel=1e-3)


def clip(rho, a, low, high):
    return max(-a * rho, -a * min(max(rho, 1 - low), 1 + high))


def token_losses(loss, o, new, old, a):
    """One answer's losses by the papers' formulas, in Python floats."""
    rho = [math.exp(n - p) for n, p in zip(new, old, strict=True)]
    if loss == "reinforce":
        return [-x * n for n, x in zip(new, a, strict=True)]
    if loss == "cispo":
        return [-min(max(r, 1 - o.clip_low), 1 + o.clip_high) * x * n for r, x, n in zip(rho, a, new, strict=True)]
    if loss == "gspo":
        s = math.exp(sum(n - p for n, p in zip(new, old, strict=True)) / len(new))
        return [clip(s, x, o.clip_low, o.clip_high) for x in a]
    return [clip(r, x, o.clip_low, o.clip_high) for r, x in zip(rho, a, strict=True)]


def added_up(rows, mode, norm):
    """The five ways of counting, over a list of answers' token losses."""
    tokens = sum(len(row) for row in rows)
    return {
        "token-mean": sum(map(sum, rows)) / tokens,
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum": sum(map(sum, rows)) / len(rows),
        "seq-mean-token-sum-norm": sum(map(sum, rows)) / len(rows) / norm,
    }[mode]


@pytest.mark.parametrize("preset", RLOptions.presets)
def test_the_policy_loss_of_every_preset_is_its_formula(preset):
    """With log-probs that are far from the old ones, so that every clip bites somewhere."""
    learner, rollout = rolled_out(preset, **{"sampling.max_new_tokens": 4})
    o, batch = learner.options.algorithm, rollout.batch
    generator = torch.Generator().manual_seed(3)
    old = -3 * torch.rand(batch.ids.shape, generator=generator)
    new = old + 0.8 * torch.randn(batch.ids.shape, generator=generator)
    batch = dataclasses.replace(batch, old_logprobs=old)
    mask = trained(batch)
    rows = [
        token_losses(o.policy_loss, o, new[i][mask[i]].tolist(), old[i][mask[i]].tolist(), a)
        for i, a in enumerate([batch.advantages[i][mask[i]].tolist() for i in range(8)])
    ]
    zeros = torch.zeros(batch.ids.shape)
    terms = algorithm_of(o, Coefficients(max_new_tokens=4)).loss(Outputs(new, zeros, zeros), batch)
    term = terms["policy"]
    found = aggregate(term.values, term.mask, mode=term.mode, norm=term.norm)
    assert float(found) == pytest.approx(added_up(rows, o.aggregate, 4), rel=1e-4, abs=1e-6)
    assert ("value" in terms) == (o.name == "ppo")


@pytest.mark.parametrize("preset", RLOptions.presets)
def test_gradients_of_the_policy_loss_are_those_of_finite_differences(preset):
    learner, rollout = rolled_out(preset)
    o = learner.options.algorithm
    generator = torch.Generator().manual_seed(5)
    batch = rollout.batch
    old = -3 * torch.rand(batch.ids.shape, generator=generator, dtype=torch.float64)
    new = old + 0.5 * torch.randn(batch.ids.shape, generator=generator, dtype=torch.float64)
    batch = dataclasses.replace(batch, old_logprobs=old, advantages=batch.advantages.double())
    zeros = torch.zeros(batch.ids.shape, dtype=torch.float64)
    loss = algorithm_of(o, Coefficients(max_new_tokens=4)).loss

    def total(logprobs):
        term = loss(Outputs(logprobs, zeros, zeros), batch)["policy"]
        return aggregate(term.values, term.mask, mode=term.mode, norm=term.norm)

    leaf = new.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(leaf), leaf)
    assert (gradient[~trained(batch)] == 0).all()
    if o.policy_loss in ("cispo", "gspo"):
        # cispo's weight and gspo's sequence ratio are constants: only the direct path has a gradient.
        assert gradient[trained(batch)].abs().max() > 0
        return
    numeric = torch.zeros_like(new)
    for i, j in trained(batch).nonzero().tolist():
        step = torch.zeros_like(new)
        step[i, j] = 1e-6
        numeric[i, j] = (total(new + step) - total(new - step)) / 2e-6
    torch.testing.assert_close(gradient, numeric, rtol=1e-5, atol=1e-7)


def test_clipped_positions_are_those_whose_loss_has_no_gradient():
    """cispo's are those whose weight is at its end; gspo clips whole answers."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    old = torch.zeros(2, 3)
    new = torch.tensor([[0.5, -0.5, 0.0], [0.5, -0.5, 0.3]])
    a = torch.tensor([[1.0] * 3, [-1.0] * 3])
    o = AlgorithmOptions()
    low, high = clipped(o, new, old, a, mask)
    assert high.tolist() == [[True, False, False], [False] * 3]
    assert low.tolist() == [[False] * 3, [False, True, False]]
    low, high = clipped(dataclasses.replace(o, loss="cispo", clip_low=1.0), new, old, a, mask)
    assert high.tolist() == [[True, False, False], [True, False, True]]
    assert not low.any()
    low, high = clipped(dataclasses.replace(o, loss="gspo", clip_low=0.01, clip_high=0.01), new, old, -a, mask)
    assert not low.any()
    assert high.tolist() == [[False] * 3, [True] * 3]


# -- ReMax ---------------------------------------------------------------------------------------------------------------


def test_remax_asks_one_greedy_answer_per_prompt_that_is_recorded_and_not_trained():
    learner, rollout = rolled_out("remax")
    assert len(rollout.trajectories) == 8
    assert rollout.batch.baselines.tolist() == pytest.approx([GREEDY] * 8)
    assert rollout.scored[0].extras == {"greedy_answer": "aa", "greedy_score": GREEDY}
    learner.update(rollout)
    assert learner.metrics()["reward"] == pytest.approx(MEAN), "the greedy answers are in no statistic"


def test_remax_leaves_out_answers_whose_greedy_baseline_failed():
    def fails(sample):
        return None if sample.completion == "aa" and sample.prompt_index == 0 else score(sample)

    batch = learner_of(small("remax"), fails, script=script).collect(0).batch
    assert not trained(batch)[:4].any()
    assert (batch.verdicts[:4] == Verdict.REWARD_FAILED).sum() == sum(LENGTHS)
    assert trained(batch)[4:].sum() == sum(LENGTHS)


# -- dynamic sampling ------------------------------------------------------------------------------------------------------

MANY = [{"prompt": f"{i:02d}:"} for i in range(24)]


def dynamic(useful, **settings):
    """A DAPO learner on 24 rows whose groups are flat unless `useful(row's number)`."""

    def reward(sample):
        number = int(sample.row["prompt"][:2])
        return float(sample.sample_index % 2) if useful(number) else 1.0

    settings = {"prompts": 4, "samples": 2, "algorithm.overlong_buffer": None, **settings}
    return learner_of(small("dapo", **settings), reward, script=script, rows=MANY)


def rows_of(rollout):
    return list(dict.fromkeys(rollout.rows))


def test_flat_groups_are_replaced_in_the_order_of_the_data():
    learner = dynamic(lambda n: n % 2 == 0)
    order = RowOrder(24, seed=0).take(24)
    rollout = learner.collect(0)
    taken = learner.collector.order.taken
    assert rows_of(rollout) == [n for n in order if n % 2 == 0][:4]
    assert order[taken - 1] == rows_of(rollout)[-1], "not a row more than needed was asked"
    assert trained(rollout.batch).any(dim=1).all()
    assert rollout.batch.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    learner.update(rollout)
    m = learner.metrics()
    assert m["resample/prompts"] == taken > 4
    assert m["resample/flat"] == taken - 4
    assert m["resample/reward"] == pytest.approx((4 * 0.5 + (taken - 4) * 1.0) / taken)
    assert m["reward"] == 0.5, "of the answers that are trained"
    second = learner.collect(1)
    assert set(rows_of(second)) <= set(order[taken:]), "no row comes twice in a pass"
    assert second.batch.groups.tolist() == [4, 4, 5, 5, 6, 6, 7, 7]


def test_rounds_end_at_the_cap_and_flat_groups_then_fill_the_step_untrained():
    learner = dynamic(lambda n: False, **{"algorithm.resample": 3})
    rollout = learner.collect(0)
    assert learner.collector.order.taken == 12
    assert len(rollout.trajectories) == 8
    assert not trained(rollout.batch).any()
    before = weights_of(learner)
    learner.update(rollout)
    assert learner.metrics()["resample/rounds"] == 3
    assert learner.metrics()["optimizer_steps"] == 0
    assert all(torch.equal(before[name], p) for name, p in learner.module.named_parameters())


def test_nothing_is_replaced_where_nothing_is_flat():
    learner = dynamic(lambda n: True)
    rollout = learner.collect(0)
    assert rows_of(rollout) == RowOrder(24, seed=0).take(4)
    assert learner.collector.order.taken == 4


def test_the_answers_of_replacements_have_their_own_random_numbers():
    learner = dynamic(lambda n: n % 2 == 0)
    seen = []
    inner = learner.engine.stream
    learner.engine.stream = lambda requests: seen.extend(requests) or inner(requests)
    learner.collect(0)
    assert [r.prompt for r in seen] == list(range(len(seen)))
    assert len(seen) > 4


def test_dynamic_sampling_goes_on_exactly_from_its_state():
    useful = lambda n: n % 3 == 0
    whole, part = dynamic(useful), dynamic(useful)
    whole.collect(0)
    part.collect(0)
    again = dynamic(useful)
    again.load_state_dict(part.state_dict())
    one, other = whole.collect(1), again.collect(1)
    assert one.rows == other.rows
    assert [(t.ids, t.group) for t in one.trajectories] == [(t.ids, t.group) for t in other.trajectories]
    assert one.rows != whole.collect(2).rows


def test_ranks_share_the_replacements():
    """Two ranks in step: together they take each row once, and each fills its own half."""
    from test_algorithms import in_step

    from rolecall.train.ranks import Ranks

    useful = lambda n: n % 3 == 0
    both = [dynamic(useful), dynamic(useful)]

    def rank(i, all_sum):
        collector = both[i].collector
        collector.ranks = Ranks(number=i, count=2, all_sum=all_sum)
        seen = []
        inner = both[i].engine.stream
        both[i].engine.stream = lambda requests: seen.extend(requests) or inner(requests)
        found = collector.collect(0)
        return found, [r.prompt_ids for r in seen], collector.order.taken

    (first, asked, taken), (second, asked_too, taken_too) = in_step(rank)
    assert taken == taken_too == len(asked) + len(asked_too)
    assert len({*asked, *asked_too}) == taken
    assert len(first.trajectories) == len(second.trajectories) == 4
    assert {t.group for t in first.trajectories} == {0, 2}
    assert {t.group for t in second.trajectories} == {1, 3}


# -- entropy towards a target --------------------------------------------------------------------------------------------


def test_the_entropy_bonus_is_steered_and_its_coefficient_is_state():
    settings = {"algorithm.entropy_target": 100.0, "algorithm.entropy_rate": 1e-3, "algorithm.entropy_max": 0.15}
    learner = learner_of(small("grpo", **settings), score, script=script)
    steps = learner.update(learner.collect(0))
    assert steps[0].result.terms.keys() == {"policy", "entropy"}
    entropy = learner.metrics()["entropy"]
    assert learner.metrics()["entropy_coef"] == 0.0, "the one that was used"
    assert learner.entropy.coef == pytest.approx(1e-3 * (100 - entropy))
    other = learner_of(small("grpo", **settings), score, script=script)
    other.load_state_dict(learner.state_dict())
    assert other.entropy.coef == learner.entropy.coef
    learner.update(learner.collect(1))
    learner.update(learner.collect(2))
    assert learner.entropy.coef == 0.15


def test_a_bonus_above_the_target_fades_to_nothing():
    settings = {"algorithm.entropy_target": 0.0, "algorithm.entropy_coef": 0.05, "algorithm.entropy_rate": 10.0}
    learner = learner_of(small("grpo", **settings), score, script=script)
    steps = learner.update(learner.collect(0))
    assert learner.metrics()["loss"] == pytest.approx(
        steps[0].result.terms["policy"] - 0.05 * steps[0].result.terms["entropy"], rel=1e-4
    )
    assert learner.entropy.coef == 0.0
    assert "entropy" in learner.update(learner.collect(1))[0].result.terms


# -- choices ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        ("rloo", {"algorithm.epochs": 2}, "set algorithm.loss to clip"),
        ("remax", {"algorithm.resample": 2}, "remax learns from those too"),
        ("ppo", {"algorithm.loss": "gspo"}, "differ from token to token"),
        ("cispo", {"algorithm.dual_clip": 3.0}, "belongs to the loss clip"),
        ("opo", {"samples": 1}, "samples must be at least 2"),
        ("dapo", {"algorithm.overlong_buffer": 9}, "longer than sampling.max_new_tokens 4"),
        ("dapo", {"algorithm.overlong_buffer": 0}, "must be above 0"),
        ("grpo", {"algorithm.entropy_target": 1.0, "algorithm.entropy_coef": 0.5}, "between 0 and entropy_max"),
        ("grpo", {"algorithm.resample": -1}, "must be 0"),
        ("dapo", {"env": "calculator"}, "episodes of an environment are not drawn again"),
        ("remax", {"env": "calculator"}, "which episodes of an environment lack"),
        ("remax", {"replay.share": 0.5}, "which stored answers lack"),
        ("dapo", {"from_run": "runs/rl-1"}, "nothing is sampled"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(preset, settings, message):
    with pytest.raises(Exception, match=message):
        small(preset, **settings)


def test_the_plan_names_what_is_sampled_beside():
    assert "up to 4 rounds of sampling per step, at most 8 prompts" in small("dapo").plan()
    assert "2 greedy answers" in small("remax").plan()
