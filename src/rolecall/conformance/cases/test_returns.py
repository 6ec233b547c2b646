"""Where a score goes, and what flows back from it along the positions that count."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rolecall.conformance import references
from rolecall.conformance.compare import batches, bits, close, ignores_rubbish, padded, reals

Function = Callable[..., Tensor]
Gae = Callable[..., Any]


def test_score_sits_on_the_last_position_that_counts(shape_rewards: Function) -> None:
    """The score goes to the last eligible position, not to the last column or the last token of the row."""
    mask = bits("1100", "1000", "1011")
    got = shape_rewards(reals(5, 7, 9), torch.zeros(3, 4, dtype=torch.float64), mask, kl_coef=0.1)
    close(got, reals([0, 5, 0, 0], [7, 0, 0, 0], [0, 0, 0, 9]), mask)


def test_score_survives_an_untrained_end(shape_rewards: Function) -> None:
    """Rewards over the positions that count sum to the score, also if the row ends in positions that do not."""
    for batch in batches(holes=True):
        scores, kl = batch.real(per_row=True), batch.real()
        got = torch.where(batch.mask, shape_rewards(scores, kl, batch.mask, kl_coef=0.5), 0).sum(1)
        close(got, scores - 0.5 * torch.where(batch.mask, kl, 0).sum(1))


def test_kl_is_charged_at_its_own_position(shape_rewards: Function) -> None:
    """Each position pays its own KL, and the last one pays it beside receiving the score."""
    got = shape_rewards(reals(5), reals([1, 2, 3]), bits("110"), kl_coef=0.5)
    close(got, reals([-0.5, 4, 0]), bits("110"))


def test_rewards_ignore_rubbish(shape_rewards: Function) -> None:
    """NaN KL in padding reaches no reward."""
    mask = bits("110", "100")
    function = lambda kl: shape_rewards(reals(5, 7), kl, mask, kl_coef=0.5)
    for rubbish in (torch.nan, torch.inf):
        kl = reals([1, 2, 3], [4, 5, 6])
        close(function(torch.where(mask, kl, rubbish)), function(kl), mask)


def test_gae_golden(gae: Gae) -> None:
    """Two steps by hand with gamma 0.5 and lambda 0.5."""
    advantages, returns = gae(reals([1, 2, 9]), reals([4, 6, 9]), bits("110"), gamma=0.5, lam=0.5)
    close(advantages, reals([-1, -4, 0]), bits("110"))  # 2 - 6 = -4; 1 + 3 - 4 + 0.25 * -4 = -1
    close(returns, reals([3, 2, 0]), bits("110"))


def test_gae_equals_the_loop(gae: Gae) -> None:
    """Random answers of one turn, against a loop in float64."""
    _compare(gae, holes=False)


def test_gae_walks_over_observations(gae: Gae) -> None:
    """Tool output inside an answer is neither a step nor a discount: 1 1 0 0 1 gives what 1 1 1 gives."""
    _compare(gae, holes=True)


def _compare(gae: Gae, *, holes: bool) -> None:
    for batch in batches(holes=holes):
        rewards, values, mask = batch.real(), batch.real(), batch.mask
        advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
        expected = references.rows(references.gae, mask, rewards, values, gamma=0.9, lam=0.8)
        close(advantages, expected, mask)
        close(returns, expected + values, mask)


def test_gae_ignores_padding(gae: Gae) -> None:
    """Whatever stands in columns of padding, values included, changes nothing."""
    for batch in batches(holes=False):
        rewards, values, mask = batch.real(), batch.real(), batch.mask
        wide = gae(padded(rewards), padded(values) + ~padded(mask) * 7.0, padded(mask), gamma=0.9, lam=0.8)
        close(wide[0][:, : mask.shape[1]], gae(rewards, values, mask, gamma=0.9, lam=0.8)[0], mask)


def test_gae_of_an_ended_row_bootstraps_nothing(gae: Gae) -> None:
    """After the last position of an answer that ended stands 0, not the critic's value of padding."""
    advantages, _ = gae(reals([0, 1, 0]), reals([2, 2, 50]), bits("110"), gamma=1.0, lam=0.0)
    close(advantages, reals([0, -1, 0]), bits("110"))


def test_gae_of_a_cut_row_bootstraps_its_value(gae: Gae) -> None:
    """A row that was cut off goes on with the value given for what would have come; a row that ended does not."""
    values, mask = reals([2, 2, 0], [2, 2, 0]), bits("110", "110")
    rewards = reals([0, 1, 0], [0, 1, 0])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=1.0, bootstrap=reals(8, 0))
    close(advantages, reals([0.5, 3, 0], [-1.5, -1, 0]), mask)
    close(returns, reals([2.5, 5, 0], [0.5, 1, 0]), mask)


def test_gae_of_an_empty_row(gae: Gae) -> None:
    """A row without positions that count changes nothing for the others and gives no NaN."""
    mask = bits("110", "000")
    advantages, returns = gae(reals([1, 2, 9], [1, 1, 1]), reals([4, 6, 9], [1, 1, 1]), mask, gamma=0.5, lam=0.5)
    close(advantages, reals([-1, -4, 0], [0, 0, 0]), mask)
    assert bool(torch.isfinite(returns).all()), "NaN in an empty row"


def test_gae_ignores_rubbish(gae: Gae) -> None:
    """NaN values and rewards in padding reach no advantage."""
    mask = bits("110", "100")
    rewards, values = reals([1, 2, 9], [1, 1, 1]), reals([4, 6, 9], [1, 1, 1])
    expected = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    dirty = [torch.where(mask, x, torch.nan) for x in (rewards, values)]
    for got, want in zip(gae(*dirty, mask, gamma=0.5, lam=0.5), expected, strict=True):
        close(got, want, mask)


def test_returns_golden(discounted_returns: Function) -> None:
    """Three steps by hand with gamma 0.5."""
    close(discounted_returns(reals([1, 2, 4, 9]), bits("1110"), gamma=0.5), reals([3, 4, 4, 0]), bits("1110"))


def test_returns_walk_over_observations(discounted_returns: Function) -> None:
    """Tool output inside an answer discounts nothing."""
    for batch in batches(holes=True):
        rewards, mask = batch.real(), batch.mask
        expected = references.rows(references.discounted_returns, mask, rewards, gamma=0.9)
        close(discounted_returns(rewards, mask, gamma=0.9), expected, mask)


def test_returns_ignore_rubbish(discounted_returns: Function) -> None:
    """NaN rewards in padding reach no return."""
    mask = bits("110", "100")
    ignores_rubbish(lambda r: discounted_returns(r, mask, gamma=0.5).detach(), mask, reals([1, 2, 9], [1, 1, 1]))
