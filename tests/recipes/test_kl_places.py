"""Every kind of KL in every place, by enumeration of all answers of a tiny policy: where does its expected gradient lead?

The policy is a table: three tokens, answers of one or two of them. What a step descends in expectation is the sum over
all answers of their probability times their loss; it is compared with the gradient of KL(policy || reference) itself.
"""

import dataclasses
import itertools

import pytest
import torch

from rolecall.config.merge import resolve
from rolecall.config.rl import AlgorithmOptions, RLOptions
from rolecall.look.records import kl_kind_of
from rolecall.maths.kl import KINDS, exact_kl, kl_estimate
from rolecall.maths.roles import Role, TrainRule
from rolecall.maths.shaping import shape_rewards
from rolecall.policy.model import Outputs
from rolecall.recipes.algorithms import Coefficients, algorithm_of
from rolecall.types import Batch

ALL = (*KINDS, "exact")


def tables(length, seed):
    """Logits of policy and reference before each token: of the first, and of the second after each first."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(1, 3), (3, 3)][:length]
    made = [[1.2 * torch.randn(s, generator=g, dtype=torch.float64) for s in shapes] for _ in range(2)]
    return [t.requires_grad_() for t in made[0]], made[1]


class Enumerated:
    """All answers of a length, with log-probs under both, the exact KL before each token, and their probabilities."""

    def __init__(self, length, seed=3):
        self.policy, self.reference = tables(length, seed)
        self.answers = list(itertools.product(range(3), repeat=length))

        def read(logits):
            rows = [
                [logits[t][0 if t == 0 else a[0]].log_softmax(-1)[a[t]] for t in range(length)] for a in self.answers
            ]
            return torch.stack([torch.stack(row) for row in rows])

        self.logprobs, self.ref = read(self.policy), read(self.reference)
        both = [exact_kl(p, r) for p, r in zip(self.policy, self.reference, strict=True)]
        self.kl = torch.stack(
            [torch.stack([both[t][0 if t == 0 else a[0]] for t in range(length)]) for a in self.answers]
        )
        self.chances = self.logprobs.sum(1).exp()
        self.roles = torch.full(self.logprobs.shape, int(Role.CONTENT), dtype=torch.uint8)

    def gradient(self, value):
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, self.policy, retain_graph=True)])

    def wanted(self):
        """Of KL(policy || reference) of whole answers."""
        return self.gradient((self.chances * (self.logprobs - self.ref).sum(1)).sum())

    def by_token(self):
        """Of the KL at each token, with what came before it as it is: what a loss of tokens can descend."""
        return self.gradient((self.chances.detach()[:, None] * self.kl).sum())

    def estimate(self, kind):
        mask = torch.ones_like(self.logprobs, dtype=torch.bool)
        if kind == "exact":
            return self.kl.detach()
        return kl_estimate(self.logprobs.detach(), self.ref, mask, kind=kind)

    def found(self, place, kind):
        """Of what a step with this option descends; scores are 0, so that the KL is all there is."""
        kinds = {"kl_kind": kind} if place == "loss" else {}  # in the reward the kind is in the rewards already
        o = AlgorithmOptions(
            name="reinforce", baseline="none", aggregate="token-sum", kl_coef=1.0, kl_in=place, **kinds
        )
        rule, zero = TrainRule(), torch.zeros(len(self.answers), dtype=torch.float64)
        in_reward = self.estimate(kind) if place == "reward" else None
        batch = Batch(
            ids=torch.tensor(self.answers),
            roles=self.roles,
            groups=torch.zeros(len(zero), dtype=torch.long),
            scores=zero,
            verdicts=rule.verdicts(self.roles),
            ref_logprobs=self.ref,
            rewards=shape_rewards(zero, in_reward, rule.eligible(self.roles), kl_coef=1.0),
        )
        algorithm = algorithm_of(o, Coefficients(max_new_tokens=4, kl_coef=1.0))
        advantages = algorithm.advantage(batch)[:, None].expand_as(self.logprobs)
        batch = dataclasses.replace(batch, advantages=advantages)
        terms = algorithm.loss(Outputs(self.logprobs, torch.zeros_like(self.logprobs), None, kl=self.kl), batch)
        losses = sum(term.coef * term.values for term in terms.values())
        return self.gradient((self.chances.detach()[:, None] * losses).sum())


def cosine(a, b):
    return float(torch.cosine_similarity(a, b, dim=0)) if float(b.norm()) > 1e-9 else 0.0


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_in_the_reward_k1_has_the_gradient_of_the_kl_of_whole_answers(length, seed):
    every = Enumerated(length, seed)
    torch.testing.assert_close(every.found("reward", "k1"), every.wanted(), rtol=1e-10, atol=1e-12)


def test_in_the_reward_no_other_kind_has_it():
    """Each leads away from the reference for some policy; the one-sided clamp leads there, by less."""
    found = {kind: [] for kind in ALL}
    for length, seed in itertools.product((1, 2), range(12)):
        every = Enumerated(length, seed)
        for kind in ALL:
            got = every.found("reward", kind)
            found[kind].append((cosine(every.wanted(), got), float(got.norm() / every.wanted().norm())))
    for kind in ("k2", "k3", "abs", "exact"):
        assert min(cos for cos, _ in found[kind]) < -0.3, kind
    assert min(cos for cos, _ in found["clamp"]) > 0.3
    assert min(norm for _, norm in found["clamp"]) < 0.5
    assert found["exact"][0][1] < 1e-9, "of one token it is the same for every answer, so it pulls nothing"


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("length", [1, 2])
def test_in_the_loss_every_kind_has_the_gradient_of_the_kl_at_each_token(length, kind):
    every = Enumerated(length)
    torch.testing.assert_close(every.found("loss", kind), every.by_token(), rtol=1e-10, atol=1e-12)
    assert cosine(every.by_token(), every.wanted()) > (1 - 1e-9 if length == 1 else 0.99)


# -- options -------------------------------------------------------------------------------------------------------


def options_of(preset, **settings):
    return resolve(RLOptions, [("preset", RLOptions.presets[preset]), ("test", settings)]).options


@pytest.mark.parametrize("preset", RLOptions.presets)
def test_every_preset_resolves_to_a_kind_that_its_place_allows(preset):
    for place in ("loss", "reward"):
        if place == "reward" and RLOptions.presets[preset]["algorithm"].get("kl_kind") == "k2":
            continue  # refused, below
        found = options_of(preset, **{"algorithm.kl_in": place, "algorithm.kl_coef": 0.1}).algorithm.kl_estimator
        assert found in (("k1", "clamp") if place == "reward" else ALL)


def test_the_plan_says_which_kl_is_used_where():
    reward = options_of("grpo", **{"algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward"})
    assert "reference: yes (KL k1 in the reward, weight 0.1);" in reward.plan()
    rising = options_of("grpo", **{"algorithm.kl_coef": 0.1, "algorithm.kl_warmup": 30})
    assert "reference: yes (KL k3 in the loss, weight 0.1, rising over 30 steps);" in rising.plan()
    assert "reference: no;" in options_of("grpo").plan()


@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize("kind", ["auto", "k1", "clamp"])
def test_the_report_shows_the_kind_that_the_run_used(kind, place):
    o = AlgorithmOptions(kl_in=place, kl_kind=kind)
    assert kl_kind_of(dataclasses.asdict(o)) == o.kl_estimator


@pytest.mark.parametrize("kind", ["k2", "k3", "abs", "exact"])
def test_another_kind_in_the_reward_is_refused_by_one_sentence(kind):
    with pytest.raises(ValueError, match=rf"kl_kind {kind} in the reward .*kl_kind k1, or algorithm.kl_in loss"):
        AlgorithmOptions(kl_in="reward", kl_kind=kind, kl_coef=0.1)


@pytest.mark.parametrize("settings", [{"kl_coef": 0.0}, {"kl_coef": 0.1, "kl_target": 2.0}])
def test_a_weight_that_rises_needs_somewhere_to_rise_to(settings):
    with pytest.raises(ValueError, match="kl_warmup needs"):
        AlgorithmOptions(kl_warmup=5, **settings)
