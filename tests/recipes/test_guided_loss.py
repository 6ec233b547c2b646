"""Samples whose behaviour read lessons: what their ratio is to, their upper clip, and what trains."""

import math
from dataclasses import replace

import pytest
import torch
from learners import learner_of, options_of

from rolecall.config.rl import AlgorithmOptions
from rolecall.maths.roles import Role, Verdict
from rolecall.policy.model import Outputs
from rolecall.recipes.algorithms import Coefficients, algorithm_of, boosted
from rolecall.recipes.collect import Collected
from rolecall.recipes.guard import Guard
from rolecall.rewards.records import Scored
from rolecall.types import Batch, Trajectory

P, C, S = (int(r) for r in (Role.PROMPT, Role.CONTENT, Role.STOP))
NAN = float("nan")


def batch_of(log_ratio, advantages, guided, dtype=torch.float64):
    """One trained position per row, after a prompt that holds anything."""
    n = len(log_ratio)
    verdicts = torch.tensor([[int(Verdict.GIVEN), int(Verdict.TRAINED)]] * n, dtype=torch.uint8)
    new = torch.tensor([[NAN, x] for x in log_ratio], dtype=dtype, requires_grad=True)
    batch = Batch(
        ids=torch.ones(n, 2, dtype=torch.long),
        roles=torch.tensor([[P, C]] * n, dtype=torch.uint8),
        groups=torch.zeros(n, dtype=torch.long),
        verdicts=verdicts,
        old_logprobs=torch.tensor([[NAN, 0.0]] * n, dtype=dtype),
        advantages=torch.tensor([[0.0, a] for a in advantages], dtype=dtype),
        guided=torch.tensor(guided),
    )
    return new, batch


def values(new, batch, *, high):
    o, coefficients = AlgorithmOptions(clip_low=0.2, clip_high=0.2), Coefficients(max_new_tokens=1)
    loss = algorithm_of(o, coefficients).loss
    if high is not None:
        loss = boosted(loss, algorithm_of(replace(o, clip_high=high), coefficients).loss)
    return loss(Outputs(logprobs=new, entropy=torch.zeros_like(new), values=None), batch)["policy"]


# ratio, advantage -> loss and its gradient by the log-prob, with an upper clip of 0.2 and of 0.6
GOLDEN = [
    (1.0, 1.0, (-1.0, -1.0), (-1.0, -1.0)),
    (1.5, 1.0, (-1.2, 0.0), (-1.5, -1.5)),
    (2.0, 1.0, (-1.2, 0.0), (-1.6, 0.0)),
    (0.5, 1.0, (-0.5, -0.5), (-0.5, -0.5)),
    (1.5, -2.0, (3.0, 3.0), (3.0, 3.0)),
    (0.5, -2.0, (1.6, 0.0), (1.6, 0.0)),
]


@pytest.mark.parametrize("guided", [True, False])
def test_boosting_widens_the_upper_clip_of_guided_samples_only(guided):
    ratios, advantages, plain, wide = zip(*GOLDEN, strict=True)
    new, batch = batch_of([math.log(r) for r in ratios], advantages, [guided] * len(GOLDEN))
    term = values(new, batch, high=0.6)
    gradient = torch.autograd.grad(term.values.sum(), new)[0]
    for row, expected in enumerate(wide if guided else plain):
        assert float(term.values[row, 1].detach()) == pytest.approx(expected[0], abs=1e-12)
        assert float(gradient[row, 1]) == pytest.approx(expected[1], abs=1e-12)
    assert (gradient[:, 0] == 0).all(), "what was given has no gradient, whatever it holds"
    assert (term.mask == torch.tensor([[False, True]])).all()


def reference(log_ratio, advantages, guided, high):
    """In loops."""
    found = []
    for x, a, is_guided in zip(log_ratio, advantages, guided, strict=True):
        r, top = math.exp(x), 1 + (high if is_guided else 0.2)
        found.append(max(-a * r, -a * min(max(r, 0.8), top)))
    return found


def test_the_boosted_loss_equals_its_definition_on_random_rows():
    rng = torch.Generator().manual_seed(0)
    x, a = (torch.randn(64, generator=rng, dtype=torch.float64) for _ in range(2))
    guided = (torch.rand(64, generator=rng) < 0.5).tolist()
    new, batch = batch_of(x.tolist(), a.tolist(), guided)
    expected = torch.tensor(reference(x.tolist(), a.tolist(), guided, 0.6), dtype=torch.float64)
    torch.testing.assert_close(values(new, batch, high=0.6).values[:, 1].detach(), expected, atol=1e-12, rtol=0)
    plain = values(new, replace(batch, guided=None), high=None).values
    unguided = ~torch.tensor(guided)
    assert torch.equal(values(new, batch, high=0.6).values[unguided], plain[unguided]), "bit for bit"


# -- through the learner ---------------------------------------------------------------------------------------------


class Given:
    """Trajectories in the place of sampling."""

    def __init__(self, trajectories, totals):
        self.trajectories, self.totals = trajectories, totals

    def collect(self, step):
        n = len(self.trajectories)
        scored = [Scored(scores={"plain": t}, total=t) for t in self.totals]
        return Collected(
            trajectories=self.trajectories, prompts=[""] * n, answers=[""] * n, scored=scored, rows=[0] * n, seed=0
        )

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def sampled(learner, guided):
    """Four answers; log-probs of the first `guided` are a prompt's that is not in the sample, of the others its own."""
    found = []
    for i in range(4):
        ids = (*range(40, 46), 60 + i, 70 + i, 258)
        t = Trajectory(ids=ids, roles=(P,) * 6 + (C, C, S), episode=i, turns=((6, 9),))
        if i < guided:
            t = replace(t, behaviour_prompt_ids=(*range(30, 46),))
        read = t.behaviour_prompt_ids or ids[:6]
        with torch.no_grad():
            out = learner.policy.model(torch.tensor([[*read, *ids[6:]]])).logits[0].log_softmax(-1)
        own = [float(out[len(read) - 1 + k, ids[6 + k]]) for k in range(3)]
        found.append(replace(t, behaviour_logprobs=(NAN,) * 6 + tuple(own)))
    return found


def learner_with(guided=2, totals=(1.0, 0.0, 1.0, 0.0), **settings):
    options = options_of(
        **{"prompts": 1, "samples": 4, "lessons.share": 0.5, "env": "guessing", "optim.lr": 1e-3, **settings}
    )
    learner = learner_of(options, lambda s: 0.0)
    learner.collector = Given(sampled(learner, guided), totals)
    guard = Guard(
        options, policy=learner.policy, updater=learner.updater, engine=learner.engine, engine_dtype=torch.float32
    )
    learner.watches = [guard]
    return learner


@pytest.mark.parametrize("minibatches", [1, 2])
def test_guided_rows_have_the_behaviours_log_probs_as_old_ones_and_the_others_the_trainers(minibatches):
    learner = learner_with(**{"algorithm.minibatches": minibatches})
    rollout = learner.collect(0)
    batch, own = rollout.batch, slice(6, 9)
    assert batch.guided.tolist() == [True, True, False, False]
    assert torch.equal(batch.old_logprobs[:2, own], batch.behaviour_logprobs[:2, own])
    torch.testing.assert_close(batch.old_logprobs[2:, own], batch.behaviour_logprobs[2:, own], atol=1e-4, rtol=0)
    steps = learner.update(rollout)
    found = learner.metrics()
    rows = {int(row): (mini, i) for mini in steps[:1] for i, row in enumerate(mini.rows)}
    for row, (mini, i) in rows.items():
        logprobs, term = mini.result.outputs.logprobs[i, own], mini.result.contributions["policy"][i, own]
        rho = (logprobs - batch.behaviour_logprobs[row, own]).exp().double()
        a = float(batch.advantages[row, 6])
        expected = torch.maximum(-a * rho, -a * rho.clamp(0.8, 1.2))
        count = sum(3 for _ in rows)
        torch.testing.assert_close(term, expected / count, atol=1e-5, rtol=1e-4)
    if minibatches == 1:
        assert found["policy/ratio"] == pytest.approx(1, abs=1e-5), "of the rows that read none"
    assert abs(found["lessons/ratio"] - 1) > 0.01
    assert found["sampling/sampling_logp_difference/max"] < 1e-4, "guided rows are no sign of an engine that is off"


def test_the_recomputed_ratio_starts_at_one_for_guided_rows_too():
    learner = learner_with(**{"lessons.ratio": "recomputed"})
    rollout = learner.collect(0)
    assert rollout.batch.old_logprobs is None, "detached: one optimiser step"
    (mini,) = learner.update(rollout)
    a = rollout.batch.advantages[:, 6:9]
    torch.testing.assert_close(mini.result.contributions["policy"][:, 6:9], (-a / 12).double(), atol=1e-6, rtol=1e-5)
    assert abs(learner.metrics()["lessons/ratio"] - 1) > 0.01, "still told as it is"


def test_without_a_guided_row_the_update_is_that_of_a_run_without_lessons():
    changed = []
    for share in (0.5, 0.0):
        learner = learner_with(0, **{"lessons.share": share, "algorithm.old_logprobs": "recompute"})
        learner.update(learner.collect(0))
        changed.append({n: p.detach().clone() for n, p in learner.module.named_parameters()})
    assert all(torch.equal(p, changed[1][n]) for n, p in changed[0].items())


def test_a_guided_token_without_a_log_prob_does_not_train():
    learner = learner_with()
    first, *rest = learner.collector.trajectories
    learner.collector.trajectories = [replace(first, behaviour_logprobs=(NAN,) * 9), *rest]
    batch = learner.collect(0).batch
    assert set(batch.verdicts[0, 6:9].tolist()) == {int(Verdict.BAD_RECORD)}
    assert set(batch.verdicts[1, 6:9].tolist()) == {int(Verdict.TRAINED)}


def test_importance_weights_leave_guided_rows_alone_whose_ratio_is_the_weight_already():
    how = {"replay.weigh_fresh": True, "replay.weights": "truncate", "algorithm.old_logprobs": "recompute"}
    batch = learner_with(**how).collect(0).batch
    assert (batch.weights[:2] == 1).all()
    assert ((batch.weights[2:, 6:9] - 1).abs() < 1e-3).all()


def test_guided_groups_are_replayed_with_the_ratio_to_what_the_behaviour_read():
    learner = learner_with(**{"replay.share": 0.5})
    learner.update(learner.collect(0))
    again = learner.collect(1)
    assert again.training.guided.tolist() == [True, True, False, False] + [False] * 4
    assert again.training.replayed.tolist() == [False] * 4 + [True] * 4
    own = slice(6, 9)
    assert torch.equal(again.training.behaviour_logprobs[4:, own], again.batch.behaviour_logprobs[:, own])
    steps = learner.update(again)
    assert not any(step.result.skipped for step in steps)
