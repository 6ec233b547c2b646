"""What the cases share: comparing with a tolerance, gradients, and seeded random batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

RTOL, ATOL = 1e-4, 1e-6
"""Loose enough for float32 inside a library and for an eps in a denominator; the bugs looked for move percents."""


def reals(*numbers: object) -> Tensor:
    """A float64 tensor of these numbers or rows."""
    return torch.tensor(numbers, dtype=torch.float64)


def bits(*rows: str) -> Tensor:
    """A mask drawn as text: "11 01" is True True False True."""
    return torch.tensor([[letter == "1" for letter in row.replace(" ", "")] for row in rows])


def close(got: object, expected: object, mask: Tensor | None = None) -> None:
    """Raise AssertionError, naming the worst place, unless `got` is near `expected` wherever the mask is True."""
    have, want = (torch.as_tensor(x).detach().double() for x in (got, expected))
    assert have.shape == want.shape, f"expected shape {tuple(want.shape)}, got {tuple(have.shape)}"
    have, want = torch.atleast_1d(have), torch.atleast_1d(want)
    counts = torch.ones_like(want, dtype=torch.bool) if mask is None else mask
    wrong = counts & ~torch.isclose(have, want, rtol=RTOL, atol=ATOL)
    if bool(wrong.any()):
        gap = torch.where(wrong, (have - want).abs().nan_to_num(torch.inf, posinf=torch.inf), -1.0)
        worst = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
        where = f" at {'row ' if len(worst) == 1 else ''}{', '.join(map(str, worst))}" if want.numel() > 1 else ""
        raise AssertionError(f"expected {want[worst] + 0:.6g}{where}, got {have[worst]:.6g}")  # + 0: no "-0"


def gradients(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the sum of what `function` returns; zeros for a tensor it does not depend on."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    total = function(*leaves).sum()
    if not total.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))


def ignores_rubbish(function: Callable[..., Tensor], mask: Tensor, *tensors: Tensor) -> None:
    """NaN and inf at positions that do not count change neither the value nor any gradient."""
    out = function(*tensors)
    where = mask if out.shape == mask.shape else None
    weight = torch.where(mask, 1.0, 0.0) if where is not None else 1.0
    for rubbish in (torch.nan, torch.inf):
        dirty = [torch.where(mask.view(*mask.shape, *[1] * (x.dim() - 2)), x, rubbish) for x in tensors]
        close(function(*dirty), out, where)
        counted = lambda *x: torch.where(mask, function(*x), 0) if where is not None else function(*x) * weight
        for got, expected in zip(gradients(counted, *dirty), gradients(counted, *tensors), strict=True):
            close(got, expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A mask, and as many tensors beside it as a case asks for."""

    mask: Tensor
    generator: torch.Generator

    def real(self, *, per_row: bool = False) -> Tensor:
        """Normal numbers, [rows, positions] or [rows]."""
        shape = self.mask.shape[:1] if per_row else self.mask.shape
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def logprobs(self) -> Tensor:
        """Numbers below 0, [rows, positions]."""
        return -self.real().square() - 0.1


def batches(*, holes: bool, count: int = 16) -> Iterator[Batch]:
    """The same random batches every time: 1 to 4 rows, 1 to 8 positions, every row with at least one that counts.

    Without holes what counts is a run from position 0, as for answers of one turn; one-token answers are likely.
    """
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        rows, width = (int(torch.randint(1, top, (), generator=generator)) for top in (5, 9))
        lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
        mask = torch.arange(width) < lengths
        if holes:
            mask &= torch.rand(mask.shape, generator=generator) < 0.6
            mask[torch.arange(rows), lengths[:, 0] - 1] = True
        yield Batch(mask=mask, generator=generator)


def padded(tensor: Tensor, columns: int = 3) -> Tensor:
    """With columns of zeros (False) after it."""
    return torch.nn.functional.pad(tensor, (0, columns))
