"""This process among those that train together: what it takes of a step, and what all of them have.

What is drawn, asked and compared does not depend on how many there are: prompts have the numbers that they have in one
process, and rank r of n takes each n-th, from the r-th on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """One of `count` processes; alone by default."""

    number: int = 0
    """This one, from 0."""
    count: int = 1
    all_sum: Callable[[Tensor], Tensor] = lambda x: x
    """A tensor added up over ranks."""
    all_max: Callable[[Tensor], Tensor] = lambda x: x
    """A tensor's maximum over ranks."""
    gather: Callable[[list[Any]], list[Any]] = lambda items: items
    """The lists of all ranks, one after the other."""

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part."""
        return items[self.number :: self.count]
