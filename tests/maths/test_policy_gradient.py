"""The losses on a tiny language model: which logits a token's loss reaches, which way a step goes, what a first step is,
and what the three modes of replay do to a replayed row."""

import pytest
import torch

from rolecall.maths import losses
from rolecall.maths.kl import KINDS, kl_estimate
from rolecall.maths.reduce import aggregate

IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [2, 2, 3, 6, 1, 4]])
RESPONSE = torch.tensor([[False] * 4 + [True] * 2, [False] * 2 + [True] * 3 + [False]])


def model(seed=0):
    """A linear language model: embedding, then logits over 7 tokens."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)).double()


def logprobs_of(logits, ids):
    """logprobs[t] = log p(token t | tokens < t), so row t - 1 of the logits scores token t; token 0 is never scored."""
    scored = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(scored, (1, 0), value=torch.nan)


def step(lm, ids, mask, advantages, *, lr=0.5, mode="token-mean"):
    """One SGD step of REINFORCE in place; the gradients stay on the parameters."""
    lm.zero_grad()
    loss = losses.reinforce(logprobs_of(lm(ids), ids), advantages[:, None].expand(ids.shape), mask)
    aggregate(loss, mask, mode=mode).backward()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter -= lr * parameter.grad
    return lm


def response_logprob(lm, ids, mask):
    return torch.where(mask, logprobs_of(lm(ids), ids), 0).sum(1)


def test_a_response_behind_a_prompt_of_four_is_scored_by_logit_rows_three_and_four():
    logits = model()(IDS[:1]).detach().requires_grad_()
    losses.reinforce(logprobs_of(logits, IDS[:1]), torch.ones(1, 6).double(), RESPONSE[:1]).sum().backward()
    reached = logits.grad[0].abs().sum(-1) > 0
    assert reached.tolist() == [False, False, False, True, True, False]
    # The gradient of - log softmax: the probabilities, less 1 at the token that came: 5 in row 3, 6 in row 4.
    expected = logits.detach()[0].softmax(-1)
    expected[3, 5] -= 1
    expected[4, 6] -= 1
    torch.testing.assert_close(logits.grad[0, 3:5], expected[3:5], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("reward", "goes"), [(1.0, 1), (-0.1, -1), (0.0, 0)])
def test_a_good_reward_raises_the_response_and_a_bad_one_lowers_it(reward, goes):
    lm = model()
    before = response_logprob(lm, IDS[:1], RESPONSE[:1]).item()
    step(lm, IDS[:1], RESPONSE[:1], torch.tensor([reward]).double())
    after = response_logprob(lm, IDS[:1], RESPONSE[:1]).item()
    assert (after > before) - (after < before) == goes


def test_the_loss_of_a_good_answer_is_positive():
    """Log-probs are negative, so reward > 0 gives loss > 0; what matters is the gradient."""
    lm = model()
    loss = losses.reinforce(logprobs_of(lm(IDS), IDS), torch.ones(2, 6).double(), RESPONSE)
    assert (loss[RESPONSE] > 0).all()


@pytest.mark.parametrize("mode", ["token-sum", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_batch_equals_its_rows_one_by_one(mode):
    rewards = torch.tensor([1.0, -0.1]).double()
    whole = [p.grad for p in step(model(), IDS, RESPONSE, rewards, mode=mode).parameters()]
    rows = [
        [p.grad for p in step(model(), IDS[i, None], RESPONSE[i, None], rewards[i, None], mode=mode).parameters()]
        for i in range(2)
    ]
    # Each row's own mean, weighed by its share of the batch: 2 and 3 of 5 positions, 1 and 1 of 2 sequences.
    shares = {"token-sum": (1, 1), "token-mean": (2 / 5, 3 / 5)}.get(mode, (1 / 2, 1 / 2))
    for together, first, second in zip(whole, *rows, strict=True):
        torch.testing.assert_close(together, shares[0] * first + shares[1] * second, rtol=0, atol=1e-12)


def test_the_mean_over_a_sequence_makes_a_long_answer_weigh_less_per_token():
    rewards = torch.ones(2).double()
    ids, mask = IDS[[0, 0]], torch.tensor([[False] * 4 + [True, True], [False] * 4 + [True, False]])
    logits = model()(ids).detach().requires_grad_()
    loss = losses.reinforce(logprobs_of(logits, ids), rewards[:, None].expand(2, 6), mask)
    aggregate(loss, mask, mode="seq-mean-token-mean").backward()
    torch.testing.assert_close(logits.grad[1, 3], 2 * logits.grad[0, 3], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_on_the_first_step_the_ratio_is_exactly_one_and_kl_exactly_zero(dtype):
    lm = model().to(dtype)
    logprobs = logprobs_of(lm(IDS), IDS)
    frozen = logprobs_of(lm(IDS), IDS).detach()
    assert losses.ratio(logprobs, frozen, RESPONSE)[RESPONSE].eq(1).all()
    for kind in KINDS:
        assert kl_estimate(logprobs, frozen, RESPONSE, kind=kind).eq(0).all()


# Replay: row 0 is fresh, row 1 is replayed with unchanged weights.

ADVANTAGES = torch.tensor([[1.0], [-0.5]]).double().expand(2, 6)


def replay(mode):
    """(loss per position, gradient of the logits) of the mixed batch, and the replayed row's log-probs."""
    logits = model()(IDS).detach().requires_grad_()
    logprobs = logprobs_of(logits, IDS)
    recorded = logprobs.detach().clone()
    mask = RESPONSE.clone()
    if mode == "observe":
        mask[1] = False
    off_policy = losses.replay_shaped if mode == "shaped" else losses.replay_clipped
    fresh = losses.ppo_clip(logprobs[:1], recorded[:1], ADVANTAGES[:1], mask[:1], clip_low=0.2, clip_high=0.28)
    replayed = off_policy(logprobs[1:], recorded[1:], ADVANTAGES[1:], mask[1:])
    loss = torch.cat([fresh, replayed])
    aggregate(loss, mask, mode="token-sum").backward()
    return loss.detach(), logits.grad, logprobs.detach()


def on_policy_gradient():
    logits = model()(IDS).detach().requires_grad_()
    losses.reinforce(logprobs_of(logits, IDS), ADVANTAGES, RESPONSE).sum().backward()
    return logits.grad


@pytest.mark.parametrize("mode", ["observe", "clipped", "shaped"])
def test_replayed_positions_are_scored_in_every_mode(mode):
    assert replay(mode)[2][1][RESPONSE[1]].isfinite().all()


@pytest.mark.parametrize(
    ("mode", "loss", "share"), [("observe", 0.0, 0.0), ("clipped", 0.5, 1.0), ("shaped", 0.5 / 1.1, 0.1 / 1.21)]
)
def test_what_a_replayed_row_adds_to_loss_and_gradient(mode, loss, share):
    per_position, grad, _ = replay(mode)
    expected = on_policy_gradient()
    torch.testing.assert_close(per_position[1][RESPONSE[1]], torch.full((3,), loss).double(), rtol=0, atol=1e-7)
    torch.testing.assert_close(grad[1], share * expected[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(grad[0], expected[0], rtol=0, atol=1e-12)


def test_an_observed_row_is_in_no_denominator():
    """Fresh rows alone and fresh rows beside an observed one give the same loss, in every mode of reduction."""
    loss, mask = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[True, True], [False, False]])
    for mode in ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"):
        assert aggregate(loss, mask, mode=mode) == aggregate(loss[:1], mask[:1], mode=mode)
