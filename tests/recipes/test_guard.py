"""Each tripwire, tripped by its bug in a real short run; and healthy runs, which trip none."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from short_runs import GRPO, GRPO_KL, PPO, REINFORCE, guard_of, learner_of, policy_of, run

from rolecall.config.parts import PolicyOptions
from rolecall.errors import UserError
from rolecall.maths import losses, shaping
from rolecall.maths.roles import Role
from rolecall.policy.model import PolicyModel
from rolecall.recipes.rl import RLLearner
from rolecall.rewards.records import Scored
from rolecall.rollout.engine import weights_hash
from rolecall.train.reference import Reference
from rolecall.train.step import StepResult, Term, Updater, trained
from rolecall.train.tripwires import Tripwire


def without_lr(learner: RLLearner) -> RLLearner:
    """A learner whose schedule has come to 0."""
    for group in learner.updater.optimizer.param_groups:
        group["base_lr"] = 0.0
    return learner


def tripped(learner: RLLearner, *, steps: int = 2) -> Tripwire:
    """What ends a run of a learner with its tripwires on."""
    guard_of(learner)
    with pytest.raises(Tripwire) as caught:
        run(learner, steps)
    return caught.value


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("algorithm", [GRPO, GRPO_KL, PPO, REINFORCE], ids=["grpo", "grpo-kl", "ppo", "reinforce"])
def test_a_healthy_run_trips_nothing_and_says_that_weights_moved(algorithm, dtypes):
    learner = learner_of(algorithm, dtype=dtypes[0], engine_dtype=dtypes[1])
    guard_of(learner, probe_every=1)
    run(learner, 2)
    assert learner.metrics()["weights_moved"] == 1
    assert learner.metrics()["engine_in_sync"] == 1
    assert ("rounded_away" in learner.metrics()) == (dtypes[0] == "bfloat16")
    assert not any(word in learner.explain() for word in ("weights", "engine", "sync")), (
        "only what is not as it should be"
    )


def test_an_adapter_is_compared_merged():
    learner = learner_of(GRPO_KL, lora=True)
    guard_of(learner, probe_every=1)
    run(learner, 2)
    assert learner.metrics()["engine_in_sync"] == 1


def test_old_log_probs_of_the_behaviour_and_several_passes_are_healthy():
    learner = learner_of(dataclasses.replace(GRPO, old_logprobs="behaviour", epochs=2, minibatches=3))
    guard_of(learner, probe_every=1)
    run(learner, 2)
    assert learner.metrics()["optimizer_steps"] == 6


def test_mini_batches_in_which_nothing_trains_are_healthy():
    """Flat groups are dropped, so whole mini-batches have no position that trains."""
    learner = learner_of(dataclasses.replace(GRPO, drop_flat=True, minibatches=12, old_logprobs="recompute"), lr=1e-4)
    learner.collector.asker = dataclasses.replace(learner.collector.asker, reward=Flat(but=(0, 1)))
    guard_of(learner)
    run(learner, 2)
    assert learner.metrics()["weights_moved"] == 1


class Flat:
    """The same score for everything, except for one answer."""

    names = ("flat",)

    def __init__(self, *, but: tuple[int, int] | None = None) -> None:
        self.but = but

    def score(self, samples, *, state=None):
        totals = [float((s.prompt_index, s.sample_index) == self.but) for s in samples]
        return [Scored(scores={"flat": total}, total=total) for total in totals]


def test_flat_groups_and_a_learning_rate_of_zero_move_nothing_and_that_is_healthy():
    for learner in (learner_of(GRPO, reward=Flat()), without_lr(learner_of(GRPO))):
        guard_of(learner)
        run(learner, 2)
        assert learner.metrics()["weights_moved"] == 0
        assert learner.metrics()["engine_in_sync"] == 1


def test_a_step_that_is_skipped_moves_nothing_and_is_the_loops_business():
    broken = policy_loss(lambda out, batch: trained(batch), lambda out, batch, mask: out.logprobs * torch.nan)
    learner = learner_of(loss=broken)
    guard_of(learner)
    run(learner, 2)
    assert learner.metrics()["skipped"] == 1
    assert learner.metrics()["weights_moved"] == 0


# -- 2: untrained positions ----------------------------------------------------------------------------------------


def policy_loss(mask: Callable[..., Any], values: Callable[..., Any]) -> Any:
    """A loss with one term, made of these two."""

    def loss(out, batch):
        where = mask(out, batch)
        return {"policy": Term(values=values(out, batch, where), mask=where, mode="token-mean")}

    return loss


def nll(out, batch, mask):
    return losses.reinforce(out.logprobs, batch.advantages, mask)


def test_a_mask_that_is_wider_than_the_verdicts():
    not_padding = policy_loss(lambda out, batch: batch.roles != Role.PAD, lambda out, batch, mask: out.logprobs - 1)
    with pytest.raises(ValueError, match="'policy' counts positions whose verdict is not TRAINED"):
        one_step(learner_of(loss=not_padding))


def test_a_mask_that_depends_on_the_outputs_has_other_denominators():
    likely = policy_loss(lambda out, batch: trained(batch) & (out.logprobs > -5.5), nll)
    with pytest.raises(ValueError, match="'policy' changed between its denominator and its sum"):
        one_step(learner_of(loss=likely))


def one_step(learner):
    """The step itself refuses these losses, before a tripwire could see what they did."""
    learner.update(learner.collect(0))


def test_a_value_that_depends_on_the_rows_beside_it():
    """Centred over the micro-batch: how the batch is cut changes the loss."""
    centred = policy_loss(
        lambda out, batch: trained(batch),
        lambda out, batch, mask: torch.where(mask, out.logprobs - out.logprobs.sum() / mask.sum().clamp(min=1), 0),
    )
    learner = learner_of(loss=centred)
    learner.updater.token_budget = 32
    assert tripped(learner).name == "denominators"


def test_a_gradient_that_leaks_through_a_mean_over_the_whole_row():
    row_mean = policy_loss(
        lambda out, batch: trained(batch),
        lambda out, batch, mask: torch.where(mask, -out.logprobs.mean(dim=1, keepdim=True) * batch.advantages, 0),
    )
    trip = tripped(learner_of(loss=row_mean))
    assert trip.name == "untrained-gradient"
    assert len(trip.samples) == 1


def test_a_mask_that_is_multiplied_so_that_nan_gets_through():
    multiplied = policy_loss(
        lambda out, batch: trained(batch),
        lambda out, batch, mask: -(out.logprobs * mask) * batch.advantages.sum(dim=1, keepdim=True),
    )
    assert tripped(learner_of(loss=multiplied)).name == "untrained-gradient"


def test_a_loss_that_is_averaged_over_micro_batches_in_the_log():
    class Averaging(Updater):
        def step(self, *args: Any, **kwargs: Any) -> StepResult:
            result = super().step(*args, **kwargs)
            return dataclasses.replace(result, loss=result.loss / 2)

    learner = learner_of(REINFORCE)
    learner.updater.__class__ = Averaging
    assert tripped(learner).name == "loss-sum"


# -- 3: rewards ----------------------------------------------------------------------------------------------------


def test_a_score_on_a_masked_token(monkeypatch):
    """The score sits on the last token of the row, which the rule does not train."""

    def on_the_last_token(scores, kl, mask, *, kl_coef):
        rewards = torch.zeros(mask.shape)
        rewards[:, -1] = scores
        return rewards

    monkeypatch.setattr(shaping, "shape_rewards", on_the_last_token)
    learner = learner_of(dataclasses.replace(GRPO, train_stop=False))
    sampling = dataclasses.replace(learner.sampling, stop_ids=tuple(range(0, 259, 2)))
    learner.collector.asker = dataclasses.replace(learner.collector.asker, sampling=sampling)
    trip = tripped(learner)
    assert trip.name == "reward-sum"
    assert trip.samples


def test_a_kl_part_with_another_coefficient(monkeypatch):
    whole = shaping.shape_rewards
    monkeypatch.setattr(shaping, "shape_rewards", lambda *args, kl_coef: whole(*args, kl_coef=2 * kl_coef))
    trip = tripped(learner_of(PPO))
    assert (trip.name, trip.step) == ("reward-sum", 2)  # at step 1 the KL is 0


# -- 6: the first step ---------------------------------------------------------------------------------------------


def test_old_log_probs_of_an_earlier_version():
    """Old log-probs come from a copy of the policy that stays behind."""
    learner = learner_of(dataclasses.replace(GRPO, old_logprobs="recompute"))
    stale, whole = Reference(learner.module), learner.prepare.score

    def score_stale(module, batch, wanted, **how):
        with stale.module() as frozen:
            return whole(frozen, batch, wanted, **how)

    learner.prepare.score = score_stale
    trip = tripped(learner)
    assert (trip.name, trip.step) == ("ratio-at-first-step", 2)
    assert trip.finding.numbers["max |log ratio|"] > 1e-4


def test_a_reference_that_is_not_where_the_run_starts():
    other = policy_of()
    with torch.no_grad():
        other.model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    assert tripped(learner_of(GRPO_KL, reference=Reference(PolicyModel(other.model)))).name == "kl-at-start"


# -- 7 and 8: weights and the engine -------------------------------------------------------------------------------


def test_an_engine_that_scores_at_another_temperature():
    learner = learner_of()
    whole = learner.engine.stream

    def tempered(requests):
        hot = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, temperature=1.0)) for r in requests]
        return whole(hot)

    learner.engine.stream = tempered
    trip = tripped(learner)
    assert (trip.name, trip.step) == ("engine-mismatch", 1)


def test_with_dropout_the_engine_is_compared_at_every_so_many_steps_by_a_pass_that_drops_nothing():
    learner = learner_of(lora=True)
    learner.options = dataclasses.replace(learner.options, policy=PolicyOptions(lora_rank=4, lora_dropout=0.1))
    guard_of(learner, probe_every=2)
    whole = learner.engine.stream

    def tempered(requests):
        hot = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, temperature=1.0)) for r in requests]
        return whole(hot if requests[0].step > 0 else requests)

    learner.engine.stream = tempered
    with pytest.raises(Tripwire) as caught:
        run(learner, 3)
    assert (caught.value.name, caught.value.step) == ("engine-mismatch", 3), "not in step 2, which is not looked at"


def test_an_engine_that_ignores_new_weights():
    learner = learner_of()
    learner.engine.load = lambda weights, version: setattr(learner.engine, "version", version)
    trip = tripped(learner)
    assert (trip.name, trip.step) == ("engine-sync", 1)


def test_an_adapter_that_never_reaches_the_engine():
    learner = learner_of(lora=True)
    base = {name: p.detach().clone() for name, p in policy_of().model.named_parameters()}
    whole = learner.engine.load
    learner.engine.load = lambda weights, version: whole(base, version)
    assert tripped(learner).name == "engine-sync"


def test_an_engine_that_ignores_new_weights_and_lies_about_it():
    learner = learner_of(lr=1e-2)
    engine = learner.engine

    def pretend(weights, version):
        engine.version, engine._hash = version, weights_hash(weights, torch.float32)

    engine.load, engine.release = pretend, lambda: None
    trip = tripped(learner)
    assert (trip.name, trip.step) == ("engine-mismatch", 2)


def test_an_optimiser_that_holds_other_parameters():
    learner = learner_of()
    for group in learner.updater.optimizer.param_groups:
        group["params"] = [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]
    assert tripped(learner).name == "weights-moved"


def test_weights_that_move_without_a_learning_rate():
    learner = without_lr(learner_of())
    step = learner.updater.optimizer.step

    def decaying(*args: Any) -> None:
        step(*args)
        with torch.no_grad():
            learner.policy.model.model.norm.weight.mul_(0.99)

    learner.updater.optimizer.step = decaying
    assert tripped(learner).name == "weights-moved"


def test_a_tripwire_says_what_where_and_what_to_do():
    learner = learner_of()
    learner.engine.load = lambda weights, version: None
    trip = tripped(learner)
    assert isinstance(trip, UserError)
    assert isinstance(trip, RuntimeError)
    assert trip.exit_code == 1
    assert str(trip).startswith(
        "tripwire engine-sync at step 1: the engine's weights are not the trainer's after a sync"
    )
    assert "engine version 0, expected 1" in str(trip)
    assert str(trip).endswith("engine.load must take every weight, with an adapter merged in.")
