"""The exact KL as an option of RL: its value and gradient against all logits, as measured and in the loss."""

import pytest
import torch
from learners import STOP, learner_of, options_of
from short_runs import GRPO_KL, guard_of
from short_runs import learner_of as guarded_learner
from short_runs import run as run_steps

from rolecall.maths.kl import exact_kl
from rolecall.policy.load import load
from rolecall.policy.lora import add_adapter
from rolecall.train.step import trained

A, B = ord("a"), ord("b")
ANSWERS = [(A, STOP), (A, B, STOP), (B, B, B, B), (STOP,)]
TEMPERATURE = 0.7


def moved(*, double=True, policy=None, **settings):
    """A learner whose policy is away from its reference."""
    policy = policy or load("tiny")
    if double:
        policy.model.double()
    settings = {
        "prompts": 2,
        "samples": 4,
        "sampling.max_new_tokens": 4,
        "sampling.temperature": TEMPERATURE,
        "optim.max_grad_norm": None,
        "algorithm.kl_kind": "exact",
        "algorithm.kl_coef": 0.5,
        **settings,
    }
    scores = (1.0, 0.5, 0.0, 0.0)
    learner = learner_of(
        options_of("grpo", **settings),
        lambda s: scores[s.sample_index],
        script=lambda request, sample: ANSWERS[sample],
        policy=policy,
    )
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.requires_grad:
                p.mul_(1.4)
    return learner


def logits_kl(policy, reference, batch, mask):
    """[batch, time] from transformers' own logits, row by row."""
    out = torch.zeros(batch.ids.shape, dtype=torch.float64)
    rows = []
    for ids, keep in zip(batch.ids, mask, strict=True):
        end = int(keep.nonzero().max()) + 1
        both = [m(input_ids=ids[None, :end]).logits[0, :-1] / TEMPERATURE for m in (policy, reference)]
        kl = exact_kl(both[0], both[1].detach())
        rows.append(torch.nn.functional.pad(kl, (1, out.shape[1] - end)))
    return torch.where(mask, torch.stack(rows), 0)


@pytest.mark.parametrize("source", ["auto", "recompute"])
def test_the_kl_that_is_measured_is_that_of_all_logits(source):
    learner = moved(**{"algorithm.old_logprobs": source})
    rollout = learner.collect(0)
    mask = trained(rollout.batch)
    expected = logits_kl(learner.policy.model, load("tiny").model.double(), rollout.batch, mask).float()
    assert expected[mask].min() > 0.001
    torch.testing.assert_close(rollout.kl.float(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(rollout.batch.rewards.sum(dim=1), rollout.batch.scores.float())


def test_kl_in_the_loss_has_the_gradient_of_all_logits():
    """The reward is flat, so that the KL is all that has a gradient."""
    learner, other = moved(), moved()
    for one in (learner, other):
        one.reward._function = lambda s: 1.0
    (step,) = learner.update(learner.collect(0))
    batch = other.collect(0).batch
    mask = trained(batch)
    kl = logits_kl(other.policy.model, load("tiny").model.double(), batch, mask)
    per_answer = kl.sum(dim=1) / mask.sum(dim=1)
    (0.5 * per_answer.mean()).backward()
    assert step.result.terms["kl"] == pytest.approx(per_answer.mean().item(), rel=1e-5)
    found = dict(learner.policy.model.named_parameters())
    for name, parameter in other.policy.model.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-4, atol=1e-8)


def test_with_an_adapter_it_is_the_kl_to_the_model_below():
    learner = moved(double=False, policy=add_adapter(load("tiny"), rank=4, alpha=8))
    rollout = learner.collect(0)
    mask = trained(rollout.batch)
    base = load("tiny").model
    expected = logits_kl(learner.policy.model, base, rollout.batch, mask)
    torch.testing.assert_close(rollout.kl.double(), expected.double(), rtol=1e-3, atol=1e-5)
    (step,) = learner.update(rollout)
    assert step.result.outputs.kl is not None


def test_a_critic_and_the_exact_kl_go_together():
    learner = moved(
        double=False,
        **{"algorithm.name": "ppo", "algorithm.critic": "shared", "algorithm.aggregate": "token-mean"},
    )
    (step,) = learner.update(learner.collect(0))
    assert step.result.terms.keys() == {"policy", "value", "kl"}
    assert step.result.outputs.values is not None


def test_a_guarded_run_with_it_trips_nothing():
    import dataclasses

    learner = guarded_learner(dataclasses.replace(GRPO_KL, kl_kind="exact"))
    guard_of(learner, probe_every=1)
    run_steps(learner, 2)
    assert learner.metrics()["kl"] >= 0
