"""What holds of advantages for all scores: order, names of groups, shift, scale, split, failed rewards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_losses import Scored, positions, scored

from rolecall.maths import advantages

settings_ = settings(max_examples=15)

METHODS = {
    "grpo": lambda x: advantages.grpo(x.scores, x.groups, include=x.include),
    "grpo batch": lambda x: advantages.grpo(x.scores, x.groups, include=x.include, scale="batch"),
    "dr_grpo": lambda x: advantages.dr_grpo(x.scores, x.groups, include=x.include),
    "rloo": lambda x: advantages.rloo(x.scores, x.groups, include=x.include),
    "opo": lambda x: advantages.opo(x.scores, x.lengths, x.groups, include=x.include),
    "reinforce": lambda x: advantages.reinforce(x.scores, x.lengths.double(), include=x.include),
    "remax": lambda x: advantages.remax(x.scores, x.lengths.double(), include=x.include),
    "reinforce over groups": lambda x: advantages.reinforce(
        x.scores, advantages.group_mean(x.scores, x.groups, include=x.include), include=x.include
    ),
    "reinforce over the batch": lambda x: advantages.reinforce(
        x.scores, advantages.batch_mean(x.scores, include=x.include), include=x.include
    ),
    "reinforce_pp_baseline": lambda x: advantages.reinforce_pp_baseline(
        x.scores, x.groups, torch.arange(9) < x.lengths[:, None], include=x.include
    ),
    "flat_groups": lambda x: advantages.flat_groups(x.scores, x.groups, include=x.include).double(),
}
OVER_THE_BATCH = {"grpo batch", "reinforce over the batch", "reinforce_pp_baseline"}
WITH_BASELINE = {"grpo", "grpo batch", "dr_grpo", "rloo", "opo", "reinforce over groups", "reinforce over the batch"}


def methods(names):
    names = sorted(names)
    return pytest.mark.parametrize("method", [METHODS[name] for name in names], ids=names)


def close(actual, expected, atol=1e-9):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def with_scores(x: Scored, scores: torch.Tensor) -> Scored:
    return Scored(scores=scores, groups=x.groups, include=x.include, lengths=x.lengths)


@methods(METHODS)
@settings_
@given(x=scored(), data=st.data())
def test_order_of_rows_does_not_matter(method, x, data):
    order = torch.tensor(data.draw(st.permutations(range(len(x.scores)))))
    close(method(x.rows(order)), method(x)[order])


@methods(METHODS)
@settings_
@given(x=scored(), names=st.permutations([-7, 0, 3, 10**12]))
def test_names_of_groups_do_not_matter(method, x, names):
    renamed = torch.tensor([names[group + 2] for group in x.groups.tolist()])
    close(method(Scored(scores=x.scores, groups=renamed, include=x.include, lengths=x.lengths)), method(x))


@methods(METHODS.keys() - OVER_THE_BATCH)
@settings_
@given(x=scored())
def test_groups_can_be_taken_one_by_one(method, x):
    whole = method(x)
    for group in x.groups.unique():
        rows = x.groups == group
        close(method(x.rows(rows)), whole[rows])


@methods(METHODS)
@settings_
@given(x=scored())
def test_failed_rows_get_zero_and_are_as_if_never_there(method, x):
    actual = method(x)
    assert actual[~x.include].eq(0).all()
    if x.include.any():
        close(actual[x.include], method(x.rows(x.include)))


@methods(WITH_BASELINE | {"reinforce_pp_baseline", "flat_groups"})
@settings_
@given(x=scored(), shift=st.integers(-5, 5))
def test_a_shift_of_all_scores_does_not_matter(method, x, shift):
    close(method(with_scores(x, x.scores + shift)), method(x), atol=1e-7)


@methods(WITH_BASELINE - {"grpo", "grpo batch"})
@settings_
@given(x=scored(), factor=st.sampled_from([-2.0, 0.5, 3.0]))
def test_advantages_scale_with_the_scores(method, x, factor):
    close(method(with_scores(x, x.scores * factor)), method(x) * factor)


@pytest.mark.parametrize("scale", ["group", "batch"])
@settings_
@given(x=scored(), factor=st.sampled_from([0.5, 3.0, 100.0]))
def test_grpo_does_not_change_with_the_scale_of_the_scores(scale, x, factor):
    def method(scores):
        return advantages.grpo(scores, x.groups, include=x.include, scale=scale, eps=0.0)

    close(method(x.scores * factor), method(x.scores))


@methods(WITH_BASELINE - {"opo", "reinforce over the batch"})
@settings_
@given(x=scored())
def test_advantages_of_a_group_sum_to_zero_and_flat_groups_are_exactly_zero(method, x):
    actual = method(x)
    for group in x.groups.unique():
        close(actual[x.groups == group].sum(), torch.tensor(0.0).double())
    flat = advantages.flat_groups(x.scores, x.groups, include=x.include)
    assert actual[flat].eq(0).all()


@methods(WITH_BASELINE)
@settings_
@given(x=scored())
def test_gradients_are_finite_and_zero_for_failed_rows(method, x):
    scores = x.scores.clone().requires_grad_()
    (method(with_scores(x, scores)) * torch.arange(1.0, len(scores) + 1)).sum().backward()
    assert scores.grad.isfinite().all()
    assert scores.grad[~x.include].eq(0).all()


@settings_
@given(x=scored())
def test_rloo_is_dr_grpo_stretched_by_the_size_of_the_group(x):
    size = torch.tensor([float(((x.groups == g) & x.include).sum()) for g in x.groups]).double()
    stretch = size / (size - 1).clamp(min=1)
    close(METHODS["rloo"](x), METHODS["dr_grpo"](x) * stretch)


@settings_
@given(x=positions(), at=st.integers(0, 6), width=st.integers(1, 3), data=st.data())
def test_reinforce_pp_does_not_see_order_or_untrained_spans(x, at, width, data):
    rewards, _, _, mask = x
    whole = advantages.reinforce_pp(rewards, mask, gamma=0.9)
    at = min(at, mask.shape[1])

    def insert(tensor, filler):
        span = torch.full((len(tensor), width), filler, dtype=tensor.dtype)
        return torch.cat([tensor[:, :at], span, tensor[:, at:]], dim=1)

    longer = advantages.reinforce_pp(insert(rewards, torch.nan), insert(mask, False), gamma=0.9)
    close(longer, insert(whole, 0.0))
    order = torch.tensor(data.draw(st.permutations(range(len(mask)))))
    close(advantages.reinforce_pp(rewards[order], mask[order], gamma=0.9), whole[order])
