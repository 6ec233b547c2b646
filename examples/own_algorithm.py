"""Your own algorithm: an advantage and a loss, as two functions.

The advantage is RLOO's (an answer against the mean of the *other* answers to its prompt); the loss is the plain policy
gradient, one term, averaged over trained tokens. `trained(batch)` is the mask: it comes from the roles, so neither
function can disagree with the denominators, the metrics or the records.
"""

import tempfile

from steps import steps

import rolecall
from rolecall.maths.advantages import rloo
from rolecall.train.step import Term, trained


def advantage(batch):
    return rloo(batch.scores, batch.groups, include=~batch.scores.isnan())  # [batch]: NaN is a failed reward


def loss(outputs, batch):
    mask = trained(batch)
    pull = -batch.advantages * outputs.logprobs  # [batch, time]
    return {"policy": Term(values=pull.where(mask, 0), mask=mask, mode="token-mean")}


def digits(completions, **kwargs):
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


if __name__ == "__main__":
    run = rolecall.rl(
        model="tiny",
        rows="sorting:length=2",
        reward=digits,
        advantage=advantage,
        loss=loss,
        steps=steps(30),
        prompts=8,
        samples=4,
        sampling={"max_new_tokens": 4},
        optim={"lr": 3e-4},
        out=f"{tempfile.mkdtemp()}/own-algorithm",
    )
    print("loss terms:", sorted(name for name in run.metrics[-1] if name.startswith("loss/")))
