"""Whole steps of RL, computed again by `language.Reference` from the settings, the first weights and the records."""

import json
import math

import pyarrow.parquet as pq
import pytest
import torch
from language import OBSERVED, TRAINED, Reference
from safetensors.torch import load_file
from scoring import Duel, duel_score, reward, score

import rolecall
from rolecall.policy.load import load

ROWS = [{"prompt": f"{word}:", "worth": 1.0 + i % 3} for i, word in enumerate(("go", "on", "up", "at", "by", "in"))]
STEPS = 2
CLOSE = {"rel": 2e-4, "abs": 2e-5}


def train(tmp_path, preset, **settings):
    common = {
        "rows": ROWS,
        "reward": reward,
        "steps": STEPS,
        "prompts": 3,
        "samples": 4,
        "seed": 5,
        "out": str(tmp_path / "run"),
        "quiet": True,
        "sampling": {"max_new_tokens": 5, "temperature": 0.8},
        "optim.lr": 1e-3,
        "optim.critic_lr": 3e-2,
        "optim.weight_decay": 0.1,
        "optim.warmup_steps": 2,
        "optim.max_grad_norm": 0.5,
        "optim.token_budget": 64,
        "save.updates": STEPS,
    }
    return rolecall.rl(preset=preset, **(common | settings))


def reference_of(run, **more):
    config = json.loads((run.path / "config.json").read_text())
    torch.manual_seed(0)
    model = load("tiny").model
    more.setdefault("score", lambda row: score(row["answer_text"], ROWS[row["prompt"]]["worth"]))
    return Reference(config, model, **more)


def records(run, kind, step):
    return pq.read_table(run.path / kind / f"step-{step:06d}.parquet").to_pylist()


def same(recorded, computed, what):
    """A list of the record, null where nothing was computed, against numbers by position."""
    for t, value in computed.items():
        assert recorded[t] == pytest.approx(value, **CLOSE), f"{what} of token {t}"


def check_rollout(reference, rows):
    answers = reference.rollout(rows)
    recompute = rows[0]["old_logprobs"] is not None
    for row, answer in zip(rows, answers, strict=True):
        assert row["verdicts"] == answer["verdicts"]
        assert row["total"] == (None if answer["total"] is None else pytest.approx(answer["total"]))
        same(row["behaviour_logprobs"], answer["logprobs"], "behaviour log-prob")
        answer["behaviour"] = {t: row["behaviour_logprobs"][t] for t in answer["places"]}
        answer["old"] = dict(answer["logprobs"]) if recompute else {}
        same(row["old_logprobs"], answer["old"], "old log-prob")
        same(row["ref_logprobs"], answer["ref_logprobs"], "reference log-prob")
        same(row["values"], answer["values"], "value")
        same(row["rewards"], dict(enumerate(answer["rewards"])), "reward")
        trained = {t: answer["advantages"][t] for t in reference.trained(answer)}
        same(row["advantages"], trained, "advantage")
        same(row["returns"], answer.get("returns", {}), "return")
    return answers


def check_update(reference, places, rows, *, step):
    """The optimiser steps of a record, in their order; `places` finds an answer by (step, row)."""
    for mini in sorted({(row["epoch"], row["minibatch"]) for row in rows}):
        chosen = [row for row in rows if (row["epoch"], row["minibatch"]) == mini]
        answers = [places[row["rollout_step"], row["trajectory"]] for row in chosen]
        kept, norm = reference.step(answers, done=step - 1)
        for row, found in zip(chosen, kept, strict=True):
            assert [t for t, v in enumerate(row["verdicts"]) if v == TRAINED] == sorted(found["logprobs"])
            same(row["logprobs"], found["logprobs"], "log-prob")
            same(row["ratio"], found["ratio"], "ratio")
            for t, terms in found["contributions"].items():
                for name, share in terms.items():
                    assert row[f"contribution_{name}"][t] == pytest.approx(share, rel=1e-3, abs=1e-6), (name, t)
                recorded = {n for n in row if n.startswith("contribution_") and row[n] is not None and row[n][t]}
                assert recorded <= {f"contribution_{name}" for name in terms}
        yield norm


def check_weights(reference, run):
    """The last weights: off by a thousandth of the way they went."""
    saved = load_file(run.model / "model.safetensors")
    moved = off = 0.0
    for name, tensor in saved.items():
        ours = reference.parameters[name].detach()
        moved += float((ours - reference.start[name]).square().sum())
        off += float((ours - tensor.double()).square().sum())
    assert moved > 0
    assert math.sqrt(off / moved) < 2e-3


def walk(run, **more):
    """Check every step of a run without replay."""
    reference = reference_of(run, **more)
    for step, metrics in enumerate(run.metrics, start=1):
        rows = records(run, "rollouts", step)
        answers = check_rollout(reference, rows)
        places = {(step, i): answer for i, answer in enumerate(answers)}
        norms = list(check_update(reference, places, records(run, "updates", step), step=step))
        assert metrics["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3)
        if reference.o["kl_coef"]:
            assert metrics["kl_coef"] == pytest.approx(reference.kl_coef, rel=1e-4)
        reference.steer(answers)
    check_weights(reference, run)
    return reference


def test_a_step_of_grpo(tmp_path):
    run = train(tmp_path, "grpo")
    walk(run)
    failed = [row["total"] for step in range(1, STEPS + 1) for row in records(run, "rollouts", step)]
    assert None in failed, "the test is about a step in which some rewards failed"


def test_a_step_of_grpo_with_the_kl_in_the_loss_and_several_optimiser_steps(tmp_path):
    settings = {
        "steps": 3,  # the third has the coefficient that the KL of the second has moved
        "save.updates": 3,
        "algorithm.kl_coef": 0.5,
        "algorithm.kl_target": 0.3,
        "algorithm.kl_horizon": 50.0,
        "algorithm.minibatches": 2,
        "algorithm.epochs": 2,
        "algorithm.entropy_coef": 0.01,
        "algorithm.aggregate": "token-mean",
        "algorithm.dual_clip": 1.05,
        "algorithm.clip_low": 0.02,
        "algorithm.clip_high": 0.03,
    }
    run = train(tmp_path, "grpo", **settings)
    walk(run)
    first, second, third = (line["kl_coef"] for line in run.metrics)
    assert second == pytest.approx(first * (1 - 0.2 * 12 / 50)), "no KL yet: as far as it goes"
    assert 0 < abs(third / second - 1) < 0.19 * 12 / 50, "within its limits, so that it says how large the KL was"


PPO = {
    "samples": 2,
    "algorithm.kl_coef": 0.5,
    "algorithm.kl_target": 0.05,
    "algorithm.kl_horizon": 50.0,
    "algorithm.entropy_coef": 0.01,
    "algorithm.gamma": 0.9,
    "algorithm.value_clip": 0.02,
    "algorithm.clip_low": 0.02,
    "algorithm.clip_high": 0.03,
}


def test_a_step_of_ppo_with_the_kl_in_the_reward(tmp_path):
    reference = walk(train(tmp_path, "ppo", **PPO))
    assert reference.kl_coef != 0.5, "the controller has moved"


def test_a_step_of_ppo_with_the_kl_in_the_loss_and_stop_untrained(tmp_path):
    settings = PPO | {"algorithm.kl_in": "loss", "algorithm.kl_kind": "k3", "algorithm.train_stop": False}
    walk(train(tmp_path, "ppo", **settings))


DARK = [chr(c) for c in range(128) if c % 2]
"""Texts that never train: half of all characters, so that many last tokens are among them."""


def dark(ids):
    return [token < 128 and token % 2 == 1 for token in ids]


def test_a_step_of_ppo_with_tokens_blacked_out_and_rewards_whitened(tmp_path):
    settings = PPO | {"blackout": DARK, "algorithm.whiten_rewards": True}
    walk(train(tmp_path, "ppo", **settings), blackout=dark)


@pytest.mark.parametrize("mode", ["clipped", "shaped", "observe"])
def test_steps_with_replay(tmp_path, mode):
    settings = {"replay.share": 0.5, "replay.mode": mode, "replay.clip_high": 0.05, "replay.max_staleness": 1}
    run = train(tmp_path, "grpo", **settings)
    reference, held, replayed = reference_of(run), {}, 0
    for step in range(1, STEPS + 1):
        fresh = check_rollout(reference, records(run, "rollouts", step))
        held |= {(step, i): answer for i, answer in enumerate(fresh)}
        updates = records(run, "updates", step)
        old = [row for row in updates if row["rollout_step"] < step]
        replayed += len(old)
        assert all(step - row["rollout_step"] <= 1 for row in old), "no group is older than max_staleness"
        places = {place: answer | {"replayed": place[0] < step} for place, answer in held.items()}
        if mode == "observe":
            for row in old:
                answer = places[row["rollout_step"], row["trajectory"]]
                assert [v == OBSERVED for v in row["verdicts"]] == [v == TRAINED for v in answer["verdicts"]]
                with torch.no_grad():
                    ((spread, _),) = reference.read([answer["ids"]])
                now = {t: spread[t, answer["ids"][t]].item() for t in reference.trained(answer)}
                same(row["logprobs"], now, "log-prob")
                same(row["ratio"], {t: math.exp(x - answer["behaviour"][t]) for t, x in now.items()}, "ratio")
            updates = [row for row in updates if row["rollout_step"] == step]
        list(check_update(reference, places, updates, step=step))
    assert replayed, "the test is about steps that replay"
    check_weights(reference, run)


def test_a_step_of_two_players_of_one_policy(tmp_path):
    run = train(tmp_path, "grpo", env=Duel, reward=None)
    said = {}
    for row in [row for step in range(1, STEPS + 1) for row in records(run, "rollouts", step)]:
        written = [t for turn in row["turns"] for t in range(turn["start"], turn["end"])]
        assert [t for t, v in enumerate(row["verdicts"]) if v == TRAINED] == written, "all that it wrote, nothing else"
        assert len(row["turns"]) == {"ada": 2, "bob": 1}[row["agent"]]
        if row["agent"] == "ada":  # who had the last word has heard everything
            words = [(m.get("author") or "ada", m["content"]) for m in row["messages"][1:]]
            said[row["group"], row["episode"]] = words
    walk(
        run,
        score=lambda row: duel_score(row["agent"], said[row["group"], row["episode"]]),
        number=lambda row: Duel.players.index(row["agent"]) * 4 + row["sample"],
    )
