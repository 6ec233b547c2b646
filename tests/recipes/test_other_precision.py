"""Fresh answers of an engine in another precision than the trainer's: weighed by whole answers unless somebody says no."""

import dataclasses

import pytest
import torch
from learners import learner_of, options_of, weights_of

from rolecall.policy.load import load
from rolecall.rollout.native import NativeEngine
from rolecall.train.step import trained

BF16 = {"engine.dtype": "bfloat16"}
SMALL = {"prompts": 2, "samples": 4, "sampling.max_new_tokens": 6, "optim.lr": 1e-3}


def varied(sample) -> float:
    return sum(i % 7 for i in sample.completion_ids) / (6 * max(1, len(sample.completion_ids)))


def learner(**settings):
    policy, options = load("tiny"), options_of("grpo", **SMALL, **settings)
    engine = NativeEngine(
        policy.model,
        policy.tokenizer,
        stop_ids=policy.stop_ids,
        context_length=policy.context_length,
        dtype=getattr(torch, options.engine.dtype or "float32"),
    )
    return learner_of(options, varied, policy=policy, engine=engine)


@pytest.mark.parametrize(
    ("settings", "weighed"),
    [
        ({}, False),
        ({"engine.dtype": "float32"}, False),
        (BF16, True),
        ({"policy.mixed_precision": "bf16"}, True),
        ({"policy.mixed_precision": "bf16", **BF16}, False),
        ({"policy.dtype": "bfloat16"}, False),
        ({"policy.dtype": "bfloat16", "engine.dtype": "float32"}, True),
        ({"replay.weigh_fresh": False, **BF16}, False),
        ({"algorithm.old_logprobs": "behaviour", **BF16}, False),
        ({"algorithm.old_logprobs": "detach", **BF16}, False),
        ({"from_run": "runs/x", **BF16}, False),
        ({"engine.servers": ("http://a",), "engine.name": "native"}, False),
        ({"engine.servers": ("http://a",), "engine.name": "vllm"}, True),
        ({"engine.servers": ("http://a",), "engine.name": "sglang"}, True),
    ],
)
def test_when_it_is_done(settings, weighed):
    options = options_of("grpo", **settings)
    assert (options.fresh_weights is not None) is weighed
    assert (options.weights_line is not None) is weighed
    assert (options.old_source == "recompute") is weighed
    assert ("weighed" in options.plan()) is weighed


def test_what_the_user_asks_for_goes_before():
    asked = {"replay.weigh_fresh": True, "replay.weights": "mask", "algorithm.old_logprobs": "recompute"}
    options = options_of("grpo", **asked, **BF16)
    assert options.fresh_weights == options.replay
    assert options.weights_line is None


def test_the_weight_is_that_of_the_whole_answer():
    made = learner(**BF16)
    rollout = made.collect(0)
    batch, mask = rollout.batch, trained(rollout.batch)
    gap = torch.where(mask, batch.old_logprobs - batch.behaviour_logprobs, 0)
    expected = gap.sum(dim=1, keepdim=True).exp().clamp(max=3).expand_as(gap)
    assert float((expected - 1).abs().max()) > 1e-5
    torch.testing.assert_close(batch.weights[mask], expected[mask])
    made.update(rollout)
    assert 0.9 < made.metrics()["sampling/weight_ess"] <= 1
    off = learner(**{"replay.weigh_fresh": False, **BF16})
    off.update(off.collect(0))
    assert not all(torch.equal(p, weights_of(off)[name]) for name, p in weights_of(made).items())


def test_in_one_precision_nothing_is_weighed_and_no_number_is_new():
    made = learner()
    rollout = made.collect(0)
    assert rollout.batch.weights is None
    assert rollout.batch.old_logprobs is None
    made.update(rollout)
    assert not [name for name in made.metrics() if name.startswith("sampling/weight")]


def test_the_weight_of_a_cut_episode_is_that_of_all_its_rows():
    from rolecall.experience.batches import Joined
    from rolecall.recipes.replay import start_weights

    made = learner(**BF16)
    rollout = made.collect(0)
    pieces = [dataclasses.replace(t, episode=i // 2) for i, t in enumerate(rollout.trajectories)]
    found = start_weights(made.options.fresh_weights, rollout.batch, Joined(pieces), inside_only=False)
    mask = trained(rollout.batch)
    gap = torch.where(mask, rollout.batch.old_logprobs - rollout.batch.behaviour_logprobs, 0).sum(dim=1)
    pairs = gap.view(-1, 2).sum(dim=1).exp().repeat_interleave(2)[:, None].expand_as(mask)
    torch.testing.assert_close(found[mask], pairs[mask])
