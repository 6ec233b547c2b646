"""Rewards of runs to look at, in a file of their own: the processes that run rewards import it, and it imports nothing heavy."""

from zlib import crc32


def noise(prompt: str, completion_text: str) -> float:
    """A score for the prompt, and a thousandth of it for nothing."""
    return crc32(prompt.encode()) % 3 + 1e-3 * (crc32(completion_text.encode()) % 7)


def spread(completion_text: str) -> float:
    """Something between 0 and 1 that differs from answer to answer."""
    return (crc32(completion_text.encode()) % 11) / 10


def bonus(completion_text: str, bonus: float) -> float:
    """The same, and what the row gives for any answer."""
    return spread(completion_text) + bonus
