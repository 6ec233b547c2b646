"""How long the examples train: `STEPS=2 python examples/own_reward.py` for a short look."""

import os


def steps(full: int) -> int:
    """The number of steps, at most $STEPS."""
    return min(full, int(os.environ.get("STEPS", full)))
