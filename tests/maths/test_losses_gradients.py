"""Gradients of the losses, what their limits do, and what they say to wrong input."""

from itertools import product

import pytest
import torch
from loss_table import ALL, OTHERS, POLICY, gradient, random_inputs
from masking import equal, every

from rolecall.maths import losses
from rolecall.maths.reduce import aggregate

seeds = pytest.mark.parametrize("seed", range(4))
policy = pytest.mark.parametrize("loss", POLICY.values(), ids=POLICY.keys())
all_losses = pytest.mark.parametrize("loss", ALL.values(), ids=ALL.keys())


@pytest.mark.parametrize("name", ["nll", "reinforce", "ppo_clip", "ppo_clip dual", "replay_clipped", "replay_shaped"])
def test_gradients_are_those_of_finite_differences(name):
    p, q, a, m = random_inputs(1, (3, 4))
    assert torch.autograd.gradcheck(lambda p: POLICY[name](p, q, a, m), p.requires_grad_())


@pytest.mark.parametrize("name", ["value_clip", "value without clip", "entropy", "ratio"])
def test_other_gradients_are_those_of_finite_differences(name):
    p, q, a, m = random_inputs(2, (3, 4))
    assert torch.autograd.gradcheck(lambda p: OTHERS[name](p, q, a, m), p.requires_grad_())


def test_preference_gradients_are_those_of_finite_differences():
    pairs = [x.requires_grad_() for x in torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()]
    assert torch.autograd.gradcheck(lambda c, r: losses.bradley_terry(c, r, margin=0.3), pairs[:2])
    assert torch.autograd.gradcheck(lambda *x: losses.dpo(*x, beta=0.7, label_smoothing=0.1), pairs)


@seeds
def test_cispo_gradient_is_the_clipped_weight_times_the_advantage(seed):
    p, q, a, m = random_inputs(seed)
    weight = (p - q).exp().clamp(0.0, 1.5)
    equal(gradient(POLICY["cispo"], p, q, a, m), torch.where(m, -weight * a, 0))


@seeds
def test_gspo_has_the_gradient_of_the_sequence_formula(seed):
    """With one advantage per sequence and the mean over each sequence it is the clipped loss of s_i itself."""
    p, q, a, m = random_inputs(seed)
    a = a[:, :1].expand_as(a)

    def formula(p):
        count = m.sum(1)
        s = (torch.where(m, p - q, 0).sum(1) / count.clamp(min=1)).exp()
        loss = torch.maximum(-a[:, 0] * s, -a[:, 0] * s.clamp(0.9, 1.2))
        return loss[count > 0].mean()

    def ours(p):
        return aggregate(POLICY["gspo"](p, q, a, m), m, mode="seq-mean-token-mean")

    equal(ours(p), formula(p))
    equal(gradient(ours, p), gradient(formula, p))


def test_gspo_has_the_exact_value_of_its_sequence_ratio_in_float32():
    """The straight-through term is exactly 0, however large the log ratio of a single position."""
    logprobs, old = torch.tensor([[-900.0, -0.1, -0.3]]), torch.tensor([[-1.7, -898.3, -0.1]])
    a, mask = torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool)
    value = losses.gspo(logprobs, old, a, mask, clip_low=1.0, clip_high=100.0)
    assert value.unique().numel() == 1


@pytest.mark.parametrize("name", ["ppo_clip", "ppo_clip dual", "gspo", "cispo", "replay_clipped"])
@seeds
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name, seed):
    p, _, a, m = random_inputs(seed)
    if name == "gspo":  # its gradient is that of REINFORCE under the same reduction
        a = a[:, :1].expand_as(a)
    equal(gradient(POLICY[name], p, p.clone(), a, m), gradient(losses.reinforce, p, a, m))


@seeds
def test_at_ratio_one_shaped_replay_has_a_twelfth_of_the_gradient(seed):
    p, _, a, m = random_inputs(seed)
    equal(gradient(losses.replay_shaped, p, p.clone(), a, m), 0.1 / 1.21 * gradient(losses.reinforce, p, a, m))


@policy
def test_gradients_go_to_the_policy_alone(loss):
    p, q, a, m = random_inputs(0)
    inputs = [x.clone().requires_grad_() for x in (p, q, a)]
    loss(*inputs, m).sum().backward()
    assert inputs[0].grad.abs().sum() > 0
    assert [x.grad for x in inputs[1:]] == [None, None]


def test_the_value_losss_gradient_goes_to_the_values_alone():
    values, old, returns, mask = random_inputs(0)
    inputs = [x.clone().requires_grad_() for x in (values, old, returns)]
    losses.value_clip(*inputs, mask, clip=0.2).sum().backward()
    assert inputs[0].grad.abs().sum() > 0
    assert [x.grad for x in inputs[1:]] == [None, None]


# limits


@all_losses
def test_what_does_not_count_reaches_nothing(loss):
    p, q, a, m = random_inputs(3)
    for junk in (torch.nan, torch.inf, -torch.inf):
        clean = [torch.where(m, x, 0).requires_grad_() for x in (p, q, a)]
        dirty = [torch.where(m, x, junk).requires_grad_() for x in (p, q, a)]
        expected, actual = loss(*clean, m), loss(*dirty, m)
        assert actual.equal(expected)
        assert actual[~m].eq(0).all()
        if actual.requires_grad:
            expected.sum().backward()
            actual.sum().backward()
        for x, y in zip(clean, dirty, strict=True):
            assert (x.grad is None) == (y.grad is None)
            if x.grad is not None:
                assert y.grad.equal(x.grad)
                assert y.grad[~m].eq(0).all()


@all_losses
def test_nothing_to_count_is_zero(loss):
    p, q, a, m = random_inputs(3)
    assert loss(p, q, a, torch.zeros_like(m)).eq(0).all()


@all_losses
def test_a_broken_record_gives_no_inf(loss):
    for dtype, gap, advantage in product((torch.float32, torch.bfloat16), (1e4, -1e4), (1.0, -1.0)):
        old = torch.tensor([[-1.0, -1.0]], dtype=dtype)
        logprobs = (old + torch.tensor([[gap, 0.0]], dtype=dtype)).requires_grad_()
        value = loss(logprobs, old, torch.full_like(old, advantage), every(old))
        assert value.isfinite().all()
        if value.requires_grad:
            value.sum().backward()
            assert logprobs.grad.isfinite().all()


# bad input

FULL, MASK = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
SHORT = torch.zeros(2, 2)
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
BAND = {"level": "token", "kind": "mask", "high": 2.0}
TAKES = {
    losses.ratio: (["logprobs", "old_logprobs"], {}),
    losses.nll: (["logprobs"], {}),
    losses.reinforce: (["logprobs", "advantages"], {}),
    losses.ppo_clip: (["logprobs", "old_logprobs", "advantages"], CLIP),
    losses.gspo: (["logprobs", "old_logprobs", "advantages"], CLIP),
    losses.cispo: (["logprobs", "old_logprobs", "advantages"], CLIP),
    losses.replay_shaped: (["logprobs", "behaviour_logprobs", "advantages"], {}),
    losses.importance_weights: (["logprobs", "behaviour_logprobs"], BAND),
    losses.value_clip: (["values", "old_values", "returns"], {"clip": 0.2}),
}


@pytest.mark.usefixtures("users_view")
@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function, (names, _) in TAKES.items() for name in names]
)
def test_a_wrong_shape_is_named(function, name):
    names, options = TAKES[function]
    arguments = [SHORT if each == name else FULL for each in names]
    with pytest.raises(ValueError, match=rf"^{name} has shape \(2, 2\) but mask has shape \(2, 3\)"):
        function(*arguments, MASK, **options)


@pytest.mark.usefixtures("users_view")
@pytest.mark.parametrize("function", [*TAKES, losses.replay_clipped, losses.entropy])
def test_a_mask_of_numbers_is_refused(function):
    names, options = TAKES.get(function, (["a", "b", "c"], {}))
    arguments = [FULL[..., None]] if function is losses.entropy else [FULL for _ in names]
    with pytest.raises(ValueError, match="mask must be a bool tensor"):
        function(*arguments, MASK.long(), **options)


@pytest.mark.usefixtures("users_view")
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: losses.importance_weights(FULL, FULL, MASK, level="word", kind="mask", high=2.0),
            "unknown level 'word'; choose one of 'token', 'sequence'",
        ),
        (
            lambda: losses.importance_weights(FULL, FULL, MASK, level="token", kind="clip", high=2.0),
            "unknown kind 'clip'; choose one of 'truncate', 'mask'",
        ),
        (
            lambda: losses.entropy(torch.zeros(2, 2, 5), MASK),
            "logits has shape (2, 2) but mask has shape (2, 3)",
        ),
        (
            lambda: losses.bradley_terry(torch.zeros(3), torch.zeros(2)),
            "rejected has shape (2,) but chosen has shape (3,)",
        ),
        (
            lambda: losses.bradley_terry(torch.zeros(3), torch.zeros(3), margin=torch.zeros(1)),
            "margin has shape (1,) but chosen has shape (3,)",
        ),
        (
            lambda: losses.dpo(torch.zeros(3), torch.zeros(2), torch.zeros(3), torch.zeros(3), beta=0.1),
            "rejected has shape (2,) but chosen has shape (3,)",
        ),
        (
            lambda: losses.dpo(torch.zeros(3), torch.zeros(3), torch.zeros(2), torch.zeros(3), beta=0.1),
            "ref_chosen has shape (2,) but chosen has shape (3,)",
        ),
        (
            lambda: losses.dpo(torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.zeros(2), beta=0.1),
            "ref_rejected has shape (2,) but chosen has shape (3,)",
        ),
    ],
)
def test_wrong_input_is_named(call, sentence):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the sentence is compared below
        call()
    assert sentence in str(raised.value)
