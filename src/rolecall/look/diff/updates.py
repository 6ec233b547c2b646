"""What differs first between the updates of the same step of two runs."""

from typing import Any

from rolecall.look.diff.record import Record, at, first_difference, lists

_PLACE = ("rollout_step", "trajectory", "epoch", "minibatch")


def updates_part(a: Record, b: Record) -> dict[str, Any] | None:
    """The first token that an optimiser step treated differently, in the order of these steps; None if there is none, or
    if either run did not keep the file."""
    if a.updates is None or b.updates is None or a.updates.equals(b.updates):
        return None
    places = [list(zip(*(held[name].to_pylist() for name in _PLACE), strict=True)) for held in (a.updates, b.updates)]
    for left, right in zip(*places, strict=False):
        if left != right:
            said = f"mini-batches are made of other answers: answer {left[1]} of step {left[0]} and answer {right[1]} of step "
            return {"kind": "order", "answer": left[1], "sentence": f"{said}{right[0]}"}
    if len(places[0]) != len(places[1]):
        return {"kind": "loss", "sentence": f"optimiser steps saw {len(places[0])} answers and {len(places[1])}"}
    terms = [name for name in a.updates.column_names if name.startswith("contribution_")]
    columns = ["verdicts", "weights", "logprobs", "ratio", *(t for t in terms if t in b.updates.column_names)]
    held = {name: (lists(a.updates, name), lists(b.updates, name)) for name in columns}
    for i, (_, trajectory, epoch, minibatch) in enumerate(places[0]):
        for name, (one, two) in held.items():
            if (token := first_difference(one[i], two[i])) is not None:
                what = name.removeprefix("contribution_").replace("_", " ")
                what = f"share of the {what} loss" if name.startswith("contribution_") else what
                said = f"{what} {at(one[i], token)} and {at(two[i], token)} in epoch {epoch}, mini-batch {minibatch}"
                kind = "log-prob" if name == "logprobs" else "loss"
                return {"kind": kind, "answer": trajectory, "token": token, "sentence": said}
    return None
