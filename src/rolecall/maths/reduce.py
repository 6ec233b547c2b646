"""Masked sums, means, variances and whitening, and the five ways to turn per-position values into one number."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rolecall.maths.checks import check_choice, check_mask, keep


def masked_sum(
    x: Shaped[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Shaped[Tensor, "..."]:
    """Sum of x over the positions that count."""
    check_mask(mask, x=x)
    return keep(mask, x).sum() if dim is None else keep(mask, x).sum(dim)


def masked_mean(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Mean of x over the positions that count; 0 where none does."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_var(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Biased variance (divides by the count, not the count - 1) over the positions that count; 0 where none does."""
    mean = masked_mean(x, mask, dim)
    centred = keep(mask, x) - (mean if dim is None else mean.unsqueeze(dim))
    return masked_mean(centred.square(), mask, dim)


def masked_moments(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, all_sum: Callable[[Tensor], Tensor] = lambda t: t
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean and biased variance over the positions that count on all ranks.

    `all_sum` adds a tensor over ranks. Two passes in float64, so that neither a large mean nor a large count eats the
    variance, and the mean of a constant is that constant.
    """
    check_mask(mask, x=x)
    kept = keep(mask, x).double()
    count, total = all_sum(torch.stack([mask.sum().double(), kept.sum()])).unbind()
    mean = total / count.clamp(min=1)
    squares = all_sum(masked_sum((kept - mean).square(), mask))
    return mean, squares / count.clamp(min=1)


def masked_whiten(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    shift_mean: bool = True,
    moments: tuple[Float[Tensor, ""], Float[Tensor, ""]] | None = None,
    eps: float = 1e-8,
) -> Float[Tensor, "*shape"]:
    """Scale x to unit variance over the positions that count, and to zero mean unless `shift_mean` is False.

        (x - mean) / sqrt(var + eps)   [+ mean]

    Biased variance, as AlpacaFarm. `moments` = (mean, var) from `masked_moments` over all ranks. A constant x becomes 0
    (or stays, without the shift).
    """
    mean, var = masked_moments(x, mask) if moments is None else moments
    scaled = (keep(mask, x) - mean) * torch.rsqrt(var + eps)
    return keep(mask, scaled if shift_mean else scaled + mean)


Lengths = Float[Tensor, "batch"] | None
"""Positions that count in the whole sequence of which a row is a part. None: every row is a whole sequence."""


def sequence_lengths(mask: Bool[Tensor, "batch time"], sequences: Int[Tensor, "batch"] | None) -> Lengths:
    """The positions that count in each row's sequence; rows with the same number in `sequences` are parts of one."""
    if sequences is None:
        return None
    names, index = torch.unique(sequences, return_inverse=True)
    counts = mask.sum(dim=1).double()
    return counts.new_zeros(len(names)).index_add(0, index, counts)[index]


def token_count(mask: Bool[Tensor, "batch time"], lengths: Lengths = None) -> Float[Tensor, ""]:
    """Positions that count."""
    return mask.sum().double()


def sequence_count(mask: Bool[Tensor, "batch time"], lengths: Lengths = None) -> Float[Tensor, ""]:
    """Sequences with at least one position that counts: an all-untrained row is in no denominator.

    The parts of a sequence add up to 1, each by its share of the positions.
    """
    if lengths is None:
        return mask.any(dim=1).sum().double()
    return (mask.sum(dim=1).double() / lengths.clamp(min=1)).sum()


def _nothing(mask: Tensor, lengths: Tensor | None = None) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=mask.device)


# mode: what the sum over positions (or over rows of row means) is divided by
_DENOMINATORS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "token-mean": token_count,
    "token-sum": _nothing,
    "seq-mean-token-mean": sequence_count,
    "seq-mean-token-sum": sequence_count,
    "seq-mean-token-sum-norm": sequence_count,
}
MODES = tuple(_DENOMINATORS)


def denominator_of(mask: Bool[Tensor, "batch time"], *, mode: str, lengths: Lengths = None) -> Float[Tensor, ""]:
    """What `aggregate` divides by for this mask, so that it can be summed over micro-batches and ranks beforehand.

    0 for token-sum, which divides by nothing however many pieces there are. `lengths` come from `sequence_lengths`.
    """
    check_choice("mode", mode, MODES)
    check_mask(mask)
    return _DENOMINATORS[mode](mask, lengths)


def aggregate(
    per_position: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"],
    *,
    mode: str,
    denominator: Float[Tensor, ""] | float | None = None,
    norm: float | None = None,
) -> Float[Tensor, ""]:
    """Reduce per-position values to one number.

    | mode                    | numerator                    | denominator, and its unit                             |
    |-------------------------|------------------------------|-------------------------------------------------------|
    | token-mean              | sum over positions           | positions that count                                  |
    | token-sum               | sum over positions           | none                                                  |
    | seq-mean-token-mean     | sum over rows of row means   | sequences with a position that counts                 |
    | seq-mean-token-sum      | sum over positions           | sequences with a position that counts                 |
    | seq-mean-token-sum-norm | sum over positions / norm    | sequences with a position that counts (Dr. GRPO)      |

    Pass `denominator` (in the mode's unit, from `denominator_of` summed over micro-batches and ranks) and the pieces
    add up to the whole; a denominator of 0 divides by nothing. `norm` is a constant length, used by
    seq-mean-token-sum-norm only. With nothing to count the result is 0.
    """
    check_mask(mask, per_position=per_position)
    weights = position_weights(mask, mode=mode, denominator=denominator, norm=norm)
    return (weights * keep(mask, per_position)).sum().to(per_position.dtype)


def position_weights(
    mask: Bool[Tensor, "batch time"],
    *,
    mode: str,
    denominator: Float[Tensor, ""] | float | None = None,
    norm: float | None = None,
    lengths: Lengths = None,
) -> Float[Tensor, "batch time"]:
    """How much each position counts in `aggregate`, which is the sum of values times these weights. In float64.

    With `lengths` a row is a part of a sequence, and its positions count as they would in the whole.
    """
    check_choice("mode", mode, MODES)
    check_mask(mask)
    if (norm is not None) != (mode == "seq-mean-token-sum-norm"):
        raise ValueError(
            f"norm (a constant length) belongs to mode 'seq-mean-token-sum-norm', got norm={norm} with mode {mode!r}"
        )
    if norm is not None and norm <= 0:
        raise ValueError(f"norm must be a positive length, got {norm}")
    if denominator is None:
        denominator = _DENOMINATORS[mode](mask, lengths)
    divisor = torch.as_tensor(denominator, dtype=torch.float64, device=mask.device)
    divisor = torch.where(divisor == 0, 1.0, divisor) * (1.0 if norm is None else norm)
    counts = mask.sum(dim=1, keepdim=True) if lengths is None else lengths[:, None]
    per_row = counts.clamp(min=1) if mode == "seq-mean-token-mean" else 1
    return keep(mask, 1 / (divisor * per_row))
