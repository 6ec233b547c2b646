"""Advantages and losses of the presets against what is worked out by hand."""

import dataclasses
import threading

import pytest
import torch
from learners import ROWS, STOP, learner_of, options_of

from rolecall.config.rl import AlgorithmOptions, RLOptions
from rolecall.maths import advantages as adv
from rolecall.policy.load import load
from rolecall.policy.model import Outputs
from rolecall.recipes.algorithms import ADVANTAGES, Coefficients, algorithm_of, required
from rolecall.train.data import RowOrder
from rolecall.train.step import trained

A, B = ord("a"), ord("b")
ANSWERS = [(A, STOP), (A, B, STOP), (B, B, B, B), (STOP,)]
SCORES = (1.0, 0.5, 0.0, 0.0)


def small(preset="grpo", **settings):
    settings = {"prompts": 2, "samples": 4, "sampling.max_new_tokens": 4, "optim.lr": 1e-3, **settings}
    return options_of(preset, **settings)


def scripted(options, **more):
    return learner_of(
        options,
        lambda s: SCORES[s.sample_index],
        script=lambda request, sample: ANSWERS[sample],
        **more,
    )


def test_a_grpo_step_has_the_gradient_of_the_formula_through_all_logits():
    """Worked out with transformers' own logits: mean over answers of the mean over tokens of - A log pi."""
    policy, other = load("tiny"), load("tiny").model.double()
    policy.model.double()
    options = small(**{"optim.max_grad_norm": None, "sampling.temperature": 0.7})
    learner = scripted(options, policy=policy)
    rollout = learner.collect(0)
    learner.update(rollout)

    scores = torch.tensor(SCORES, dtype=torch.float64)
    advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
    total = torch.zeros((), dtype=torch.float64)
    for prompt in RowOrder(4, seed=0).take(2):
        start = policy.tokenizer(ROWS[prompt]["prompt"])["input_ids"]
        for answer, advantage in zip(ANSWERS, advantages, strict=True):
            ids = torch.tensor([[*start, *answer]])
            logprobs = (other(input_ids=ids).logits / 0.7).log_softmax(-1)[0, :-1]
            chosen = logprobs.gather(-1, ids[0, 1:, None])[-len(answer) :, 0]
            total = total - advantage * chosen.mean() / 8
    total.backward()
    found = dict(policy.model.named_parameters())
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-5, atol=1e-7)
    assert learner.metrics()["grad_norm"] > 1e-3
    # The ratio is 1, so the loss itself is minus the mean of the advantages.
    assert learner.metrics()["loss"] == pytest.approx(-advantages.mean().item(), abs=1e-6)


def test_grpo_scales_by_group_batch_or_not_at_all():
    scores = torch.tensor(SCORES)
    for scale, expected in (
        ("group", adv.grpo(scores, torch.zeros(4, dtype=torch.long))),
        ("none", scores - scores.mean()),
        ("batch", adv.grpo(torch.cat([scores, scores]), torch.arange(8) // 4, scale="batch")[:4]),
    ):
        batch = scripted(small(**{"algorithm.scale": scale})).collect(0).batch
        torch.testing.assert_close(batch.advantages[:4, 3], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_an_answer_without_a_score_is_left_out_of_means_and_deviations(scale):
    learner = learner_of(
        small(**{"algorithm.scale": scale}),
        lambda s: None if s.sample_index == 3 else SCORES[s.sample_index] + s.prompt_index,
        script=lambda request, sample: ANSWERS[sample],
    )
    known, groups = torch.tensor([*SCORES[:3], *(score + 1 for score in SCORES[:3])]), torch.arange(6) // 3
    expected = adv.grpo(known, groups, scale=None if scale == "none" else scale)
    rows = torch.tensor([0, 1, 2, 4, 5, 6])
    torch.testing.assert_close(learner.collect(0).batch.advantages[rows, 3], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("baseline", "expected"), [("none", 0.0), ("mean", 0.375), ("prompt", 0.375), ("ema", 0.0)])
def test_reinforce_subtracts_its_baseline(baseline, expected):
    batch = scripted(small("reinforce", **{"algorithm.baseline": baseline})).collect(0).batch
    torch.testing.assert_close(batch.advantages[:4, 3], torch.tensor(SCORES) - expected)


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, {}) for name in ("grpo", "rloo", "opo", "remax", "reinforce++-baseline")]
    + [("reinforce", {"baseline": kind}) for kind in ("mean", "ema", "prompt", "none")],
)
def test_an_answer_without_a_score_has_advantage_0(name, settings):
    whole = scripted(small()).collect(0).batch
    scores = torch.tensor([1.0, torch.nan, 0.5, 0.0, 3.0, 2.0, 1.0, 1.0])
    batch = dataclasses.replace(whole, scores=scores, baselines=torch.zeros(8))
    found = algorithm_of(AlgorithmOptions(name=name, **settings), Coefficients(max_new_tokens=4)).advantage(batch)
    assert found.isfinite().all()
    assert (found[1] == 0).all()
    if settings.get("baseline") in ("ema", "none"):
        torch.testing.assert_close(found, scores.nan_to_num(), msg="there is no average yet")


def test_statistics_of_the_batch_are_over_all_ranks():
    """Two halves of a batch, each told the sums of both, get the advantages of the whole."""
    whole = scripted(small("ppo", samples=4)).collect(0).batch
    whole = dataclasses.replace(whole, scores=torch.tensor([1.0, 0.5, 0.0, 0.0, 3.0, 2.0, 1.0, 1.0]))
    rewards = torch.where(trained(whole), torch.randn(whole.ids.shape, generator=torch.Generator().manual_seed(0)), 0)
    whole = dataclasses.replace(whole, rewards=rewards)
    halves = [whole.rows(slice(0, 4)), whole.rows(slice(4, 8))]
    for options in (
        AlgorithmOptions(name="reinforce", baseline="mean"),
        AlgorithmOptions(scale="batch"),
        AlgorithmOptions(name="ppo", critic="shared", whiten_rewards=True),
    ):
        expected = algorithm_of(options, Coefficients(max_new_tokens=4)).advantage(whole)
        first = in_step(
            lambda i, all_sum, o=options: algorithm_of(o, Coefficients(max_new_tokens=4, all_sum=all_sum)).advantage(
                halves[i]
            )
        )
        for whole_part, parts in zip(_tuple(expected), zip(*map(_tuple, first), strict=True), strict=True):
            torch.testing.assert_close(torch.cat(parts), whole_part, rtol=1e-5, atol=1e-5)


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


def in_step(work):
    """Run `work(rank, all_sum)` for two ranks, where all_sum really adds over both."""
    barrier, shared, results = threading.Barrier(2), [None, None], [None, None]

    def rank(i):
        def all_sum(x):
            shared[i] = x
            barrier.wait()
            total = shared[0] + shared[1]
            barrier.wait()
            return total

        results[i] = work(i, all_sum)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return results


def test_the_norm_is_the_longest_answer_unless_given():
    batch = scripted(small()).collect(0).batch
    zeros = torch.zeros(batch.ids.shape)
    for norm, expected in ((None, 4.0), (7.0, 7.0)):
        options = AlgorithmOptions(aggregate="seq-mean-token-sum-norm", norm=norm)
        loss = algorithm_of(options, Coefficients(max_new_tokens=4)).loss
        assert loss(Outputs(zeros, zeros, None), batch)["policy"].norm == expected


def test_a_term_that_needs_what_was_not_computed_says_so():
    batch = scripted(small()).collect(0).batch
    zeros = torch.zeros(batch.ids.shape)
    loss = algorithm_of(AlgorithmOptions(kl_coef=0.1), Coefficients(max_new_tokens=4, kl_coef=0.1)).loss
    with pytest.raises(ValueError, match="not computed"):
        loss(Outputs(zeros, zeros, None), batch)


def test_what_is_optimised_is_what_the_options_name():
    batch = scripted(small("ppo", **{"samples": 4, "algorithm.entropy_coef": 0.3})).collect(0).batch
    zeros = torch.zeros(batch.ids.shape)
    options = AlgorithmOptions(name="ppo", critic="shared", entropy_coef=0.3, vf_coef=0.2)
    terms = algorithm_of(options, Coefficients(max_new_tokens=4, entropy_coef=0.3)).loss(
        Outputs(zeros, zeros, zeros), batch
    )
    assert {name: term.coef for name, term in terms.items()} == {"policy": 1.0, "value": 0.2, "entropy": -0.3}
    assert required(batch.returns).shape == batch.ids.shape


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "reinforce", "epochs": 2}, "one optimiser step"),
        ({"epochs": 2, "old_logprobs": "detach"}, "use recompute"),
        ({"name": "ppo"}, "needs a critic"),
        ({"critic": "shared"}, "uses no critic"),
        ({"kl_target": 1.0}, "must start above 0"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmOptions(**settings)


def test_every_preset_is_a_valid_choice():
    for preset in RLOptions.presets:
        assert options_of(preset).algorithm.name in ADVANTAGES
