"""The numbers of docs/numerics.md: each choice on which libraries differ, ours beside the other one."""

import math

import pytest
import torch
from masking import every

from rolecall.conformance.compare import reals
from rolecall.maths import advantages, losses
from rolecall.maths.kl import exact_kl, kl_estimate
from rolecall.maths.reduce import MODES, aggregate, masked_whiten
from rolecall.maths.returns import discounted_returns, gae
from rolecall.maths.roles import Role, TrainRule
from rolecall.maths.shaping import place_scores


def rounded(x, digits=4):
    """Numbers as the page prints them."""
    return [round(value, digits) + 0.0 for value in x.flatten().tolist()]


ANSWER_TOOL_ANSWER = torch.tensor([[True, True, False, False, False, True, True]])


def test_gae_walks_over_observations():
    rewards, values = reals([0.0] * 6 + [1.0]), torch.zeros(1, 7).double()
    ours, _ = gae(rewards, values, ANSWER_TOOL_ANSWER, gamma=1.0, lam=0.95)
    stepping, _ = gae(rewards, values, every(values), gamma=1.0, lam=0.95)
    assert rounded(ours) == [0.8574, 0.9025, 0.0, 0.0, 0.0, 0.95, 1.0]
    assert rounded(stepping)[0] == 0.7351


def test_returns_reach_over_observations():
    rewards, mask = reals([0.0, 7.0, 1.0]), torch.tensor([[True, False, True]])
    assert rounded(discounted_returns(rewards, mask, gamma=0.5)) == [0.5, 0.0, 1.0]


def test_returns_are_built_from_raw_advantages():
    rewards, values = reals([0.0, 1.0]), reals([0.2, 0.6])
    raw, returns = gae(rewards, values, every(values), gamma=1.0, lam=1.0)
    assert rounded(raw) == [0.8, 0.4]
    assert rounded(returns) == [1.0, 1.0]
    assert rounded(masked_whiten(raw, every(raw)) + values) == [1.2, -0.4]


def test_a_cut_off_answer_bootstraps_only_when_asked():
    rewards, values = reals([0.0, 0.0]), reals([0.5, 0.8])
    ended, _ = gae(rewards, values, every(values), gamma=1.0, lam=1.0)
    cut, _ = gae(rewards, values, every(values), gamma=1.0, lam=1.0, bootstrap=torch.tensor([0.9]).double())
    assert rounded(ended) == [-0.5, -0.8]
    assert rounded(cut) == [0.4, 0.1]


def test_whitening_is_biased_with_eps_inside_the_root():
    x = reals([1.0, 2.0, 3.0, 4.0])
    unbiased = (x - x.mean()) / (x.var() + 1e-8).sqrt()
    assert rounded(masked_whiten(x, every(x)))[-1] == 1.3416
    assert rounded(unbiased)[-1] == 1.1619
    assert rounded(masked_whiten(x[:, :1], every(x[:, :1]))) == [0.0]


def test_whitening_counts_trained_positions_only():
    x, mask = reals([1.0, 3.0, 0.0, 0.0]), torch.tensor([[True, True, False, False]])
    assert rounded(masked_whiten(x, mask)) == [-1.0, 1.0, 0.0, 0.0]
    assert rounded(masked_whiten(x, every(x))) == [0.0, 1.633, -0.8165, -0.8165]


ONE_GROUP = torch.zeros(4, dtype=torch.long)


def test_grpo_std_is_unbiased():
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0]).double()
    assert rounded(advantages.grpo(scores, ONE_GROUP)) == [0.8659, -0.8659, -0.8659, 0.8659]
    assert rounded((scores - scores.mean()) / scores.std(correction=0)) == [1.0, -1.0, -1.0, 1.0]


def test_grpo_eps_decides_what_a_nearly_flat_group_is_worth():
    scores = torch.tensor([0.5, 0.5001]).double()
    assert rounded(advantages.grpo(scores, ONE_GROUP[:2]))[1] == 0.2929
    assert rounded(advantages.grpo(scores, ONE_GROUP[:2], eps=1e-6))[1] == 0.6972


def test_a_flat_group_is_exactly_zero():
    scores = torch.full((3,), 0.1, dtype=torch.float64)
    residue = scores - scores.sum() / 3
    assert residue.tolist() == [-1.3877787807814457e-17] * 3
    assert rounded(residue / residue.square().sum().div(2).sqrt()) == [-0.8165] * 3
    assert advantages.grpo(scores, ONE_GROUP[:3], eps=0.0).tolist() == [0.0, 0.0, 0.0]


def test_a_group_of_one_is_zero_and_not_its_score():
    score = torch.tensor([0.7]).double()
    for method in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
        assert method(score, ONE_GROUP[:1]).tolist() == [0.0]


def test_a_failed_reward_is_left_out():
    scores, include = torch.tensor([1.0, 1.0, torch.nan]).double(), torch.tensor([True, True, False])
    assert rounded(advantages.grpo(scores, ONE_GROUP[:3], include=include)) == [0.0, 0.0, 0.0]
    assert rounded(advantages.grpo(scores.nan_to_num(0.0), ONE_GROUP[:3])) == [0.5773, 0.5773, -1.1545]


# Two answers, of 4 positions with loss 1 and of 1 position with loss 4, and a row that does not train.
LOSS = reals([1.0, 1.0, 1.0, 1.0], [4.0, 0.0, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0])
COUNTS = torch.tensor([[True] * 4, [True] + [False] * 3, [False] * 4])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 1.6),
        ("token-sum", 8.0),
        ("seq-mean-token-mean", 2.5),
        ("seq-mean-token-sum", 4.0),
        ("seq-mean-token-sum-norm", 0.4),
    ],
)
def test_denominators(mode, expected):
    norm = 10.0 if mode == "seq-mean-token-sum-norm" else None
    assert aggregate(LOSS, COUNTS, mode=mode, norm=norm).item() == pytest.approx(expected, abs=1e-12)


def test_every_mode_of_reduction_is_on_the_page():
    assert len(MODES) == 5


def test_other_denominators():
    total = torch.where(COUNTS, LOSS, 0).sum()
    assert (total / len(LOSS)).item() == pytest.approx(2.6667, abs=1e-4)  # the untrained row counted as a sequence
    assert (total / LOSS.shape[1]).item() == 2.0  # the width of the batch as the norm, and no count of sequences
    per_micro_batch = [aggregate(LOSS[i, None], COUNTS[i, None], mode="token-mean") for i in (0, 1)]
    assert (sum(per_micro_batch) / 2).item() == 2.5  # token-mean averaged over micro-batches


def test_the_stop_token_trains_and_the_score_is_never_lost():
    roles = torch.tensor([[Role.PROMPT, Role.CONTENT, Role.CONTENT, Role.STOP, Role.PAD]], dtype=torch.uint8)
    score = torch.tensor([1.0])
    both, content = TrainRule().eligible(roles), TrainRule(stop=False).eligible(roles)
    assert place_scores(score, both).tolist() == [[0.0, 0.0, 0.0, 1.0, 0.0]]
    assert place_scores(score, content).tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0]]
    assert (place_scores(score, both) * content).sum() == 0  # score on the stop, then masked by value


LOGITS = torch.tensor([0.3, -1.2, 2.0, 0.0, 0.7], dtype=torch.float64)
REF_LOGITS = torch.tensor([1.0, 0.4, 0.5, -2.0, 0.6], dtype=torch.float64)


def test_kl_estimators_as_losses():
    """Expected gradients over the vocabulary, and how far each lies from that of KL(pi || ref)."""

    def gradient(loss):
        logits = LOGITS.clone().requires_grad_()
        return torch.autograd.grad(loss(logits), logits)[0]

    def expected(logits, kind):
        logprobs = logits.log_softmax(-1)
        estimate = kl_estimate(logprobs[None], REF_LOGITS.log_softmax(-1)[None], every(LOGITS[None]), kind=kind)
        return (logprobs.exp().detach() * estimate).sum()

    exact = gradient(lambda logits: exact_kl(logits, REF_LOGITS))
    off = {
        kind: ((gradient(lambda x, kind=kind: expected(x, kind)) - exact).norm() / exact.norm()).item()
        for kind in ("k1", "clamp", "k2", "k3")
    }
    values = {kind: expected(LOGITS, kind).item() for kind in off}
    assert exact_kl(LOGITS, REF_LOGITS).item() == pytest.approx(0.5506, abs=1e-4)
    assert values == pytest.approx({"k1": 0.5506, "clamp": 0.7840, "k2": 0.5835, "k3": 0.5506}, abs=1e-4)
    assert off == pytest.approx({"k1": 1.0, "clamp": 0.4609, "k2": 0.0, "k3": 0.3987}, abs=1e-4)


def test_a_broken_log_ratio_is_large_and_never_infinite():
    logprobs, old, mask = torch.tensor([[1e4]]), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    assert (logprobs - old).exp().item() == math.inf
    assert losses.ratio(logprobs, old, mask).item() == pytest.approx(4.85165e8, rel=1e-5)


def test_k3_of_a_token_the_policy_lost_does_not_lose_it_further():
    """Clamping the exponential alone leaves + x, whose slope of 1 lowers the log-prob further."""
    x = torch.tensor([[-25.0]], requires_grad=True)
    half_clamped = (-x).clamp(max=20.0).exp() - 1 + x
    assert torch.autograd.grad(half_clamped.sum(), x)[0].item() == 1.0
    ours = kl_estimate(x, torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), kind="k3")
    assert torch.autograd.grad(ours.sum(), x)[0].item() == 0.0


def test_nan_where_masked_stays_there():
    logprobs, mask = torch.tensor([[-1.0, torch.nan]], requires_grad=True), torch.tensor([[True, False]])
    assert ((-logprobs * mask).sum() / mask.sum()).isnan()
    loss = aggregate(losses.nll(logprobs, mask), mask, mode="token-mean")
    loss.backward()
    assert loss.item() == 1.0
    assert logprobs.grad.tolist() == [[-1.0, 0.0]]


def test_a_small_drift_per_token_is_a_large_one_per_sequence():
    logprobs, sampled = torch.full((1, 100), -0.988).double(), torch.full((1, 100), -1.0).double()

    def weight(level, kind):
        return losses.importance_weights(logprobs, sampled, every(sampled), level=level, kind=kind, high=3.0)[0, 0]

    assert weight("token", "mask").item() == pytest.approx(1.0121, abs=1e-4)
    assert math.exp(100 * 0.012) == pytest.approx(3.3201, abs=1e-4)
    assert weight("sequence", "truncate").item() == 3.0
    assert weight("sequence", "mask").item() == 0.0


def test_clipping_takes_the_larger_loss():
    rho, good = reals([2.0]), reals([1.0])

    def loss(advantage):
        return losses.ppo_clip(rho.log(), 0 * rho, advantage, every(rho), clip_low=0.2, clip_high=0.2).item()

    assert loss(good) == pytest.approx(-1.2)
    assert loss(-good) == pytest.approx(2.0)  # not 1.2: a bad action that became twice as likely is charged in full
