"""Replay in a training step: what it must not change, what it must, and what it says."""

import dataclasses
import logging
import math
from pathlib import Path

import pytest
import torch
from learners import ROWS, learner_of, options_of, weights_of

from rolecall.config.experience import ReplayOptions
from rolecall.errors import UserError
from rolecall.experience.updates import read_updates
from rolecall.maths.roles import Role, Verdict
from rolecall.policy.model import Outputs
from rolecall.recipes.guard import Guard
from rolecall.recipes.records import Records
from rolecall.recipes.replay import join, replay_loss
from rolecall.train.rundir import RunDir
from rolecall.train.score import score
from rolecall.train.step import trained
from rolecall.types import Batch, Trajectory

MODES = ("clipped", "shaped", "observe")


def varied(sample) -> float:
    return sum(i % 7 for i in sample.completion_ids) / (6 * max(1, len(sample.completion_ids)))


class Once:
    """Scores that differ in the first `steps` steps, and are all equal afterwards."""

    names = ("once",)

    def __init__(self, steps=1):
        self.left = steps

    def score(self, samples, *, state=None):
        from rolecall.rewards.records import Scored

        self.left -= 1
        totals = [varied(s) if self.left >= 0 else 0.5 for s in samples]
        return [Scored(scores={"once": total}, total=total) for total in totals]

    def take_metrics(self):
        return {}


def options(preset="grpo", **settings):
    small = {"prompts": 3, "samples": 4, "sampling.max_new_tokens": 6, "optim.lr": 1e-3, "steps": 100}
    return options_of(preset, **{**small, **settings})


def learner(reward=varied, *, preset="grpo", guarded=True, **settings):
    made = learner_of(options(preset, **settings), reward, rows=ROWS * 2)
    if guarded:
        guard = Guard(
            made.options, policy=made.policy, updater=made.updater, engine=made.engine, engine_dtype=torch.float32
        )
        made.watches = [guard]
    return made


def run(made, steps, start=0):
    """The numbers of every step."""
    found = []
    for step in range(start, start + steps):
        made.update(made.collect(step))
        found.append(made.metrics())
    return found


def same_bits(a, b) -> bool:
    return all(torch.equal(p, b[name]) for name, p in a.items())


def own(metrics) -> dict[str, float]:
    """The numbers that a run without replay has too."""
    return {name: value for name, value in metrics.items() if not name.startswith("replay/")}


# -- what it must not change -------------------------------------------------------------------------------------


def test_a_share_of_0_is_bit_identical_to_no_replay_whatever_else_is_set():
    plain = learner()
    off = learner(**{"replay.share": 0.0, "replay.mode": "shaped", "replay.sampler": "random", "replay.coef": 9.0})
    assert run(plain, 3) == run(off, 3)
    assert same_bits(weights_of(plain), weights_of(off))
    assert off.replay is None


def test_observing_changes_no_bit_of_the_weights_and_no_other_number():
    plain = learner(**{"algorithm.minibatches": 2})
    watching = learner(**{"algorithm.minibatches": 2, "replay.share": 0.5, "replay.mode": "observe"})
    before, after = run(plain, 4), run(watching, 4)
    assert same_bits(weights_of(plain), weights_of(watching))
    assert [own(m) for m in after] == before
    assert after[-1]["replay/groups"] == 3
    assert after[-1]["replay/ratio"] > 0
    assert after[-1]["replay/ess"] < 1


def gradient(made, batch, loss) -> dict[str, torch.Tensor]:
    """The gradient of one optimiser step whose learning rate is 0."""
    made.updater.step(batch, loss, temperature=made.sampling.scoring_temperature)
    return {name: p.grad.clone() for name, p in made.module.named_parameters() if p.grad is not None}


def replaying_itself(**settings):
    """A learner, its rollout, and the same rollout with itself replayed, recorded with the trainer's own log-probs."""
    made = learner(guarded=False, **{"optim.max_grad_norm": None, "replay.share": 0.5, **settings})
    for group in made.updater.optimizer.param_groups:
        group["base_lr"] = group["lr"] = 0.0
    rollout = made.collect(0)
    assert rollout.replay.batch is None
    now = score(made.module, rollout.batch, trained(rollout.batch), temperature=1.0, token_budget=4096).logprobs
    exact = [
        dataclasses.replace(t, behaviour_logprobs=tuple(now[i, : len(t.ids)].tolist()))
        for i, t in enumerate(rollout.trajectories)
    ]
    made.replay.remember(dataclasses.replace(rollout, trajectories=exact))
    return made, rollout, made.replay.mix(rollout, version=0)


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize(("mode", "times"), [("clipped", 1.0), ("shaped", (1 + 0.1 / 1.21) / 2)])
def test_replaying_the_current_batch_with_unchanged_weights_gives_the_on_policy_gradient(mode, times, aggregate):
    """Under shaped, the replayed half has 0.1 / 1.21 of it."""
    made, rollout, mixed = replaying_itself(**{"replay.mode": mode, "algorithm.aggregate": aggregate})
    assert len(mixed.training) == 2 * len(rollout.batch)
    alone = gradient(made, rollout.batch, rollout.algorithm.loss)
    both = gradient(made, mixed.training, mixed.algorithm.loss)
    assert max(float(g.abs().max()) for g in alone.values()) > 1e-3
    for name, expected in alone.items():
        torch.testing.assert_close(both[name], times * expected, rtol=1e-3, atol=1e-6)


def test_the_same_holds_with_three_policies_and_with_masked_weights():
    for settings in (
        {"replay.decoupled": True, "replay.weights": "truncate", "algorithm.old_logprobs": "recompute"},
        {"replay.weights": "mask", "replay.weights_low": 0.5},
    ):
        made, rollout, mixed = replaying_itself(**settings)
        alone = gradient(made, rollout.batch, rollout.algorithm.loss)
        both = gradient(made, mixed.training, mixed.algorithm.loss)
        for name, expected in alone.items():
            torch.testing.assert_close(both[name], expected, rtol=1e-3, atol=1e-6)


# -- note 004's table, row by row --------------------------------------------------------------------------------

TABLE = {
    #                      fresh   observe  clipped  shaped
    "log-prob computed": (True, True, True, True),
    "loss computed": (True, False, True, True),
    "gradient computed": (True, False, True, True),
    "weights updated": (True, False, True, True),
    "ratio to the behaviour reported": (True, True, True, True),
}


@pytest.fixture(scope="module")
def seen():
    """What a step did with fresh data, and with replayed data alone: its fresh groups are all flat."""
    found = {}
    for source in ("fresh", *MODES):
        replay = {} if source == "fresh" else {"replay.share": 0.5, "replay.mode": source, "algorithm.drop_flat": True}
        made = learner(Once(1), **{"optim.beta1": 0.0, **replay})
        if source != "fresh":
            run(made, 1)
        step = 0 if source == "fresh" else 1
        rollout, before = made.collect(step), weights_of(made)
        steps = made.update(rollout)
        if source == "fresh":
            part, numbers = rollout.batch, {"ratio": made.metrics()["sampling/importance_sampling_ratio/mean"]}
            logprobs = steps[0].result.outputs.logprobs[trained(part)]
        elif source == "observe":
            part = rollout.replay.batch
            logprobs = part.old_logprobs[part.verdicts == Verdict.REPLAY_OBSERVED]
            numbers = {"ratio": made.metrics()["replay/ratio"]}
        else:
            part = steps[0].batch.rows(steps[0].batch.replayed)
            logprobs = steps[0].result.outputs.logprobs[steps[0].batch.replayed][trained(part)]
            numbers = {"ratio": made.metrics()["replay/ratio"]}
        shares = steps[0].result.contributions.get("policy", torch.zeros(1))
        found[source] = {
            "log-prob computed": logprobs.numel() > 10 and bool((logprobs < 0).all()),
            "loss computed": bool((shares != 0).any()),
            "gradient computed": steps[0].result.grad_norm > 0,
            "weights updated": not same_bits(before, weights_of(made)),
            "ratio to the behaviour reported": 0.1 < numbers["ratio"] < 10,
        }
    return found


@pytest.mark.parametrize("row", TABLE)
def test_the_comparison_of_fresh_and_replayed_data(seen, row):
    assert tuple(seen[source][row] for source in ("fresh", "observe", "clipped", "shaped")) == TABLE[row]


# -- denominators and group statistics ---------------------------------------------------------------------------


def test_fresh_and_replayed_answers_share_one_denominator_and_other_terms_see_fresh_ones_only():
    settings = {"replay.share": 0.5, "algorithm.kl_coef": 0.1, "algorithm.entropy_coef": 0.01}
    made = learner(**settings, **{"algorithm.aggregate": "token-mean"})
    run(made, 2)
    rollout = made.collect(2)
    (mini,) = made.update(rollout)
    batch, parts = mini.batch, mini.result.contributions
    old = batch.replayed[:, None]
    count = int(trained(batch).sum())
    terms = rollout.algorithm.loss(mini.result.outputs, batch)
    assert int(terms["policy"].mask.sum()) == count
    for name in ("kl", "entropy"):
        assert not (terms[name].mask & old).any()
        assert int(terms[name].mask.sum()) == int((trained(batch) & ~old).sum())
        assert (torch.where(old, parts[name], 0) == 0).all()
    assert not (torch.where(old, parts["policy"], 0) == 0).all()
    values = torch.where(terms["policy"].mask, terms["policy"].values, 0).double()
    torch.testing.assert_close(parts["policy"], values / count)


def test_the_coefficient_weighs_replayed_positions_and_leaves_the_denominator():
    made, _, mixed = replaying_itself(**{"replay.coef": 0.25})
    batch = mixed.training
    out = made.updater.step(batch, mixed.algorithm.loss, temperature=1.0, record=True)
    whole, _, plain = replaying_itself()
    same = whole.updater.step(plain.training, plain.algorithm.loss, temperature=1.0, record=True)
    old = batch.replayed[:, None].expand_as(batch.ids)
    ours, theirs = out.contributions["policy"], same.contributions["policy"]
    torch.testing.assert_close(ours[old], 0.25 * theirs[old])
    torch.testing.assert_close(ours[~old], theirs[~old])


def test_advantages_are_separate_unless_joint_and_joint_compares_answers_to_one_prompt():
    for normalise in ("separate", "joint"):
        made = learner(**{"replay.share": 0.5, "replay.normalise": normalise, "prompts": 4})
        run(made, 2)
        rollout = made.collect(2)  # 8 rows, 4 a step: the replayed prompts are those of the step before
        joined = rollout.replay.joined
        first = trained(joined).float().argmax(dim=1)
        advantages = joined.advantages.gather(1, first[:, None]).flatten()
        rows = [*rollout.rows, *(g.row for g in rollout.replay.groups for _ in g.trajectories)]
        keys = rows if normalise == "joint" else joined.groups.tolist()
        for key in set(keys):
            mine = torch.tensor([k == key for k in keys])
            scores = joined.scores[mine]
            expected = (scores - scores.mean()) / (scores.std() + 1e-4)
            torch.testing.assert_close(advantages[mine], expected.float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            rollout.batch.advantages, joined.advantages[: len(rollout.batch), : rollout.batch.ids.shape[1]]
        )


def test_joint_puts_a_fresh_and_a_replayed_group_of_one_row_together():
    made = learner_of(
        options(**{"replay.share": 0.5, "replay.normalise": "joint", "prompts": 2}), varied, rows=ROWS[:2]
    )
    run(made, 1)
    rollout = made.collect(1)
    assert set(rollout.replay.joined.groups.tolist()) == set(rollout.batch.groups.tolist())


def test_scores_of_replayed_answers_stay_out_of_the_fresh_numbers():
    made = learner(Once(1), **{"replay.share": 0.5})
    _, second = run(made, 2)
    assert second["reward"] == 0.5
    assert second["frac_reward_zero_std"] == 1
    assert second["replay/reward"] != 0.5
    assert second["completions/mean_length"] <= 6


# -- what is replayed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "groups"), [(0.25, 1), (0.5, 3), (0.6, 4)])
def test_the_share_is_of_all_groups_of_a_step(share, groups):
    made = learner(**{"replay.share": share})
    numbers = run(made, 5)[-1]
    assert numbers["replay/groups"] == groups
    assert f"{groups} groups replayed" in made.explain()
    assert numbers["replay/share"] == pytest.approx(groups / (3 + groups))


def test_flat_groups_are_left_out_and_replaced_by_as_many():
    class Half(Once):
        """From the second step on, the first prompt's answers all score the same."""

        def score(self, samples, *, state=None):
            scored = super().score(samples, state=state)
            return [
                dataclasses.replace(s, total=varied(x), scores={"once": varied(x)}) if x.prompt_index else s
                for s, x in zip(scored, samples, strict=True)
            ]

    made = learner(Half(1), **{"replay.replace_flat": True})
    run(made, 1)
    rollout = made.collect(1)
    assert (rollout.batch.verdicts[:4] == Verdict.FLAT_GROUP).any(dim=1).all()
    assert len(rollout.replay.groups) == 1
    assert trained(rollout.training)[4:].any(dim=1).all()
    made.update(rollout)
    assert made.metrics()["replay/groups"] == 1


def test_replay_starts_when_so_much_is_solved_and_does_not_stop_again():
    class Late(Once):
        def score(self, samples, *, state=None):
            step = state["global_step"]
            totals = [1.0 if step == 2 and s.sample_index < 2 else 0.1 * s.sample_index for s in samples]
            scored = super().score(samples, state=state)
            return [dataclasses.replace(s, total=t) for s, t in zip(scored, totals, strict=True)]

    made = learner(Late(99), **{"replay.share": 0.5, "replay.start_when": 0.5})
    assert [m["replay/groups"] for m in run(made, 4)] == [0, 0, 3, 3]
    assert made.replay.started


def test_what_cannot_be_filled_is_counted_and_said_once_and_the_step_trains_on_what_is_fresh(caplog):
    made = learner(**{"replay.share": 0.75, "replay.size": 3, "replay.max_uses": 1})
    with caplog.at_level(logging.INFO):
        numbers = run(made, 4)
    assert [m["replay/groups"] for m in numbers] == [0, 3, 3, 3]
    assert [m["replay/missing"] for m in numbers] == [9, 6, 6, 6]
    said = [r.getMessage() for r in caplog.records if "replay:" in r.getMessage()]
    assert len(said) == 2, said
    assert "0 of 9 groups found: 0 were held" in said[0], "the first step, which has nothing to replay"
    assert "3 of 9 groups found: 3 were held" in said[1]
    assert all(m["weights_moved"] for m in numbers)


def test_groups_are_never_older_or_more_used_than_they_may_be():
    made = learner(**{"replay.share": 0.5, "replay.max_staleness": 2, "replay.max_uses": 1, "replay.sampler": "random"})
    seen: dict[int, int] = {}
    for step in range(6):
        rollout = made.collect(step)
        for group in rollout.replay.groups:
            seen[group.group] = seen.get(group.group, 0) + 1
            assert 1 <= made.engine.version - group.version <= 2
        made.update(rollout)
    assert set(seen.values()) == {1}
    assert made.metrics()["replay/age_max"] <= 2


# -- corrections -------------------------------------------------------------------------------------------------


def test_weights_outside_the_band_are_truncated_or_taken_out_and_stay_in_the_denominator(tmp_path):
    base = {"replay.share": 0.5, "algorithm.aggregate": "token-mean", "algorithm.old_logprobs": "recompute"}
    made = learner(**base, **{"replay.weights": "mask", "replay.weights_low": 0.9, "replay.weights_high": 1.1})
    with RunDir(tmp_path, "run") as opened:
        made.watches.append(Records(opened, made.options, model=made.engine.hash, tokenizer="bytes"))
        run(made, 3)
    recorded = [row.weights for row in read_updates(tmp_path / "run" / "updates" / "step-000003.parquet")]
    assert {w for row in recorded for w in row[~row.isnan()].tolist()} == {0.0, 1.0}
    made.watches.pop()
    rollout = made.collect(3)
    weights = rollout.replay.batch.weights
    mask = trained(rollout.replay.batch)
    assert set(weights[mask].tolist()) == {0.0, 1.0}
    (mini,) = made.update(rollout)
    old = mini.batch.replayed
    out = trained(mini.batch)[old] & (mini.batch.weights[old] == 0)
    assert out.any()
    assert (mini.result.contributions["policy"][old][out] == 0).all()
    terms = rollout.algorithm.loss(mini.result.outputs, mini.batch)
    assert int(terms["policy"].mask.sum()) == int(trained(mini.batch).sum())
    assert made.metrics()["replay/weighted_out"] == pytest.approx(float((weights[mask] == 0).float().mean()))

    made = learner(
        **base,
        **{"replay.decoupled": True, "replay.weights": "truncate", "replay.weights_high": 1.05, "optim.lr": 5e-3},
    )
    run(made, 3)
    batch = made.collect(3).replay.batch
    ratio = (batch.old_logprobs - batch.behaviour_logprobs).exp()[trained(batch)]
    torch.testing.assert_close(batch.weights[trained(batch)], ratio.clamp(0, 1.05))
    assert float(ratio.max()) > 1.05


class Off:
    """An engine whose log-probs are off by 0.3 at two positions of three."""

    def __init__(self, collector):
        self.collector = collector

    def collect(self, step):
        found = self.collector.collect(step)
        moved = [[p + 0.3 * (i % 3 - 1) for i, p in enumerate(t.behaviour_logprobs)] for t in found.trajectories]
        off = [
            dataclasses.replace(t, behaviour_logprobs=tuple(m)) for t, m in zip(found.trajectories, moved, strict=True)
        ]
        return dataclasses.replace(found, trajectories=off)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_fresh_answers_are_weighed_against_the_engine_that_sampled_them(share):
    band = {"replay.weights_low": 0.9, "replay.weights_high": 1.1, "replay.weigh_fresh": True}
    settings = {"replay.weights": "mask", "replay.share": share, "algorithm.old_logprobs": "recompute", **band}
    made = learner(guarded=False, **settings)
    made.collector = Off(made.collector)
    run(made, 1)
    rollout = made.collect(1)
    batch = rollout.batch
    ratio, mask = (batch.old_logprobs - batch.behaviour_logprobs).exp(), trained(batch)
    inside = (ratio >= 0.9) & (ratio <= 1.1)
    assert 0.2 < inside[mask].float().mean() < 0.5
    torch.testing.assert_close(batch.weights[mask], torch.where(inside, ratio, 0.0)[mask])
    (mini,) = made.update(rollout)
    parts, rows = mini.result.contributions["policy"][: len(batch)], mini.batch.weights[: len(batch)]
    counted = trained(mini.batch)[: len(batch)]
    assert (parts[counted & (rows == 0)] == 0).all()
    assert (parts[counted & (rows > 0)] != 0).any()
    terms = rollout.algorithm.loss(mini.result.outputs, mini.batch)
    assert int(terms["policy"].mask.sum()) == int(trained(mini.batch).sum()), "what is left out stays counted"


def test_a_ratio_is_to_the_recorded_log_probs_not_to_old_ones():
    made = learner(**{"replay.share": 0.5, "algorithm.minibatches": 2, "algorithm.epochs": 2, "optim.lr": 3e-3})
    run(made, 2)
    rollout = made.collect(2)
    steps = made.update(rollout)
    mini = steps[0]
    mask = trained(mini.batch) & mini.batch.replayed[:, None]
    expected = (mini.result.outputs.logprobs - mini.batch.behaviour_logprobs).exp()[mask]
    assert float((expected - 1).abs().max()) > 1e-2
    assert made.metrics()["replay/ratio_max"] >= float(expected.max()) - 1e-6


def test_the_defaults_are_an_upper_clip_of_its_own_and_a_dual_clip():
    """
    ratio to the record      0.5    1.0    1.5    1.7    4.0
    A = +1                  -0.5   -1.0   -1.5   -1.6   -1.6      upper clip 1 + 0.6; fresh rows have 1 + 0.2
    A = -1                   0.8    1.0    1.5    1.7    3.0      lower clip 1 - 0.2, dual clip 3
    """
    ratios = torch.tensor([[0.5, 1.0, 1.5, 1.7, 4.0]] * 2)
    batch = Batch(
        ids=torch.zeros(2, 5, dtype=torch.long),
        roles=torch.full((2, 5), int(Role.CONTENT), dtype=torch.uint8),
        groups=torch.zeros(2, dtype=torch.long),
        behaviour_logprobs=torch.full((2, 5), -2.0),
        old_logprobs=torch.full((2, 5), -9.0),
        advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 5),
    )
    out = Outputs(logprobs=ratios.log() - 2, entropy=torch.zeros(2, 5), values=None)
    mask = torch.ones(2, 5, dtype=torch.bool)
    expected = torch.tensor([[-0.5, -1.0, -1.5, -1.6, -1.6], [0.8, 1.0, 1.5, 1.7, 3.0]])
    torch.testing.assert_close(replay_loss(ReplayOptions(), out, batch, mask), expected)
    narrow = torch.tensor([[-0.5, -1.0, -1.3, -1.3, -1.3], [0.9, 1.0, 1.5, 1.7, 2.0]])
    found = replay_loss(ReplayOptions(clip_low=0.1, clip_high=0.3, dual_clip=2.0), out, batch, mask)
    torch.testing.assert_close(found, narrow)
    shaped = torch.tensor([[-1.0], [1.0]]) * ratios / (ratios + 0.1)
    torch.testing.assert_close(replay_loss(ReplayOptions(mode="shaped"), out, batch, mask), shaped)


def test_the_numbers_are_those_of_the_replayed_positions_and_the_fresh_ones_have_their_own():
    settings = {"replay.share": 0.6, "replay.sampler": "random", "replay.clip_high": 0.02, "replay.clip_low": 0.02}
    made = learner(**settings, **{"algorithm.minibatches": 2, "optim.lr": 3e-3, "replay.dual_clip": 1.05})
    run(made, 5)
    rollout = made.collect(5)
    steps, m = made.update(rollout), made.metrics()
    ages = [rollout.replay.version - group.version for group in rollout.replay.groups]
    assert len(set(ages)) > 1
    assert m["replay/age"] == pytest.approx(sum(ages) / len(ages))
    assert m["replay/age_max"] == max(ages)
    bins = {"1": (1,), "2-3": (2, 3), "4-7": (4, 5, 6, 7), "8-15": (), "16+": ()}
    for name, inside in bins.items():
        assert m[f"replay/age/{name}"] == pytest.approx(sum(age in inside for age in ages) / len(ages))
    parts: dict[str, list] = {"fresh": [], "old": []}
    for mini in steps:
        for source, rows in (("fresh", ~mini.batch.replayed), ("old", mini.batch.replayed)):
            mask = trained(mini.batch) & rows[:, None]
            base = mini.batch.old_logprobs if source == "fresh" else mini.batch.behaviour_logprobs
            now = mini.result.outputs.logprobs
            parts[source].append(torch.stack([(now - base).exp()[mask], mini.batch.advantages[mask]]))
    rho, advantages = torch.cat(parts["old"], dim=1)
    assert m["replay/ratio"] == pytest.approx(float(rho.mean()), rel=1e-5)
    assert m["replay/ratio_max"] == pytest.approx(float(rho.max()), rel=1e-5)
    assert m["replay/ess"] == pytest.approx(float(rho.sum() ** 2 / (len(rho) * rho.square().sum())), rel=1e-4)
    for name, share in {
        "replay/clip_low": (rho < 0.98) & (advantages < 0),
        "replay/clip_high": (rho > 1.02) & (advantages > 0),
        "replay/clip_dual": (rho > 1.05) & (advantages < 0),
    }.items():
        assert m[name] == pytest.approx(float(share.float().mean()), abs=1e-6)
        assert m[name] > 0
    rho, advantages = torch.cat(parts["fresh"], dim=1)
    assert m["policy/ratio_max"] == pytest.approx(float(rho.max()), rel=1e-5)
    assert m["clip_ratio/high_mean"] == pytest.approx(float(((rho > 1.2) & (advantages > 0)).float().mean()), abs=1e-6)


def broken(trajectory: Trajectory, value: float) -> Trajectory:
    logprobs = list(trajectory.behaviour_logprobs)
    logprobs[-1] = value
    return dataclasses.replace(trajectory, behaviour_logprobs=tuple(logprobs))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_token_without_a_finite_log_prob_is_left_out_of_loss_and_denominator_and_counted(value):
    made = learner(**{"replay.share": 0.5, "algorithm.aggregate": "token-mean"})
    rollout = made.collect(0)
    made.update(dataclasses.replace(rollout, trajectories=[broken(t, value) for t in rollout.trajectories]))
    rollout = made.collect(1)
    batch = rollout.replay.batch
    bad = batch.verdicts == Verdict.BAD_RECORD
    assert bad.sum(dim=1).tolist() == [1] * len(batch)
    (mini,) = made.update(rollout)
    assert math.isfinite(mini.result.loss)
    assert not mini.result.skipped
    assert int(trained(mini.batch).sum()) == int(trained(rollout.batch).sum() + trained(batch).sum())
    assert made.metrics()["replay/bad_tokens"] == len(batch)


def test_answers_whose_log_probs_are_missing_altogether_train_nothing():
    made = learner(**{"replay.share": 0.5})
    rollout = made.collect(0)
    lost = [dataclasses.replace(t, behaviour_logprobs=None) for t in rollout.trajectories]
    made.update(dataclasses.replace(rollout, trajectories=lost))
    rollout = made.collect(1)
    assert not trained(rollout.replay.batch).any()
    made.update(rollout)
    assert made.metrics()["replay/bad_tokens"] > 10
    assert made.metrics()["weights_moved"]


# -- with a critic, with a loss of one's own, on disk ------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_critic_learns_from_fresh_answers_and_the_policy_from_both(mode):
    made = learner(preset="ppo", **{"algorithm.kl_coef": 0.05, "replay.share": 0.5, "replay.mode": mode})
    run(made, 2)
    steps = made.update(made.collect(2))
    assert made.metrics()["replay/groups"] == 3
    for mini in steps:
        assert math.isfinite(mini.result.loss)
        if mode != "observe":
            old = mini.batch.replayed
            assert (mini.result.contributions["value"][old] == 0).all()
            assert not (mini.result.contributions["policy"][old] == 0).all()


def test_joint_returns_are_those_of_the_joined_rewards():
    """Rewards are whitened over fresh and replayed answers together, so the fresh ones have other returns than alone."""
    settings = {"algorithm.whiten_rewards": True, "replay.share": 0.5, "replay.normalise": "joint"}
    joint, separate = (learner(preset="ppo", **settings | more) for more in ({}, {"replay.normalise": "separate"}))
    for made in (joint, separate):
        run(made, 1)
    fresh, alone = (made.collect(1) for made in (joint, separate))
    rows, time = fresh.batch.ids.shape
    assert torch.equal(fresh.batch.returns, fresh.replay.joined.returns[:rows, :time])
    assert not torch.allclose(fresh.batch.returns, alone.batch.returns)


@pytest.mark.parametrize("preset", ["reinforce", "grpo"])
def test_every_algorithm_can_replay(preset):
    made = learner(preset=preset, **{"replay.share": 0.5})
    assert run(made, 3)[-1]["replay/groups"] == 3


def test_a_loss_of_ones_own_finds_replayed_rows_by_their_mark():
    from rolecall.train.step import Term

    marked = []

    def loss(out, batch):
        marked.append(None if batch.replayed is None else int(batch.replayed.sum()))
        return {"mine": Term(values=-out.logprobs, mask=trained(batch), mode="token-mean")}

    made = learner_of(options(**{"replay.share": 0.5}), varied, rows=ROWS * 2, loss=loss)
    run(made, 1)
    assert set(marked) == {None}
    marked.clear()
    run(made, 1, start=1)
    assert max(marked) == 12


def test_updates_say_where_a_replayed_answer_was_sampled(tmp_path):
    for mode, name in (("clipped", "a"), ("observe", "b")):
        made = learner(**{"replay.share": 0.5, "replay.mode": mode})
        with RunDir(tmp_path, name) as opened:
            made.watches.append(Records(opened, made.options, model=made.engine.hash, tokenizer="bytes"))
            run(made, 2)
        rows = read_updates(tmp_path / name / "updates" / "step-000002.parquet")
        old = [row for row in rows if row.rollout_step == 1]
        assert sorted(row.trajectory for row in old) == list(range(12))
        assert len(rows) == 24
        pulled = sum(float(row.contributions["policy"].abs().sum()) for row in old if row.contributions)
        assert (pulled > 0) == (mode == "clipped")
        for row in old:
            assert row.ratio is not None
            if mode == "observe":
                assert Verdict.REPLAY_OBSERVED in row.verdicts.tolist()
                assert Verdict.TRAINED not in row.verdicts.tolist()
                assert not row.contributions
            else:
                assert Verdict.TRAINED in row.verdicts.tolist()


# -- state -------------------------------------------------------------------------------------------------------


def test_a_learner_goes_on_exactly_with_its_buffer(tmp_path):
    from rolecall.train.persist import policy_files, read_checkpoint, write_checkpoint

    settings = {"replay.share": 0.5, "replay.sampler": "difficulty", "replay.solved_at": 0.5, "replay.max_uses": 2}
    whole = learner(**settings)
    run(whole, 3)
    write_checkpoint(
        tmp_path,
        files=policy_files(whole.policy),
        module=whole.module,
        optimizer=whole.updater.optimizer,
        learner=whole.state_dict(),
        extra={},
    )
    again = learner(**settings)
    state, _ = read_checkpoint(
        tmp_path, files=policy_files(again.policy), module=again.module, optimizer=again.updater.optimizer
    )
    again.load_state_dict(state)
    assert run(whole, 3, start=3) == run(again, 3, start=3)
    assert same_bits(weights_of(whole), weights_of(again))


def test_groups_sampled_at_another_temperature_are_dropped_and_that_is_said(caplog):
    made = learner(**{"replay.share": 0.5})
    run(made, 1)
    other = learner(**{"replay.share": 0.5, "sampling.temperature": 0.7})
    other.replay.load_state_dict(made.replay.state_dict())
    assert len(other.replay.buffer) == 0
    assert "3 groups to replay were sampled at temperature 1" in caplog.text


def test_a_checkpoint_without_replay_begins_with_an_empty_buffer():
    made = learner()
    run(made, 1)
    later = learner(**{"replay.share": 0.5})
    later.load_state_dict(made.state_dict())
    assert len(later.replay.buffer) == 0


# -- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"replay.share": 1.0}, r"replay.share must lie in \[0, 1\)"),
        ({"replay.max_uses": 0}, "at least 1"),
        ({"replay.dual_clip": 1.0}, "larger than 1"),
        ({"replay.decoupled": True}, "needs a bound: set replay.weights"),
        ({"replay.decoupled": True, "replay.weights": "mask"}, "set algorithm.old_logprobs recompute"),
        ({"replay.weights": "truncate"}, "needs replay.decoupled"),
        ({"replay.weigh_fresh": True}, "needs replay.weights truncate or mask"),
        ({"replay.weigh_fresh": True, "replay.weights": "mask"}, "set algorithm.old_logprobs recompute"),
        ({"replay.mode": "observe", "replay.normalise": "joint"}, "set replay.normalise separate"),
        ({"replay.mode": "observe", "replay.replace_flat": True}, "cannot replace flat groups"),
        ({"replay.answers": 0}, "at least 1"),
        ({"replay.weights_low": 3.0}, "a band above 0"),
        ({"from_run": "runs/x", "replay.share": 0.5}, "everything is replayed already"),
        ({"from_run": "runs/x", "algorithm.old_logprobs": "detach"}, "leave it auto"),
        ({"replay.shares": 0.5}, "did you mean"),
    ],
)
def test_impossible_settings_are_refused_in_a_sentence(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        options(**settings)


def test_batches_of_different_width_and_fields_are_joined_without_losing_a_value():
    made = learner(**{"replay.share": 0.5, "algorithm.kl_coef": 0.1})
    run(made, 1)
    rollout = made.collect(1)
    fresh, old = rollout.batch, rollout.replay.batch
    old = old.trimmed(old.ids.shape[1] - 1)
    both = join(fresh, old)
    assert both.ids.shape == (len(fresh) + len(old), fresh.ids.shape[1])
    assert both.ref_logprobs[len(fresh) :].isnan().all()
    for name, tensor in fresh.tensors():
        torch.testing.assert_close(getattr(both, name)[: len(fresh)], tensor, equal_nan=True)
    assert both.old_logprobs is None, "the fresh ones have none"
    for name, tensor in dataclasses.replace(old, old_logprobs=None).tensors():
        held = getattr(both, name)[len(fresh) :]
        torch.testing.assert_close(held if tensor.dim() == 1 else held[:, : tensor.shape[1]], tensor, equal_nan=True)


def test_the_page_names_every_mode_and_sampler():
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    from typing import get_args, get_type_hints

    from rolecall.config.experience import ReplayOptions

    hints = get_type_hints(ReplayOptions)
    for name in ("mode", "sampler", "weights", "weights_level", "normalise"):
        for choice in get_args(hints[name]):
            assert f"`{choice}`" in page


def test_every_number_of_replay_is_documented_and_every_documented_number_is_logged():
    from test_metrics_docs import documented, unknown

    decoupled = {"replay.decoupled": True, "replay.weights": "truncate", "algorithm.old_logprobs": "recompute"}
    names = set()
    for settings in ({"replay.mode": "observe"}, {"replay.mode": "shaped"}, decoupled):
        for metrics in run(learner(**{"replay.share": 0.5, **settings}), 2):
            names |= set(metrics)
    assert unknown(names, "Reinforcement learning") == set()
    wanted = {pattern.pattern.replace("\\", "") for pattern in documented("Reinforcement learning")}
    assert {name for name in wanted if name.startswith("replay/")} <= names
