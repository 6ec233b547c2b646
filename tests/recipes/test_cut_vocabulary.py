"""Training on answers drawn by top_k, top_p or min_p, against the enumeration of everything that can be drawn.

J is the expected score of the policy that really answers: at each token the most likely ids are kept, and one of these
is drawn. Its gradient holds the kept ids fixed, as J itself does between the jumps where an id enters or leaves.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from learners import learner_of, options_of, weights_of
from transformers import LlamaConfig, LlamaForCausalLM

from rolecall.config.rl import AlgorithmOptions
from rolecall.experience.batches import collate
from rolecall.experience.store import read_rollouts
from rolecall.maths.kl import kl_estimate
from rolecall.maths.roles import Role, TrainRule
from rolecall.policy.load import make_trainable
from rolecall.policy.model import PolicyModel
from rolecall.recipes.algorithms import Coefficients, algorithm_of
from rolecall.recipes.guard import Guard
from rolecall.recipes.records import Records
from rolecall.rollout.sampler import support
from rolecall.train.rundir import RunDir
from rolecall.train.score import score
from rolecall.train.step import Updater, trained
from rolecall.types import Sampling, Trajectory

VOCABULARY, LENGTH, STOP, PROMPT = 7, 3, 0, (3, 5)
CUTS = {
    "top_p": Sampling(temperature=0.8, top_p=0.7),
    "top_k": Sampling(temperature=1.5, top_k=2),
    "min_p": Sampling(min_p=0.4),
}
OFF_IN_FULL = {"top_p": 0.126, "top_k": 0.708, "min_p": 0.157}
"""How far the expected gradient is off with log-probs of the whole vocabulary; the table in docs/numerics.md."""
MASS = {"top_p": 0.78, "top_k": 0.57, "min_p": 0.83}
"""The share of the probability that can be drawn."""


def small_model(seed=2, scale=0.45):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        eos_token_id=STOP,
    )
    model = LlamaForCausalLM(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, scale, generator=generator)
    make_trainable(model)
    return model


def reward(answer):
    """Any score that is not the same for all."""
    return 1.0 + math.sin(1 + sum((i + 1) * (3 * token + 1) for i, token in enumerate(answer)))


def tempered(model, sampling, answer):
    """[vocabulary] the logits behind a beginning of an answer, from transformers alone."""
    return model(input_ids=torch.tensor([[*PROMPT, *answer]])).logits[0, -1] / sampling.temperature


def enumerated(model, sampling, answer=(), logprob=None):
    """(answer, log-prob that it is drawn) of all that can be drawn."""
    logprob = torch.zeros((), dtype=torch.float64) if logprob is None else logprob
    if len(answer) == LENGTH or (answer and answer[-1] == STOP):
        return [(answer, logprob)]
    z = tempered(model, sampling, answer)
    kept = support(z[None].detach(), sampling)[0]
    logits = z.masked_fill(~kept, -torch.inf).log_softmax(-1)
    return [
        pair
        for token in kept.nonzero().flatten().tolist()
        for pair in enumerated(model, sampling, (*answer, token), logprob + logits[token])
    ]


def expected_score(model, sampling):
    return sum(logprob.exp() * reward(answer) for answer, logprob in enumerated(model, sampling))


@torch.no_grad()
def trajectory(model, sampling, answer):
    """As an engine hands it over."""
    supports, logprobs = [], []
    for i, token in enumerate(answer):
        z = tempered(model, sampling, answer[:i])
        kept = support(z[None], sampling)[0] if sampling.records_support else torch.ones(VOCABULARY, dtype=torch.bool)
        supports.append(kept.nonzero().flatten().to(torch.int32).numpy().tobytes())
        logprobs.append(float(z.masked_fill(~kept, -torch.inf).log_softmax(-1)[token]))
    return Trajectory(
        ids=(*PROMPT, *answer),
        roles=(int(Role.PROMPT),) * len(PROMPT) + (int(Role.CONTENT),) * len(answer),
        behaviour_logprobs=(math.nan,) * len(PROMPT) + tuple(logprobs),
        supports=(b"",) * len(PROMPT) + tuple(supports) if sampling.records_support else None,
    )


def batch_of(model, sampling):
    """Every answer that can be drawn, weighed by how often it is; the advantage is its score less the expected one."""
    everything = enumerated(model, dataclasses.replace(sampling, logprobs="drawn"))
    batch = collate([trajectory(model, sampling, answer) for answer, _ in everything])
    shares = torch.stack([logprob.detach().exp() for _, logprob in everything])
    assert float(shares.sum()) == pytest.approx(1, abs=1e-12)
    scores = torch.tensor([reward(answer) for answer, _ in everything]).double()
    return dataclasses.replace(
        batch,
        verdicts=TrainRule().verdicts(batch.roles),
        old_logprobs=batch.behaviour_logprobs,
        advantages=(scores - (shares * scores).sum())[:, None].expand(batch.ids.shape),
        weights=shares[:, None].expand(batch.ids.shape),
    )


def step_gradient(model, batch, sampling, *, loss, token_budget=10_000):
    """- the gradient of one optimiser step of the library."""
    module = PolicyModel(model)
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))
    updater = Updater(accelerator, wrapped, optimizer, token_budget=token_budget, max_grad_norm=None)
    options = AlgorithmOptions(name="reinforce", baseline="none", loss=loss, aggregate="token-sum")
    updater.step(batch, algorithm_of(options, Coefficients(max_new_tokens=4)).loss, temperature=sampling.temperature)
    return -torch.cat([p.grad.flatten() for p in module.parameters()])


def true_gradient(model, sampling):
    gradients = torch.autograd.grad(expected_score(model, sampling), list(model.parameters()))
    return torch.cat([g.flatten() for g in gradients])


def off(found, truth):
    return float((found - truth).norm() / truth.norm())


@torch.no_grad()
def mass(model, sampling):
    """The share of the full distribution that could be drawn, on average over tokens."""
    kept = [support(tempered(model, sampling, a)[None], sampling)[0] for a in ((), (1,), (2, 4))]
    full = [tempered(model, sampling, a).softmax(-1) for a in ((), (1,), (2, 4))]
    return float(sum(p[k].sum() for p, k in zip(full, kept, strict=True)) / 3)


@pytest.mark.parametrize("loss", ["reinforce", "clip"])
@pytest.mark.parametrize("cut", CUTS)
def test_the_expected_gradient_is_that_of_the_policy_that_answers(cut, loss):
    """And not with log-probs of the whole vocabulary, of which a part could never be drawn."""
    model, sampling = small_model(), CUTS[cut]
    assert mass(model, sampling) == pytest.approx(MASS[cut], abs=0.005)
    truth = true_gradient(model, sampling)
    found = step_gradient(model, batch_of(model, sampling), sampling, loss=loss)
    assert off(found, truth) < 1e-6  # log-probs are recorded in float32, in which transformers computes norms
    full = dataclasses.replace(sampling, logprobs="full")
    biased = off(step_gradient(model, batch_of(model, full), full, loss=loss), truth)
    assert biased == pytest.approx(OFF_IN_FULL[cut], abs=0.001)


@pytest.mark.parametrize("cut", CUTS)
def test_it_is_also_the_slope_of_the_expected_score_when_the_cut_moves_along(cut):
    """By finite differences, with the kept ids chosen anew at both ends."""
    model, sampling = small_model(), CUTS[cut]
    slope = true_gradient(model, sampling)
    direction = slope / slope.norm()
    ends = []
    for sign in (1, -1):
        torch.nn.utils.vector_to_parameters(
            torch.nn.utils.parameters_to_vector(small_model().parameters()) + sign * 1e-3 * direction,
            model.parameters(),
        )
        ends.append(float(expected_score(model, sampling).detach()))
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(float(slope.norm()), rel=1e-3)


def test_without_a_cut_the_gradient_is_that_of_the_policy():
    model, sampling = small_model(), Sampling(temperature=0.8)
    found = step_gradient(model, batch_of(model, sampling), sampling, loss="reinforce")
    assert off(found, true_gradient(model, sampling)) < 1e-6


def test_how_the_batch_is_cut_into_micro_batches_changes_nothing():
    model, sampling = small_model(), CUTS["top_p"]
    batch = batch_of(model, sampling)
    whole = step_gradient(model, batch, sampling, loss="reinforce")
    parts = step_gradient(model, batch, sampling, loss="reinforce", token_budget=12)
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cut", CUTS)
def test_the_kl_is_that_of_the_two_cut_policies_on_the_same_ids(cut):
    """Of all answers, exact and estimated by k1; with full log-probs k1 estimates no KL: it may be negative."""
    model, reference, sampling = small_model(), PolicyModel(small_model(seed=1)), CUTS[cut]
    batch = batch_of(model, sampling)
    mask, how = trained(batch), {"temperature": sampling.temperature, "token_budget": 10_000}
    ref = score(reference, batch, mask, **how).logprobs
    now = score(PolicyModel(model), batch, mask, **how, against=reference.read)
    expected = 0.0
    for (answer, logprob), row in zip(enumerated(model, sampling), batch.ids, strict=True):
        assert tuple(row[len(PROMPT) : len(PROMPT) + len(answer)].tolist()) == answer
        for i in range(len(answer)):
            z, q = (tempered(m, sampling, answer[:i]) for m in (model, reference.model))
            kept = support(z[None], sampling)[0]
            p, q = (x.masked_fill(~kept, -torch.inf).log_softmax(-1)[kept] for x in (z, q))
            expected += float((logprob.exp() * (p.exp() * (p - q)).sum()).detach())
    shares = batch.weights[:, :1]
    assert float((shares * now.kl).sum()) == pytest.approx(expected, rel=1e-5)
    k1 = kl_estimate(now.logprobs, ref, mask, kind="k1")
    assert float((shares * k1).sum()) == pytest.approx(expected, rel=1e-5)
    assert bool((now.entropy[mask] <= math.log(VOCABULARY)).all())


# -- a whole run ------------------------------------------------------------------------------------------------------


def varied(sample) -> float:
    return sum(i % 7 for i in sample.completion_ids) / (6 * max(1, len(sample.completion_ids)))


def cut_learner(engine=None, **settings):
    small = {"prompts": 2, "samples": 4, "sampling.max_new_tokens": 6, "optim.lr": 1e-3, "sampling.top_p": 0.6}
    made = learner_of(options_of("grpo", **{**small, **settings}), varied, engine=engine)
    guard = Guard(
        made.options, policy=made.policy, updater=made.updater, engine=made.engine, engine_dtype=torch.float32
    )
    made.watches = [guard]
    return made


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm.minibatches": 2, "algorithm.epochs": 2, "algorithm.kl_coef": 0.1},
        {"algorithm.kl_coef": 0.1, "algorithm.kl_kind": "exact"},
        {"sampling.top_k": 5, "replay.share": 0.5},
    ],
)
def test_a_guarded_run_agrees_with_its_engine(settings):
    """Trainer and engine agree on what was drawn from, in fresh and in replayed answers."""
    made = cut_learner(**settings)
    for step in range(3):
        rollout = made.collect(step)
        made.update(rollout)
        assert made.metrics()["sampling/sampling_logp_difference/max"] < 1e-4
    supports = rollout.training.supports
    assert int(supports.counts[trained(rollout.training)].min()) > 0
    assert float((rollout.batch.behaviour_logprobs.nan_to_num() == 0).float().mean()) < 1


def test_replayed_answers_keep_what_they_could_be_drawn_from_through_a_checkpoint(tmp_path):
    """With unchanged weights every replayed ratio is 1, also behind a checkpoint."""
    from rolecall.train.state import read_state, write_state

    settings = {"replay.share": 0.5, "optim.lr": 1e-30, "optim.max_grad_norm": None}
    made = cut_learner(**settings)
    made.watches = []  # weights that do not move would end the run
    made.update(made.collect(0))
    write_state(tmp_path, "state", made.state_dict())
    again = cut_learner(**settings)
    again.watches = []
    again.load_state_dict(read_state(tmp_path, "state"))
    for learner in (made, again):
        learner.update(learner.collect(1))
        assert learner.metrics()["replay/groups"] > 0
        assert learner.metrics()["replay/ratio_max"] == pytest.approx(1, abs=1e-4)
        assert learner.metrics()["replay/ess"] == pytest.approx(1, abs=1e-6)
    held = [t.supports for group in made.replay.buffer.groups for t in group.trajectories]
    assert held == [t.supports for group in again.replay.buffer.groups for t in group.trajectories]
    assert all(held)


def test_the_record_of_a_run_says_what_could_be_drawn(tmp_path):
    made = cut_learner()
    with RunDir(tmp_path, "run") as run_dir:
        made.watches.append(Records(run_dir, made.options, model=made.engine.hash, tokenizer="t"))
        rollout = made.collect(0)
        made.update(rollout)
        (path,) = run_dir.rollouts.iterdir()
    found = read_rollouts(path).trajectories
    assert [t.supports for t in found] == [t.supports for t in rollout.trajectories]
    for t in found:
        for i, ids in enumerate(t.supports):
            if t.roles[i] != Role.PROMPT:
                assert t.ids[i] in np.frombuffer(ids, np.int32)


def test_full_log_probs_are_there_if_asked_for_and_record_no_ids():
    made = cut_learner(**{"sampling.logprobs": "full"})
    rollout = made.collect(0)
    assert rollout.batch.supports is None
    made.update(rollout)
    drawn = cut_learner()
    assert [t.ids for t in drawn.collect(0).trajectories] == [t.ids for t in rollout.trajectories]
    drawn.update(drawn.collect(1))
    assert not all(torch.equal(p, weights_of(drawn)[name]) for name, p in weights_of(made).items())
