"""The reward of the runs that are computed again. A module of its own: its worker process then imports nothing heavy."""


def reward(completions, worth, **kwargs):
    """High for low bytes; fails where the answer is long."""
    return [score(text, w) for text, w in zip(completions, worth, strict=True)]


def score(text, worth):
    if len(text) % 5 == 3:
        return None
    return worth * sum(ord(c) < 100 for c in text) / 4 - 0.1 * len(text)
