"""What a rollout is made of, what an update leaves behind, and that every preset learns."""

import dataclasses
import json
from typing import ClassVar

import pytest
import torch
from learners import ROWS, STOP, Plain, learner_of, options_of, weights_of

import rolecall
from rolecall.jobs import rl
from rolecall.maths.roles import Role, Verdict
from rolecall.policy.model import Outputs, PolicyModel
from rolecall.recipes.algorithms import required
from rolecall.recipes.prepare import Preparer
from rolecall.recipes.rl import engine_weights
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.train.score import score
from rolecall.train.state import write_state
from rolecall.train.step import Term, trained
from rolecall.types import Finish

A, B = ord("a"), ord("b")
ANSWERS = [(A, STOP), (A, B, STOP), (B, B, B, B), (STOP,)]
"""Ended, ended, cut off at 4 tokens, ended at once."""


def script(request, sample):
    return ANSWERS[sample]


def small(preset="grpo", **settings):
    settings = {"prompts": 2, "samples": 4, "sampling.max_new_tokens": 4, "optim.lr": 1e-3, **settings}
    return options_of(preset, **settings)


def count_a(sample):
    return float(sample.completion.count("a")) / 4


class Aborting(ScriptedEngine):
    """Breaks off the second answer of every prompt."""

    def stream(self, requests):
        for c in super().stream(requests):
            yield dataclasses.replace(c, finish=Finish.ABORT) if c.sample == 1 else c


# -- rollouts ----------------------------------------------------------------------------------------------------


def test_roles_and_verdicts_follow_from_how_an_answer_ended():
    rollout = learner_of(small(), count_a, script=script).collect(0)
    batch = rollout.batch
    answers = [[Role(r).name for r in row[3:] if r != Role.PAD] for row in batch.roles[:4].tolist()]
    assert answers == [["CONTENT", "STOP"], ["CONTENT", "CONTENT", "STOP"], ["CONTENT"] * 4, ["STOP"]]
    assert [t.finish for t in rollout.trajectories[:4]] == [Finish.STOP, Finish.STOP, Finish.LENGTH, Finish.STOP]
    assert batch.verdicts[0].tolist() == [Verdict.GIVEN] * 3 + [Verdict.TRAINED] * 2 + [Verdict.PADDING] * 2
    assert rollout.answers[:4] == ["a", "ab", "bbbb", ""]
    assert batch.groups.tolist() == [0] * 4 + [1] * 4


def test_an_answer_that_was_broken_off_is_recorded_but_never_trained_or_compared():
    learner = learner_of(small(), count_a, engine=Aborting(script, stop_ids=(STOP,)))
    batch = learner.collect(0).batch
    assert (batch.verdicts[1] == Verdict.BAD_RECORD).sum() == 3
    assert batch.scores[1].isnan()
    scores = torch.tensor([0.25, 0.0, 0.0])
    expected = (scores - scores.mean()) / (scores.std() + 1e-4)
    torch.testing.assert_close(
        batch.advantages[[0, 2, 3]].amax(dim=1) + batch.advantages[[0, 2, 3]].amin(dim=1), expected
    )


def test_a_reward_that_failed_is_left_out_of_its_group_and_counted():
    learner = learner_of(small(), lambda s: None if s.sample_index == 0 else count_a(s), script=script)
    rollout = learner.collect(0)
    batch = rollout.batch
    assert (batch.verdicts[0] == Verdict.REWARD_FAILED).sum() == 2
    assert not (batch.verdicts[0] == Verdict.TRAINED).any()
    assert batch.scores[0].isnan()
    scores = torch.tensor([0.25, 0.0, 0.0])
    expected = (scores - scores.mean()) / (scores.std() + 1e-4)
    assert batch.advantages[1, 3] == pytest.approx(expected[0].item(), rel=1e-5)
    assert batch.advantages[2, 3] == pytest.approx(expected[1].item(), rel=1e-5)
    learner.update(rollout)
    assert learner.metrics()["rewards/failed"] == 0.25
    assert learner.metrics()["reward"] == pytest.approx(0.25 / 3)
    assert learner.metrics()["untrained_tokens/reward_failed"] == 4


def test_all_rewards_failing_is_no_step_and_says_so():
    learner = learner_of(small(), lambda s: None, script=script)
    before = weights_of(learner)
    learner.update(learner.collect(0))
    assert all(torch.equal(before[name], p) for name, p in learner.module.named_parameters())
    assert "no reward succeeded" in learner.explain()
    assert "no position trained" in learner.explain()
    assert learner.metrics()["optimizer_steps"] == 0


def test_dropped_answers_leave_the_denominators():
    options = small("reinforce", **{"samples": 4, "algorithm.drop_truncated": True, "algorithm.baseline": "none"})
    learner = learner_of(options, lambda s: 1.0, script=script)
    rollout = learner.collect(0)
    assert (rollout.batch.verdicts[2, 3:] == Verdict.TRUNCATED).all()
    (step,) = learner.update(rollout)
    mask = trained(rollout.batch)
    assert mask.sum() == 2 * (2 + 3 + 1)
    mean = step.result.outputs.logprobs[mask].mean().item()
    assert step.result.terms["policy"] == pytest.approx(-mean, rel=1e-5)


def test_flat_groups_are_dropped_if_asked():
    options = small(**{"algorithm.drop_flat": True})
    learner = learner_of(options, lambda s: 1.0 if s.prompt_index == 0 else count_a(s), script=script)
    batch = learner.collect(0).batch
    assert not trained(batch)[:4].any()
    assert (batch.verdicts[:4] == Verdict.FLAT_GROUP).sum() == 2 + 3 + 4 + 1
    assert trained(batch)[4:].sum() == 10


def test_a_minibatch_in_which_nothing_trains_is_passed_over():
    options = small(**{"algorithm.drop_flat": True, "algorithm.minibatches": 8})
    learner = learner_of(options, lambda s: 1.0 if s.prompt_index == 0 else count_a(s), script=script)
    steps = learner.update(learner.collect(0))
    made = [s.result for s in steps if s.result.terms]
    assert len(steps) == 8
    assert len(made) == 4
    assert learner.metrics()["optimizer_steps"] == 4
    assert learner.metrics()["loss/policy"] == pytest.approx(sum(r.terms["policy"] for r in made) / 4)


def test_scores_are_clipped_and_penalised_as_asked():
    options = small(
        **{"algorithm.score_clip": 2.0, "algorithm.missing_stop_penalty": 0.5, "algorithm.overlong_buffer": 2}
    )
    batch = learner_of(options, lambda s: 5.0, script=script).collect(0).batch
    assert batch.scores[:4].tolist() == [2.0, 1.5, 0.5, 2.0]


@pytest.mark.parametrize(
    ("buffer", "scores"), [(0.5, [5.0, 4.5, 4.0, 5.0]), (1, [5.0, 5.0, 4.0, 5.0]), (0.99, [4.5, 4.25, 4.0, 4.75])]
)
def test_a_buffer_is_a_share_of_the_longest_answer_or_a_number_of_tokens(buffer, scores):
    """Answers of 2, 3, 4 and 1 tokens, of at most 4: the penalty grows from 0 to 1 over the last half, token, or all."""
    batch = learner_of(small(**{"algorithm.overlong_buffer": buffer}), lambda s: 5.0, script=script).collect(0).batch
    assert batch.scores[:4].tolist() == scores


def test_spread_and_distance_in_the_numbers_and_the_sentence_of_a_step():
    """Two groups of scores 1/4, 1/4, 0, 0; the engine says log-prob -1 of every token."""
    settings = {"algorithm.kl_coef": 0.1, "algorithm.minibatches": 2, "algorithm.epochs": 2}
    for source in ("recompute", "behaviour"):
        learner = learner_of(small(**settings, **{"algorithm.old_logprobs": source}), count_a, script=script)
        rollout = learner.collect(0)
        steps = learner.update(rollout)
        m, mask = learner.metrics(), trained(rollout.batch)
        assert m["reward_std"] == m["rewards/plain/std"] == pytest.approx(0.125)
        gap = (steps[0].result.outputs.logprobs + 1).abs()[trained(steps[0].batch)]
        if source == "recompute":
            gap = (rollout.batch.old_logprobs + 1).abs()[mask]
        assert m["sampling/sampling_logp_difference/mean"] == pytest.approx(float(gap.mean()), rel=1e-5)
        assert m["sampling/sampling_logp_difference/max"] == pytest.approx(float(gap.max()), rel=1e-5)
        assert learner.explain().startswith(f"reward 0.125, length 2.5, KL {m['kl']:.4f}\n")


# -- old log-probs, KL, values --------------------------------------------------------------------------------------


def test_the_ratio_is_exactly_1_under_detach_and_close_to_it_under_recompute():
    for source, limit in (("detach", 0.0), ("recompute", 1e-4), ("behaviour", 1e-4)):
        learner = learner_of(small(**{"algorithm.old_logprobs": source}), count_a)
        rollout = learner.collect(0)
        (step,) = learner.update(rollout)
        mask = trained(rollout.batch)
        old = rollout.batch.old_logprobs
        assert (old is None) == (source == "detach")
        if old is not None:
            assert (old - step.result.outputs.logprobs)[mask].abs().max() <= limit
        if source == "behaviour":
            assert old is rollout.batch.behaviour_logprobs
        assert abs(learner.metrics()["policy/ratio"] - 1) <= limit
        assert 0 < learner.metrics()["sampling/sampling_logp_difference/max"] < 1e-4, source


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_the_weight_of_the_kl_rises_step_by_step(place):
    """By the step alone, so that a run that goes on finds it where it was."""
    options = small("grpo", **{"algorithm.kl_coef": 0.6, "algorithm.kl_warmup": 3, "algorithm.kl_in": place})
    learner, late = (learner_of(options, count_a, script=script) for _ in range(2))
    for step, expected in enumerate((0.2, 0.4, 0.6, 0.6)):
        rollout = learner.collect(step)
        terms = rollout.algorithm.loss(_zeros(rollout), rollout.batch)
        if place == "loss":
            assert terms["kl"].coef == pytest.approx(expected)
        learner.update(rollout)
        assert rollout.kl_coef == learner.metrics()["kl_coef"] == pytest.approx(expected)
        if step == 0:
            late.load_state_dict(learner.state_dict())
    assert late.collect(1).kl_coef == pytest.approx(0.4)


def _zeros(rollout):
    zeros = torch.zeros(rollout.batch.ids.shape)
    return Outputs(zeros, zeros, None)


def test_kl_in_the_reward_reaches_advantages_and_kl_in_the_loss_is_a_term():
    for name in ("grpo", "reinforce", "ppo"):
        settings = {"algorithm.kl_coef": 0.5, "algorithm.kl_kind": "k1", "samples": 4}
        in_reward, in_loss = (
            learner_of(small(name, **settings, **{"algorithm.kl_in": place}), count_a, script=script)
            for place in ("reward", "loss")
        )
        for learner in (in_reward, in_loss):
            with torch.no_grad():
                for p in learner.policy.model.parameters():
                    p.mul_(1.5)  # away from the reference
        first, second = in_reward.collect(0), in_loss.collect(0)
        eligible = in_reward.rule.eligible(first.batch.roles)
        expected = required(first.batch.scores) - 0.5 * torch.where(eligible, first.kl, 0).sum(dim=1)
        torch.testing.assert_close(required(first.batch.rewards).sum(dim=1), expected.float())
        torch.testing.assert_close(required(second.batch.rewards).sum(dim=1), required(second.batch.scores).float())
        assert first.kl.abs().max() > 0.01
        assert not torch.allclose(required(first.batch.advantages), required(second.batch.advantages)), name
        with_term = in_loss.update(second)[0].result.terms
        assert "kl" in with_term
        assert "kl" not in in_reward.update(first)[0].result.terms


def test_kl_to_the_reference_is_0_on_the_first_step_and_steers_its_coefficient():
    settings = {"algorithm.kl_coef": 0.1, "algorithm.kl_target": 1.0, "algorithm.kl_horizon": 16.0}
    learner = learner_of(small(**settings), count_a)
    learner.update(learner.collect(0))
    assert abs(learner.metrics()["kl"]) < 1e-4
    assert learner.metrics()["kl_coef"] == 0.1, "the one that was used"
    assert learner.kl.coef == pytest.approx(0.1 * (1 - 0.2 * 8 / 16), rel=1e-5)
    with torch.no_grad():
        for p in learner.policy.model.parameters():
            p.mul_(3.0)
    learner.engine.load(engine_weights(learner.policy), 9)
    learner.update(learner.collect(1))
    assert learner.kl.coef > 0.09


def test_the_moving_baseline_is_that_of_the_steps_before():
    options = small("reinforce", **{"samples": 4, "algorithm.baseline": "ema"})
    learner = learner_of(options, count_a, script=script)
    first = learner.collect(0)
    assert first.batch.advantages[0, 3] == pytest.approx(0.25)
    learner.update(first)
    assert learner.baseline.value == pytest.approx(0.125)
    second = learner.collect(1)
    assert second.batch.advantages[0, 3] == pytest.approx(0.125)


def test_the_reference_is_refreshed_and_comes_back_from_a_checkpoint():
    settings = {"algorithm.kl_coef": 0.1, "algorithm.reference_every": 2}
    learner = learner_of(small(**settings), lambda s: float(s.sample_index), script=script)
    name = "model.embed_tokens.weight"
    start = learner.reference.weights[name].clone()
    learner.update(learner.collect(0))
    assert torch.equal(learner.reference.weights[name], start)
    learner.update(learner.collect(1))
    refreshed = learner.reference.weights[name].clone()
    assert torch.equal(refreshed, learner.policy.model.get_parameter(name))
    learner.update(learner.collect(2))
    assert not torch.equal(refreshed, learner.policy.model.get_parameter(name))
    other = learner_of(small(**settings), count_a, script=script)
    other.load_state_dict(learner.state_dict())
    assert torch.equal(other.reference.weights[name], refreshed)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_values_behind_answers_that_were_cut_off_are_the_critics(critic):
    options = small("ppo", **{"samples": 4, "algorithm.critic": critic, "algorithm.bootstrap_truncated": True})
    learner = learner_of(options, count_a, script=script)
    head = learner.module.value_head if critic == "shared" else learner.module.critic.head
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(1))
    batch = learner.collect(0).batch
    cut_off = torch.tensor([False, False, True, False] * 2)
    behind = learner.prepare._values_after_end(batch, cut_off)
    with torch.no_grad():
        trunk = learner.policy.model.model if critic == "shared" else learner.module.critic.trunk
        expected = head(trunk(input_ids=batch.ids[2:3]).last_hidden_state[0, 6])
    assert behind[2].item() == pytest.approx(expected.item(), rel=1e-4)
    assert behind[[0, 1, 3, 4, 5, 7]].tolist() == [0.0] * 6
    # gamma = 1: the last return of a row that was cut off is its score plus what lies behind it, by lam its own value
    last = batch.returns[2, 6].item()
    assert last == pytest.approx(batch.rewards[2, 6].item() + behind[2].item(), rel=1e-4)
    assert batch.returns[1, 5].item() == pytest.approx(batch.scores[1].item(), abs=1e-5), "V is 0 after a real end"


def test_returns_come_from_raw_advantages():
    options = small("ppo", **{"samples": 4, "algorithm.lam": 1.0})
    learner = learner_of(options, count_a, script=script)
    torch.nn.init.normal_(learner.module.value_head.weight, generator=torch.Generator().manual_seed(1))
    batch = learner.collect(0).batch
    mask = trained(batch)
    torch.testing.assert_close(
        batch.returns[mask], batch.scores.float()[:, None].expand_as(mask)[mask], rtol=1e-4, atol=1e-4
    )
    kept = batch.advantages[mask]
    assert abs(kept.mean()) < 1e-4
    assert kept.std(correction=0) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_critic_learns_a_constant_reward(critic):
    options = small(
        "ppo", **{"prompts": 2, "algorithm.critic": critic, "algorithm.value_clip": None, "algorithm.lam": 1.0}
    )
    learner = learner_of(options, lambda s: 1.0)
    losses = []
    for step in range(8):
        learner.update(learner.collect(step))
        losses.append(learner.metrics()["loss/value"])
    assert losses[0] > 0.3
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_first_step_goes_on_from_the_pass_that_scored_it(critic, monkeypatch):
    """The same weights to the last bit, and one pass through the policy's trunk less in every step."""

    def trained_weights(*, keep):
        passes = []
        with monkeypatch.context() as patch:
            plain = PolicyModel._pass
            patch.setattr(PolicyModel, "_pass", lambda self, *a: passes.append(self) or plain(self, *a))
            if not keep:
                patch.setattr(Preparer, "_first_step_is_all", False)
            options = small("ppo", **{"algorithm.critic": critic, "algorithm.epochs": 2, "algorithm.minibatches": 1})
            learner = learner_of(options, count_a, script=script)
            for step in range(2):
                learner.update(learner.collect(step))
        return weights_of(learner), sum(one is learner.module for one in passes)

    (with_it, fewer), (without, more) = trained_weights(keep=True), trained_weights(keep=False)
    assert (fewer, more) == (2 * 2, 2 * 3)
    assert all(torch.equal(with_it[name], without[name]) for name in without)


def test_a_kept_pass_is_not_used_for_other_tokens_or_other_weights():
    learner = learner_of(small(), count_a, script=script)
    module, batch = learner.module, learner.collect(0).batch
    wanted = learner.rule.eligible(batch.roles)

    def loss_of(ids=batch.ids, wanted=wanted):
        total, _ = module(ids, wanted, temperature=1.0, loss=lambda outputs, rows: outputs.logprobs.sum())
        return total.item()

    def plain_loss(outputs, part):
        return {"policy": Term(values=-outputs.logprobs, mask=trained(part), mode="token-mean")}

    def keep():
        with torch.no_grad():
            module(batch.ids, wanted, temperature=1.0, keep=True)

    plain, other = loss_of(), (batch.ids + 1) % 256
    keep()
    assert loss_of() == plain
    assert module._kept is None, "it is used once"
    keep()
    assert loss_of(ids=other) != plain
    keep()
    assert loss_of(wanted=wanted & (batch.roles == Role.CONTENT)) != plain
    keep()
    with torch.no_grad():
        next(module.parameters()).mul_(1.01)
    assert loss_of() != plain
    learner.update(learner.collect(1))
    keep()
    other_rows = batch.rows(torch.tensor([2, 1]))
    learner.updater.step(other_rows, plain_loss, temperature=1.0)
    assert module._kept is None, "the optimiser's step made it stale"
    keep()
    nothing = torch.full_like(batch.roles, Verdict.GIVEN)
    learner.updater.step(dataclasses.replace(batch, verdicts=nothing), plain_loss, temperature=1.0)
    assert module._kept is None, "it takes no memory behind a step in which nothing trained"


def test_in_mixed_precision_the_reference_computes_as_the_policy_does(tmp_path):
    """Else rounding would pass for a divergence before the policy has moved."""
    rolecall.rl(
        preset="ppo",
        model="tiny",
        rows="addition",
        steps=1,
        prompts=2,
        samples=2,
        sampling={"max_new_tokens": 4},
        algorithm={"kl_coef": 0.1, "kl_in": "reward", "entropy_coef": 0.01},
        policy={"mixed_precision": "bf16"},
        out=str(tmp_path / "run"),
        quiet=True,
    )
    logged = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert logged["kl"] == 0


def test_the_engine_is_released_while_the_policy_trains():
    class Told(ScriptedEngine):
        told: ClassVar[list[str]] = []

        def release(self):
            self.told.append("release")

        def load(self, weights, version):
            self.told.append("load")
            super().load(weights, version)

    learner = learner_of(small(), count_a, engine=Told(script, stop_ids=(STOP,)))
    learner.update(learner.collect(0))
    assert Told.told == ["release", "load"]


# -- a user's own algorithm ------------------------------------------------------------------------------------------


def test_every_step_says_which_weights_come_of_it():
    learner = learner_of(options_of(prompts=1, samples=2), count_a, script=lambda request, sample: (ord("a"), STOP))
    for step in range(2):
        learner.update(learner.collect(step))
        assert learner.metrics()["policy_version"] == learner.engine.version == step + 1


def test_advantage_and_loss_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setattr(
        rl, "open_training_reward", lambda *args, **kwargs: Plain(count_a)
    )  # a pool takes seconds to start
    seen = []

    def advantage(batch):
        seen.append("advantage")
        return required(batch.scores) * 10 + 1

    def loss(out, batch):
        seen.append("loss")
        values = -out.logprobs * required(batch.advantages)
        return {"mine": Term(values=values, mask=trained(batch), mode="token-mean")}

    run = rolecall.rl(
        rows=ROWS, reward=count_a, advantage=advantage, loss=loss, out=str(tmp_path / "run"), quiet=True,
        **{"steps": 1, "prompts": 2, "samples": 2, "sampling.max_new_tokens": 4},
    )  # fmt: skip
    assert {"advantage", "loss"} == set(seen)
    assert "loss/mine" in run.metrics[0]
    assert run.outcome.exit_code == 0


# -- learning --------------------------------------------------------------------------------------------------------

TASKS = {
    "grpo": {"prompts": 4, "samples": 8, "optim.lr": 2e-3},
    "reinforce": {"prompts": 4, "samples": 8, "optim.lr": 2e-3},
    "ppo": {"prompts": 32},
    "alpacafarm-ppo": {"prompts": 32, "optim.critic_lr": 3e-3},
}


def high_bytes(sample):
    """The share of four tokens that are letters from a to z: about a tenth at first."""
    return sum(A <= token <= A + 25 for token in sample.completion_ids) / 4


def learned(preset, seed, *, sign=1.0, steps=25):
    """The mean reward of the first and of the last three steps."""
    settings = {"sampling.max_new_tokens": 4, "optim.lr": 1e-3, "seed": seed, "steps": steps, **TASKS[preset]}
    learner = learner_of(options_of(preset, **settings), lambda s: sign * high_bytes(s))
    rewards = []
    for step in range(steps):
        learner.update(learner.collect(step))
        rewards.append(sign * learner.metrics()["reward"])
    return sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("preset", [pytest.param(p, marks=[pytest.mark.slow] * (p == "alpacafarm-ppo")) for p in TASKS])
def test_every_preset_raises_its_reward(preset, seed):
    before, after = learned(preset, seed)
    assert before < 0.25
    assert after > before + 0.4


def test_a_flipped_sign_does_not_pass_for_learning():
    before, after = learned("grpo", 0, sign=-1.0)
    assert after < before + 0.1


def test_scoring_does_not_depend_on_the_token_budget():
    learner = learner_of(small(), count_a, script=script)
    batch = learner.collect(0).batch
    eligible = learner.rule.eligible(batch.roles)
    whole, cut = (score(learner.module, batch, eligible, temperature=1.0, token_budget=budget) for budget in (1000, 6))
    torch.testing.assert_close(whole.logprobs, cut.logprobs, rtol=0, atol=1e-5)
    assert not whole.logprobs[~eligible].any()


def test_a_step_that_is_skipped_names_the_answers_whose_loss_is_not_finite(caplog):
    learner = learner_of(small(), count_a, script=script)
    rollout = learner.collect(0)
    advantages = rollout.batch.advantages.clone()
    advantages[[1, 6]] = torch.nan
    poisoned = dataclasses.replace(rollout, batch=dataclasses.replace(rollout.batch, advantages=advantages))
    before = weights_of(learner)
    learner.update(poisoned)
    assert learner.metrics()["skipped"] == 1
    assert all(torch.equal(before[name], after) for name, after in weights_of(learner).items())
    (line,) = [message for message in caplog.messages if "skipped" in message]
    assert line.startswith("step 1 was skipped: the gradient of model.")
    assert line.endswith(" is not finite; the loss is not in group 0 episode 1, group 1 episode 2")


def test_a_mark_takes_back_all_that_a_rollout_changes(tmp_path):
    replay = {"replay.share": 0.5, "replay.max_uses": 3, "replay.sampler": "random", "replay.keep_flat": True}
    learner = learner_of(
        small(**replay, **{"algorithm.kl_coef": 0.1, "algorithm.kl_warmup": 9}), count_a, script=script
    )

    def state(name):
        write_state(tmp_path, name, learner.state_dict())
        return [(tmp_path / f"{name}.{ending}").read_bytes() for ending in ("json", "safetensors")]

    learner.update(learner.collect(0))
    learner.replay.started = False  # as before anything was solved
    before, back = state("before"), learner.mark()
    learner.collect(1)
    assert any(group.uses for group in learner.replay.buffer.groups), "the buffer has changed too"
    assert state("rolled_out") != before
    back()
    assert state("back") == before
