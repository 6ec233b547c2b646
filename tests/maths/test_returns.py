import loops
import pytest
import torch

from rolecall.conformance import references
from rolecall.conformance.compare import bits, reals
from rolecall.maths.returns import _BLOCK, discounted_returns, gae, nstep_targets, td_lambda_targets

NAN, INF = float("nan"), float("inf")


def random_case(seed: int, *, batch: int = 4, time: int = 9, share: float = 0.7) -> tuple[torch.Tensor, ...]:
    """(rewards, values, mask, bootstrap); row 0 counts nowhere."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, batch, time, generator=generator, dtype=torch.float64)
    mask = torch.rand(batch, time, generator=generator) < share
    mask[0] = False
    return rewards, values, mask, torch.randn(batch, generator=generator, dtype=torch.float64)


def by_loop(function, mask, *tensors, bootstrap, **options):
    """The loop reference row by row, each with its own bootstrap value."""
    rows = [
        references.rows(function, mask[i : i + 1], *(t[i : i + 1] for t in tensors), bootstrap=b, **options)
        for i, b in enumerate(bootstrap.tolist())
    ]
    return torch.cat(rows)


# --- goldens -------------------------------------------------------------------------------------------------------

#   mask      1  1  0  1        gamma 1/2, lam 1/2
#   rewards   1  2  -  4
#   values    2  4  -  8
#   delta     1 + 4/2 - 2 = 1       2 + 8/2 - 4 = 2       4 + 0 - 8 = -4
#   A         1 + 1/4 1 = 1.25      2 + 1/4 (-4) = 1      -4
REWARDS, VALUES, MASK = reals([1, 2, NAN, 4]), reals([2, 4, INF, 8]), bits("1101")


def test_gae_by_hand():
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[1.25, 1, 0, -4]]
    assert returns.tolist() == [[3.25, 5, 0, 4]]


def test_gae_of_a_sequence_that_was_cut_off_by_hand():
    # V behind the end is 16: the last delta is 4 + 16/2 - 8 = 4, so A = 4, 2 + 1/4 4 = 3, 1 + 1/4 3 = 1.75
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=0.5, lam=0.5, bootstrap=torch.tensor([16.0]).double())
    assert advantages.tolist() == [[1.75, 3, 0, 4]]
    assert returns.tolist() == [[3.75, 7, 0, 12]]


def test_td_lambda_by_hand():
    # G = 4;  2 + 1/2 (1/2 8 + 1/2 4) = 5;  1 + 1/2 (1/2 4 + 1/2 5) = 3.25
    assert td_lambda_targets(REWARDS, VALUES, MASK, gamma=0.5, lam=0.5).tolist() == [[3.25, 5, 0, 4]]
    # cut off with 16 behind: 4 + 16/2 = 12;  2 + 1/2 (4 + 6) = 7;  1 + 1/2 (2 + 3.5) = 3.75
    cut = td_lambda_targets(REWARDS, VALUES, MASK, gamma=0.5, lam=0.5, bootstrap=torch.tensor([16.0]).double())
    assert cut.tolist() == [[3.75, 7, 0, 12]]


def test_discounted_returns_by_hand():
    assert discounted_returns(REWARDS, MASK, gamma=0.5).tolist() == [[3, 4, 0, 4]]


@pytest.mark.parametrize(
    ("n", "ended", "cut"),
    [
        (1, [3, 6, 0, 4], [3, 6, 0, 12]),  # 1 + 4/2    2 + 8/2    4        | 4 + 16/2
        (2, [4, 4, 0, 4], [4, 8, 0, 12]),  # 1 + 2/2 + 8/4    2 + 4/2       | 2 + 4/2 + 16/4
        (3, [3, 4, 0, 4], [5, 8, 0, 12]),  # 1 + 2/2 + 4/4                  | 1 + 2/2 + 4/4 + 16/8
        (9, [3, 4, 0, 4], [5, 8, 0, 12]),
    ],
)
def test_nstep_by_hand(n, ended, cut):
    assert nstep_targets(REWARDS, VALUES, MASK, gamma=0.5, n=n).tolist() == [ended]
    bootstrap = torch.tensor([16.0]).double()
    assert nstep_targets(REWARDS, VALUES, MASK, gamma=0.5, n=n, bootstrap=bootstrap).tolist() == [cut]


# --- references ----------------------------------------------------------------------------------------------------


# Around the block size of the blocked sum, where the carry from block to block comes in.
@pytest.mark.parametrize("time", [1, 2, 9, _BLOCK - 1, _BLOCK, _BLOCK + 1, 3 * _BLOCK, 3 * _BLOCK + 5])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.5), (0.9, 0.0), (0.0, 0.9)])
def test_gae_and_returns_are_those_of_a_loop(time, gamma, lam):
    rewards, values, mask, bootstrap = random_case(time, time=time)
    options = {"gamma": gamma, "lam": lam}
    advantages, returns = gae(rewards, values, mask, **options, bootstrap=bootstrap)
    expected = by_loop(references.gae, mask, rewards, values, bootstrap=bootstrap, **options)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0), rtol=0, atol=1e-10)

    torch.testing.assert_close(
        td_lambda_targets(rewards, values, mask, **options, bootstrap=bootstrap),
        by_loop(loops.td_lambda, mask, rewards, values, bootstrap=bootstrap, **options),
        rtol=0,
        atol=1e-10,
    )
    torch.testing.assert_close(
        discounted_returns(rewards, mask, gamma=gamma),
        references.rows(references.discounted_returns, mask, rewards, gamma=gamma),
        rtol=0,
        atol=1e-10,
    )


@pytest.mark.parametrize("n", [1, 2, 5, 9, 20])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_nstep_is_that_of_a_loop(n, gamma):
    rewards, values, mask, bootstrap = random_case(n)
    expected = by_loop(loops.nstep, mask, rewards, values, bootstrap=bootstrap, gamma=gamma, n=n)
    got = nstep_targets(rewards, values, mask, gamma=gamma, n=n, bootstrap=bootstrap)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_single_precision_stays_close_to_double_over_a_long_sequence():
    rewards, values, mask, _ = random_case(0, time=4096)
    exact, _ = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    single, _ = gae(rewards.float(), values.float(), mask, gamma=1.0, lam=0.95)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("users_view")
def test_rewards_values_and_bootstrap_may_differ_in_precision():
    rewards, values, mask, bootstrap = random_case(6)
    rewards, values, bootstrap = rewards.round(), values.bfloat16(), bootstrap.bfloat16()
    options = {"gamma": 0.5, "lam": 0.5}
    exact, _ = gae(rewards, values.double(), mask, **options, bootstrap=bootstrap.double())
    for kind in (torch.float32, torch.float64, torch.int64):
        mixed, _ = gae(rewards.to(kind), values.float(), mask, **options, bootstrap=bootstrap)
        torch.testing.assert_close(mixed.double(), exact, rtol=0, atol=1e-5)


# --- limit cases ---------------------------------------------------------------------------------------------------


def test_gamma_and_lam_one_is_reward_to_go_minus_value():
    rewards, values, mask, _ = random_case(0)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    to_go = discounted_returns(rewards, mask, gamma=1.0)
    torch.testing.assert_close(advantages, torch.where(mask, to_go - values, 0))
    torch.testing.assert_close(returns, to_go)


def test_lam_one_is_the_discounted_return_minus_the_value():
    rewards, values, mask, _ = random_case(1)
    advantages, _ = gae(rewards, values, mask, gamma=0.9, lam=1.0)
    to_go = discounted_returns(rewards, mask, gamma=0.9)
    torch.testing.assert_close(advantages, torch.where(mask, to_go - values, 0))
    torch.testing.assert_close(td_lambda_targets(rewards, values, mask, gamma=0.9, lam=1.0), to_go)


def test_lam_zero_is_the_one_step_error():
    rewards, values, mask, bootstrap = random_case(2)
    options = {"gamma": 0.9, "bootstrap": bootstrap}
    advantages, returns = gae(rewards, values, mask, lam=0.0, **options)
    one_step = nstep_targets(rewards, values, mask, n=1, **options)
    torch.testing.assert_close(advantages, torch.where(mask, one_step - values, 0))
    torch.testing.assert_close(returns, one_step)
    torch.testing.assert_close(td_lambda_targets(rewards, values, mask, lam=0.0, **options), one_step)


def test_one_step_is_reward_minus_value():
    for gamma, lam in [(1.0, 1.0), (0.5, 0.3)]:
        advantages, returns = gae(reals([5]), reals([2]), bits("1"), gamma=gamma, lam=lam)
        assert (advantages.item(), returns.item()) == (3, 5)


def test_returns_of_gamma_one_and_zero():
    assert discounted_returns(reals([1, 2, 4]), bits("111"), gamma=1.0).tolist() == [[7, 6, 4]]
    assert discounted_returns(reals([1, 2, 4]), bits("101"), gamma=0.0).tolist() == [[1, 0, 4]]


def test_as_many_steps_as_there_are_is_the_discounted_return():
    rewards, values, mask, _ = random_case(3)
    to_go = discounted_returns(rewards, mask, gamma=0.9)
    for n in (9, 10, 1000):
        torch.testing.assert_close(nstep_targets(rewards, values, mask, gamma=0.9, n=n), to_go)


def test_a_hole_in_the_mask_is_no_step():
    # mask      1 1 0 0 0 1 1     at lam 0.95 gives what 1 1 1 1 gives
    hole = bits("1100011")
    rewards, values = reals([1, 2, NAN, INF, 7, 3, 4]), reals([5, 6, -INF, NAN, 9, 7, 8])
    short = [t[hole][None] for t in (rewards, values)]
    for got, expected in zip(
        gae(rewards, values, hole, gamma=1.0, lam=0.95), gae(*short, bits("1111"), gamma=1.0, lam=0.95), strict=True
    ):
        assert got[hole][None].equal(expected)
        assert (got[~hole] == 0).all()


def test_returns_come_from_raw_advantages():
    # Whitening is the caller's next step: were it done first, the critic's target would not be the return.
    rewards, values, mask, _ = random_case(4)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    assert returns.equal(torch.where(mask, advantages + values, 0))
    assert abs(advantages[mask].std().item() - 1) > 0.05


def test_a_row_that_counts_nowhere_is_zero_even_with_a_bootstrap_of_nan():
    rewards = values = torch.full((2, 3), NAN)
    none = torch.zeros(2, 3, dtype=torch.bool)
    options = {"gamma": 1.0, "bootstrap": torch.full((2,), NAN)}
    for result in (
        *gae(rewards, values, none, lam=0.9, **options),
        td_lambda_targets(rewards, values, none, lam=0.9, **options),
        nstep_targets(rewards, values, none, n=2, **options),
        discounted_returns(rewards, none, gamma=1.0),
    ):
        assert result.tolist() == [[0] * 3] * 2


@pytest.mark.parametrize("shape", [(0, 3), (0, 0), (2, 0)])
def test_an_empty_batch_gives_an_empty_result(shape):
    x, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    assert gae(x, x, mask, gamma=1.0, lam=0.9, bootstrap=torch.zeros(shape[0]))[0].shape == shape
    assert nstep_targets(x, x, mask, gamma=1.0, n=2).shape == shape


# A terminated episode whose last step earns 1 is worth 1 there, whatever the critic says about slots behind it. A sum
# that masks rewards but reads the value behind the buffer's last step gets 1 + 0.99^k 7 instead, k steps from there.
@pytest.mark.parametrize(
    ("last_step", "leaky"),
    [
        (0, 7.66),  # the episode ends within n = 5 steps of the end of the buffer: 1 + 0.99^5 7
        (4, 7.93),  # it ends exactly with the buffer: 1 + 0.99 7
    ],
)
def test_no_value_behind_the_end_leaks_into_nstep_targets(last_step, leaky):
    slots = torch.arange(6)[None]
    rewards, values = (slots == last_step).double(), torch.full((1, 6), 7.0).double()
    acts = slots <= last_step
    assert 1 + 0.99 ** (5 - last_step) * values[0, 5].item() == pytest.approx(leaky, abs=0.005)
    assert nstep_targets(rewards, values, acts, gamma=0.99, n=5)[0, last_step] == 1
    before = nstep_targets(rewards, values, acts, gamma=0.99, n=5)[0, :last_step]
    torch.testing.assert_close(before, 0.99 ** torch.arange(last_step, 0, -1, dtype=torch.float64))


@pytest.mark.parametrize(
    "function",
    [
        lambda r, v, m, b: gae(r, v, m, gamma=0.9, lam=0.8, bootstrap=b),
        lambda r, v, m, b: td_lambda_targets(r, v, m, gamma=0.9, lam=0.8, bootstrap=b),
        lambda r, v, m, b: nstep_targets(r, v, m, gamma=0.9, n=2, bootstrap=b),
        lambda r, v, m, b: (discounted_returns(r, m, gamma=0.9), v + b[:, None]),
    ],
)
@pytest.mark.parametrize("time", [5, _BLOCK + 2])
def test_gradients(function, time):
    rewards, values, mask, bootstrap = random_case(5, batch=2, time=time)
    torch.autograd.gradcheck(
        lambda r, v, b: function(r, v, mask, b),
        [t.requires_grad_() for t in (rewards, values, bootstrap)],
        fast_mode=time > _BLOCK,
    )


# --- wrong calls ---------------------------------------------------------------------------------------------------

ONES, ALL = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
CALLS = {
    "gae": lambda r, v, m, **o: gae(r, v, m, gamma=1.0, lam=1.0, **o),
    "td_lambda": lambda r, v, m, **o: td_lambda_targets(r, v, m, gamma=1.0, lam=1.0, **o),
    "nstep": lambda r, v, m, **o: nstep_targets(r, v, m, gamma=1.0, n=1, **o),
}


@pytest.mark.usefixtures("users_view")
@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls_get_a_sentence(name):
    call = CALLS[name]
    with pytest.raises(ValueError, match=r"rewards has shape \(2, 2\) but mask has shape \(2, 3\)"):
        call(ONES[:, :2], ONES, ALL)
    with pytest.raises(ValueError, match=r"values has shape \(1, 3\) but mask has shape \(2, 3\)"):
        call(ONES, ONES[:1], ALL)
    with pytest.raises(ValueError, match="mask must be a bool tensor"):
        call(ONES, ONES, ONES)
    with pytest.raises(ValueError, match=r"bootstrap has shape \(1,\) but the batch has shape \(2,\)"):
        call(ONES, ONES, ALL, bootstrap=torch.ones(1))


@pytest.mark.usefixtures("users_view")
def test_wrong_calls_of_the_others_get_a_sentence():
    with pytest.raises(ValueError, match=r"rewards has shape \(2, 2\) but mask has shape \(2, 3\)"):
        discounted_returns(ONES[:, :2], ALL, gamma=1.0)
    with pytest.raises(ValueError, match="n must be at least 1 step, got 0"):
        nstep_targets(ONES, ONES, ALL, gamma=1.0, n=0)
