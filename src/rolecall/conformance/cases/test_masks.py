"""Which positions count, and means and whitening over them."""

from collections.abc import Callable

import torch
from torch import Tensor

from rolecall.conformance.compare import batches, bits, close, ignores_rubbish, padded, reals
from rolecall.conformance.references import moments

Function = Callable[..., Tensor]


def test_answer_ends_with_its_first_stop_id(answer_mask: Function) -> None:
    """The choice to stop counts, and nothing after it does, another stop id included."""
    ids = torch.tensor([[5, 2, 2, 5], [2, 5, 5, 5], [5, 6, 7, 2]])
    assert answer_mask(ids, stop_ids=[2]).bool().tolist() == bits("1100", "1000", "1111").tolist()


def test_answer_without_stop_counts_to_the_end(answer_mask: Function) -> None:
    """An answer cut off by the limit has no stop id: all of it counts."""
    assert bool(answer_mask(torch.tensor([[5, 6, 0, 7]]), stop_ids=[2]).bool().all())


def test_answer_may_contain_the_pad_id(answer_mask: Function) -> None:
    """Only stop ids end an answer: an id that serves as padding elsewhere (0) may be sampled and then counts."""
    ids = torch.tensor([[5, 0, 6, 2, 0, 0]])
    assert answer_mask(ids, stop_ids=[2]).bool().tolist() == bits("111100").tolist()


def test_answer_with_several_stop_ids(answer_mask: Function) -> None:
    """Models have more than one stop id; whichever comes first ends the answer."""
    ids = torch.tensor([[5, 3, 2, 5], [5, 2, 3, 5]])
    assert answer_mask(ids, stop_ids=[2, 3]).bool().tolist() == bits("1100", "1100").tolist()


def test_episode_ends_with_its_flag(episode_mask: Function) -> None:
    """The step that terminates or truncates an episode counts, later ones do not, whatever their flags say."""
    filled, flags, none = bits("11111"), bits("00100"), bits("00000")
    for terminated, truncated in ((flags, none), (none, flags)):
        assert episode_mask(filled, terminated, truncated).bool().tolist() == bits("11100").tolist()
    assert episode_mask(filled, bits("01001"), none).bool().tolist() == bits("11000").tolist()


def test_episode_without_flag_ends_before_its_bootstrap_slot(episode_mask: Function) -> None:
    """The last filled slot of an episode that was cut off holds an observation to bootstrap from, not an action."""
    none = bits("00000")
    assert episode_mask(bits("11110"), none, none).bool().tolist() == bits("11100").tolist()


def test_mean_golden(masked_mean: Function) -> None:
    """Padding is neither in the sum nor in the count."""
    close(masked_mean(reals([1, 2, 9], [6, 9, 9]), bits("110", "100")), 3.0)


def test_mean_of_nothing(masked_mean: Function) -> None:
    """With no position that counts the mean is 0, not NaN."""
    close(masked_mean(reals([1, 2]), bits("00")), 0.0)


def test_mean_ignores_rubbish(masked_mean: Function) -> None:
    """NaN and inf in padding reach neither the mean nor its gradient."""
    mask = bits("110", "100")
    ignores_rubbish(lambda x: masked_mean(x, mask), mask, reals([1, 2, 9], [6, 9, 9]))


def test_whiten_has_unit_deviation(masked_whiten: Function) -> None:
    """Whitened values have mean 0 and deviation 1 over the positions that count (variance by n or n - 1)."""
    for batch in batches(holes=True):
        x, mask = batch.real(), batch.mask
        n = int(mask.sum())
        if n < 2:
            continue
        mean, variance = moments(x, mask)
        by_n = torch.where(mask, (x - mean) / variance**0.5, 0)
        got = torch.where(mask, masked_whiten(x, mask), 0)
        scale = 1.0 if bool(torch.isclose(got, by_n, rtol=1e-4).all()) else ((n - 1) / n) ** 0.5
        close(got, by_n * scale)


def test_whiten_without_shift_keeps_the_mean(masked_whiten: Function) -> None:
    """With shift_mean=False only the scale changes: the mean over the positions that count stays."""
    x, mask = reals([1, 2, 3, 7], [4, 9, 9, 9]), bits("1110", "1000")
    got = masked_whiten(x, mask, shift_mean=False)
    close(got[mask].mean(), 2.5)
    assert float(got[mask].std()) > 0.5, "the values were lost"


def test_whiten_ignores_padding(masked_whiten: Function) -> None:
    """Columns of padding do not change the result."""
    for batch in batches(holes=True):
        x, mask = batch.real(), batch.mask
        if int(mask.sum()) > 1:
            close(masked_whiten(padded(x), padded(mask))[:, : x.shape[1]], masked_whiten(x, mask), mask)


def test_whiten_one_position(masked_whiten: Function) -> None:
    """A single position has no deviation: it becomes 0 rather than NaN or an error."""
    got = masked_whiten(reals([3, 9]), bits("10"))
    close(got[0, 0], 0.0)


def test_whiten_ignores_rubbish(masked_whiten: Function) -> None:
    """NaN and inf in padding reach no value."""
    x, mask = reals([1, 2, 3, 7], [4, 9, 9, 9]), bits("1110", "1000")
    for rubbish in (torch.nan, torch.inf):
        close(masked_whiten(torch.where(mask, x, rubbish), mask), masked_whiten(x, mask), mask)
