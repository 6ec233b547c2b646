"""One RL step after another with rolecall, when told: driven by step.py. `python step_ours.py '{"model": …}'`."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turns import take_turn

import rolecall
from rolecall.rollout.native import NativeEngine
from rolecall.train.progress import Quiet
from rolecall.types import Finish


def count_e(completions, **columns):
    """A reward that differs between answers: how often they hold an e, or a 3 in models that write numbers."""
    return [(text.count("e") + text.count("3")) / 10 for text in completions]


class Turns(Quiet):
    """Waits between steps; says how long the phases of a step took."""

    def __init__(self, out: str) -> None:
        self._timing = Path(out) / "timing.jsonl"

    def begin(self, title: str, *, start: int, steps: int) -> None:
        take_turn()

    def step(self, step: int, metrics: Mapping[str, float], sentence: str) -> None:
        phases = json.loads(self._timing.read_text().splitlines()[-1])
        take_turn(phases=phases, tokens=metrics.get("answer_tokens"))


def end_at(shortest: int, longest: int) -> None:
    """Answers end after so many tokens, by prompt and sample, whatever they say."""
    plain = NativeEngine._extend

    def extend(self: NativeEngine, rows: Any, drawn: Any) -> list[tuple[int, Finish]]:
        plain(self, rows, drawn)
        spread = longest - shortest + 1
        wanted = (shortest + (7 * row.prompt.request.prompt + 5 * row.sample) % spread for row in rows)
        return [(slot, Finish.STOP) for slot, n in enumerate(wanted) if len(rows[slot].ids) >= n]

    NativeEngine._extend = extend


def main(s: dict[str, Any]) -> None:
    """Settings are those of `rolecall.rl`; `lengths` forces the answers' lengths."""
    settings = dict(s)
    if lengths := settings.pop("lengths", None):
        end_at(*lengths)
    reward = settings.pop("reward", None) or count_e
    rolecall.rl(
        **settings,
        reward=reward,
        eval={"every": 0},
        save={"every": 0},
        steps=1000,
        overwrite=True,
        progress=Turns(settings["out"]),
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
