import pytest
import torch

from rolecall.conformance import references
from rolecall.maths.reduce import (
    MODES,
    aggregate,
    denominator_of,
    masked_mean,
    masked_moments,
    masked_sum,
    masked_var,
    masked_whiten,
    sequence_count,
    token_count,
)

NAN, INF = float("nan"), float("inf")
DOUBLE = {"dtype": torch.float64}

#   x  1  3  -       mask  1 1 0      row means 2, 5, none
#      5  -  -             1 0 0
#      -  -  -             0 0 0
X = torch.tensor([[1.0, 3.0, NAN], [5.0, INF, NAN], [NAN, -INF, NAN]])
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


def random_case(seed: int, *, batch: int = 5, time: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, time, generator=generator) < 0.6
    mask[0] = False
    return torch.randn(batch, time, generator=generator, **DOUBLE), mask


def norm_for(mode: str) -> float | None:
    return 4.0 if mode.endswith("-norm") else None


# --- goldens -------------------------------------------------------------------------------------------------------


def test_sums_by_hand():
    assert masked_sum(X, MASK) == 9
    assert masked_sum(X, MASK, 0).tolist() == [6, 3, 0]
    assert masked_sum(X, MASK, 1).tolist() == [4, 5, 0]
    assert masked_sum(torch.tensor([4, 5]), torch.tensor([True, False])) == 4


def test_means_by_hand():
    assert masked_mean(X, MASK) == 3
    assert masked_mean(X, MASK, 1).tolist() == [2, 5, 0]
    assert masked_mean(X, MASK, 0).tolist() == [3, 3, 0]


def test_variances_by_hand():
    # 1 3 5 around 3: (4 + 0 + 4) / 3;  1 3 around 2: (1 + 1) / 2;  a single 5: 0
    assert masked_var(X, MASK).item() == pytest.approx(8 / 3)
    assert masked_var(X, MASK, 1).tolist() == [1, 0, 0]
    assert masked_var(X, MASK, 0).tolist() == [4, 0, 0]


def test_moments_by_hand():
    mean, var = masked_moments(X, MASK)
    assert (mean.item(), var.item()) == (3, pytest.approx(8 / 3))


def test_whitening_by_hand():
    scale = (8 / 3) ** -0.5
    white = masked_whiten(X, MASK)
    torch.testing.assert_close(white, torch.tensor([[-2 * scale, 0, 0], [2 * scale, 0, 0], [0, 0, 0]]))
    unshifted = masked_whiten(X, MASK, shift_mean=False)
    torch.testing.assert_close(unshifted, torch.tensor([[3 - 2 * scale, 3, 0], [3 + 2 * scale, 0, 0], [0, 0, 0]]))
    given = masked_whiten(X, MASK, moments=(torch.tensor(1.0), torch.tensor(4.0)), eps=0.0)
    torch.testing.assert_close(given, torch.tensor([[0.0, 1, 0], [2, 0, 0], [0, 0, 0]]))
    assert masked_whiten(X, MASK, moments=(torch.tensor(1.0), torch.tensor(0.0)), eps=0.25)[0, 1] == 4


def test_counts_by_hand():
    assert token_count(MASK) == 3
    assert sequence_count(MASK) == 2
    assert {mode: denominator_of(MASK, mode=mode).item() for mode in MODES} == {
        "token-mean": 3,
        "token-sum": 0,
        "seq-mean-token-mean": 2,
        "seq-mean-token-sum": 2,
        "seq-mean-token-sum-norm": 2,
    }


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 3),  # 9 / 3
        ("token-sum", 9),
        ("seq-mean-token-mean", 3.5),  # (2 + 5) / 2
        ("seq-mean-token-sum", 4.5),  # 9 / 2
        ("seq-mean-token-sum-norm", 1.125),  # 9 / 4 / 2
    ],
)
def test_aggregation_by_hand(mode, expected):
    assert aggregate(X, MASK, mode=mode, norm=norm_for(mode)) == expected
    # A denominator from elsewhere replaces the mask's own, in the same unit.
    own = max(denominator_of(MASK, mode=mode).item(), 1)
    assert aggregate(X, MASK, mode=mode, norm=norm_for(mode), denominator=10.0) == pytest.approx(expected * own / 10)


# --- references ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_moments_are_those_of_a_loop(seed):
    x, mask = random_case(seed)
    mean, var = references.moments(x, mask)
    assert masked_sum(x, mask).item() == pytest.approx(mean * mask.sum().item(), abs=1e-12)
    assert masked_mean(x, mask).item() == pytest.approx(mean, abs=1e-12)
    assert masked_var(x, mask).item() == pytest.approx(var, abs=1e-12)
    assert [m.item() for m in masked_moments(x, mask)] == pytest.approx([mean, var], abs=1e-12)
    expected = torch.where(mask, (x - mean) / (var + 1e-8) ** 0.5, 0)
    torch.testing.assert_close(masked_whiten(x, mask), expected, rtol=0, atol=1e-12)
    rows = [references.moments(row, m) for row, m in zip(x, mask, strict=True)]
    torch.testing.assert_close(masked_mean(x, mask, 1), torch.tensor([m for m, _ in rows], **DOUBLE))
    torch.testing.assert_close(masked_var(x, mask, 1), torch.tensor([v for _, v in rows], **DOUBLE))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_aggregation_is_that_of_a_loop(mode, seed):
    x, mask = random_case(seed)
    expected = references.aggregate(x, mask, mode=mode, norm=norm_for(mode) or 1.0)
    assert aggregate(x, mask, mode=mode, norm=norm_for(mode)).item() == pytest.approx(expected, abs=1e-12)


# --- limit cases ---------------------------------------------------------------------------------------------------


def test_nothing_to_count_is_zero_everywhere():
    x, none = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    assert masked_sum(x, none) == masked_mean(x, none) == masked_var(x, none) == 0
    assert [m.item() for m in masked_moments(x, none)] == [0, 0]
    assert masked_whiten(x, none).tolist() == [[0] * 3] * 2
    for mode in MODES:
        assert denominator_of(none, mode=mode) == 0
        assert aggregate(x, none, mode=mode, norm=norm_for(mode)) == 0
        assert aggregate(x, none, mode=mode, norm=norm_for(mode), denominator=0.0) == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_does_not_train_is_in_no_denominator(mode):
    x, mask = random_case(0)
    assert not mask[0].any()
    with_it = aggregate(x, mask, mode=mode, norm=norm_for(mode))
    without = aggregate(x[1:], mask[1:], mode=mode, norm=norm_for(mode))
    assert with_it.item() == pytest.approx(without.item(), rel=1e-14)


@pytest.mark.parametrize("constant", [0.1, 100.1, 123456.7])
def test_a_constant_whitens_to_nothing_and_stays_without_the_shift(constant):
    x = torch.full((7, 11), constant)
    mask = torch.ones(7, 11, dtype=torch.bool)
    assert masked_whiten(x, mask).tolist() == [[0.0] * 11] * 7
    assert masked_whiten(x, mask, shift_mean=False).equal(x)


def test_a_large_mean_does_not_eat_the_variance():
    x = torch.tensor([[1e7, 1e7 + 1, 1e7 + 2]])
    mean, var = masked_moments(x, torch.ones(1, 3, dtype=torch.bool))
    assert (mean.item(), var.item()) == (1e7 + 1, pytest.approx(2 / 3))


def test_counts_are_exact_in_half_precision():
    x, mask = torch.ones(3, 1000, dtype=torch.bfloat16), torch.ones(3, 1000, dtype=torch.bool)
    assert [m.item() for m in masked_moments(x, mask)] == [1, 0]
    assert aggregate(torch.ones(3, 1000), mask, mode="token-mean") == 1


def test_results_keep_the_dtype_of_the_values():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.ones(2, 3, dtype=dtype)
        mask = torch.ones(2, 3, dtype=torch.bool)
        assert masked_whiten(x, mask).dtype == dtype
        assert aggregate(x, mask, mode="token-mean").dtype == dtype


def test_two_ranks_find_the_moments_of_one():
    """Each rank sees half of the rows; `all_sum` adds what both of them hand in."""
    x, mask = random_case(3, batch=6)
    halves = [(x[:2], mask[:2]), (x[2:], mask[2:])]
    whole_mean, whole_var = masked_moments(x, mask)

    def first_handed_in(part, m, replies):
        """What a rank hands in, call by call, given the sums it was told so far."""
        handed_in = []

        def all_sum(tensor):
            handed_in.append(tensor)
            return replies[len(handed_in) - 1] if len(handed_in) <= len(replies) else tensor

        moments = masked_moments(part, m, all_sum=all_sum)
        return handed_in, moments

    replies = []
    for call in range(2):
        replies.append(sum(first_handed_in(part, m, replies)[0][call] for part, m in halves))
    for part, m in halves:
        handed_in, (mean, var) = first_handed_in(part, m, replies)
        assert len(handed_in) == 2
        torch.testing.assert_close(mean, whole_mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(var, whole_var, rtol=0, atol=1e-12)
        rows = masked_whiten(part, m, moments=(mean, var))
        torch.testing.assert_close(
            rows, masked_whiten(x, mask)[:2] if part is halves[0][0] else masked_whiten(x, mask)[2:]
        )


@pytest.mark.parametrize(
    "function",
    [
        masked_sum,
        masked_mean,
        masked_var,
        lambda x, m: masked_mean(x, m, 1),
        lambda x, m: masked_var(x, m, 0),
        lambda x, m: torch.stack(masked_moments(x, m)),
        masked_whiten,
        lambda x, m: masked_whiten(x, m, shift_mean=False),
        *[lambda x, m, mode=mode: aggregate(x, m, mode=mode, norm=norm_for(mode)) for mode in MODES],
    ],
)
def test_gradients(function):
    x, mask = random_case(1, batch=3, time=4)
    torch.autograd.gradcheck(lambda x: function(x, mask), x.requires_grad_())


# --- wrong calls ---------------------------------------------------------------------------------------------------

ONES = torch.ones(2, 3)
ALL = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.usefixtures("users_view")
@pytest.mark.parametrize(
    "function",
    [
        masked_sum,
        masked_mean,
        masked_var,
        masked_moments,
        masked_whiten,
        *[lambda x, m, mode=mode: aggregate(x, m, mode=mode, norm=norm_for(mode)) for mode in MODES],
    ],
)
def test_wrong_masks_get_a_sentence(function):
    with pytest.raises(ValueError, match=r"has shape \(2, 3\) but mask has shape \(3, 2\); they must be equal"):
        function(ONES, ALL.T)
    with pytest.raises(ValueError, match=r"has shape \(2, 3\) but mask has shape \(1, 3\)"):
        function(ONES, ALL[:1])
    with pytest.raises(ValueError, match=r"mask must be a bool tensor .*got torch.float32"):
        function(ONES, ALL.float())


@pytest.mark.usefixtures("users_view")
def test_wrong_modes_get_a_sentence():
    names = "'token-mean', 'token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm'"
    with pytest.raises(ValueError, match=f"unknown mode 'mean'; choose one of {names}"):
        aggregate(ONES, ALL, mode="mean")
    with pytest.raises(ValueError, match="unknown mode 'mean'"):
        denominator_of(ALL, mode="mean")
    with pytest.raises(ValueError, match="mask must be a bool tensor"):
        denominator_of(ALL.float(), mode="token-mean")


def test_norm_belongs_to_one_mode():
    with pytest.raises(ValueError, match="got norm=None with mode 'seq-mean-token-sum-norm'"):
        aggregate(ONES, ALL, mode="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match=r"got norm=4\.0 with mode 'token-mean'"):
        aggregate(ONES, ALL, mode="token-mean", norm=4.0)
    with pytest.raises(ValueError, match="norm must be a positive length, got 0"):
        aggregate(ONES, ALL, mode="seq-mean-token-sum-norm", norm=0.0)
