"""A rule as the reward, +1 for a right answer, less than 0 for a wrong one, with REINFORCE.

REINFORCE scores whole batches: prompt and answer go through the model once, log-probs are taken at the answer's own
tokens, and each is weighted by the score minus a baseline (here the batch's mean).
"""

import tempfile

from steps import steps

import rolecall


def rule(completion_text, answer):
    """A wrong answer costs 0.1, and as much again for each character that is no digit."""
    others = sum(not character.isdigit() for character in completion_text)
    return 1.0 if completion_text.strip() == answer else -0.1 - 0.1 * others


if __name__ == "__main__":
    place = tempfile.mkdtemp()
    start = rolecall.sft(
        model="tiny",
        rows="addition:digits=1",
        steps=steps(60),
        batch=32,
        optim={"lr": 2e-3},
        out=f"{place}/sft",
    )
    run = rolecall.rl(
        model=str(start.path),
        rows="addition:digits=1",
        reward=rule,
        preset="reinforce",
        steps=steps(30),
        sampling={"max_new_tokens": 4},
        optim={"lr": 3e-4},
        out=f"{place}/reinforce",
    )
    print("share right, greedy:", rolecall.eval(model=str(run.path), rows="addition:digits=1").numbers["accuracy"])
