"""The error whose message is meant for the person at the keyboard, and what several rooms refuse in the same words."""

from math import isfinite


class UserError(ValueError):
    """Something the user can put right, in one sentence: what, where, what to do. The command line shows it bare."""

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        """`exit_code` is 2 for what is wrong with the call, found before any work; 1 for what comes later."""
        super().__init__(message)
        self.exit_code = exit_code


_LARGEST_REWARD = 1e38
"""Float32, which rewards are placed on tokens in, ends at 3.4e38."""


def out_of_range(reward: float) -> str | None:
    """Why a number cannot be a reward, to follow "which"; None if it can."""
    if not isfinite(reward):
        return "is not finite"
    return f"is beyond ±{_LARGEST_REWARD:g}: scale it down" if abs(reward) > _LARGEST_REWARD else None
