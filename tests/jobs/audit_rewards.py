"""Reward functions for audits, in a module that a worker imports in no time."""

import random
import time


def right(completions, answer, **_):
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


def right_in_chat(completions, answer, **_):
    return [float(said[-1]["content"].strip() == wanted) for said, wanted in zip(completions, answer, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.strip() == ground_truth), "source": data_source}


def never(completion_text, answer):
    return 0.0


def one_too_many(completion_text, answer):
    """Wants another answer than the row's."""
    return float(completion_text.strip() == str(int(answer) + 1))


def noisy(completion_text, answer):
    return float(completion_text.strip() == answer) + random.random() * 1e-3


def slow(completion_text, answer):
    time.sleep(0.05)
    return float(completion_text.strip() == answer)


def fragile(completion_text, answer):
    return float(int(completion_text) == int(answer))


def sometimes_none(completion_text, answer):
    return None if "1" in completion_text else float(completion_text.strip() == answer)


def a_number(completion_text):
    """Looks at the form only."""
    return float(completion_text.strip().isdigit())


def needs_level(completion_text, level):
    return 1.0


def too_few(completions, **_):
    return [0.0]


def short(completion_text, answer):
    """Can be had without being right."""
    return float(completion_text.strip() == answer) + 2.0 * (len(completion_text) == 1)


def shaped(completion_text, answer):
    """A little for the last digit."""
    return float(completion_text.strip() == answer) + 0.001 * (ord(completion_text[-1:] or "0") % 10)


def in_words(completion_text, answer):
    return float(completion_text == f"It is {answer}!")
