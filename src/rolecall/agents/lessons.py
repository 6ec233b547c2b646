"""A pool of short lessons in words, and what episodes that read them were worth.

A group's episodes share a task, and some of them read lessons. What those scored above the mean of the others is credited to
each lesson that they read; after `trial` of them, a lesson that did not help is retired. A retired lesson is remembered for a
while, so that the same words do not come back. The pool is part of every checkpoint; `lessons.jsonl` tells people what
happened to it, in lines that stay as they are.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rolecall.agents.bm25 import ranked, words_of
from rolecall.agents.played import Lesson
from rolecall.config.agents import LessonOptions

_ALIKE = 0.8
"""Words in common / words of both, from which two lessons are the same."""

Nearest = Callable[[str, Sequence[str]], Sequence[int]]
"""(query, texts) -> the texts that fit it, best first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """What one side of an episode read and scored."""

    group: tuple[int, str]
    """Which sides it is compared with: its prompt's number in the step, and the player."""
    sample: int
    lessons: tuple[int, ...]
    """None if it read no lesson."""
    total: float | None


@dataclass(slots=True)
class _Held:
    """A lesson in the pool."""

    id: int
    text: str
    step: int
    uses: int = 0
    """Episodes that read it, had a score, and others to be compared with."""
    gain: float = 0.0
    """What they scored above the mean of the others, in all."""
    retired: bool = False
    words: Counter[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.words = Counter(words_of(self.text))

    @property
    def mean_gain(self) -> float:
        """Of an episode; 0 before the first."""
        return self.gain / self.uses if self.uses else 0.0


class LessonPool:
    """Lessons that are found by the words of a prompt, or by `nearest`."""

    def __init__(self, options: LessonOptions, *, nearest: Nearest | None = None) -> None:
        self.options, self._nearest = options, nearest
        self._held: list[_Held] = []
        self._next = 1

    @property
    def live(self) -> list[_Held]:
        """Those that episodes may read, the oldest first."""
        return [held for held in self._held if not held.retired]

    def recall(self, prompt: str) -> list[Lesson]:
        """The `top` lessons for a prompt: those that fit it, then those that helped most, then the newest."""
        live = self.live
        if self._nearest is None:
            first = ranked(prompt, [held.words for held in live])
        else:
            first = list(self._nearest(prompt, [held.text for held in live]))
        rest = sorted(set(range(len(live))) - set(first), key=lambda i: (-live[i].mean_gain, -live[i].id))
        return [Lesson(id=live[i].id, text=live[i].text) for i in [*first, *rest][: self.options.top]]

    def credit(self, sides: Sequence[Read]) -> list[dict[str, Any]]:
        """Count what lessons were worth, and retire those that do not help; a line for each that was retired."""
        others: dict[tuple[int, str], list[float]] = {}
        for side in sides:
            if not side.lessons and side.total is not None:
                others.setdefault(side.group, []).append(side.total)
        by_id = {held.id: held for held in self._held}
        for side in sides:
            if side.total is None or side.group not in others:
                continue
            gain = side.total - sum(others[side.group]) / len(others[side.group])
            for held in (by_id[i] for i in side.lessons if i in by_id):
                held.uses, held.gain = held.uses + 1, held.gain + gain
        useless = [held for held in self.live if held.uses >= self.options.trial and held.gain <= 0]
        return [self._retire(held, "it did not help") for held in useless]

    def add(self, text: str, *, step: int, **origin: Any) -> list[dict[str, Any]]:
        """Take in a lesson, unless it says nothing or what one of the pool says: the lines that tell of it and of the one
        that made room."""
        made = _Held(id=self._next, text=text, step=step)
        if not made.words or any(_alike(made.words, held.words) for held in self._held):
            return []
        lines, live = [], self.live
        if len(live) >= self.options.size:
            worst = min(live, key=lambda held: (held.mean_gain, held.id))
            lines.append(self._retire(worst, "it made room"))
        self._next += 1
        self._held.append(made)
        return [*lines, {"lesson": made.id, "text": text, **origin}]

    def _retire(self, held: _Held, why: str) -> dict[str, Any]:
        held.retired = True
        gone = [h for h in self._held if h.retired]
        for old in gone[: max(0, len(gone) - self.options.size)]:
            self._held.remove(old)
        return {"retired": held.id, "why": why, "uses": held.uses, "mean_gain": held.mean_gain}

    def state_dict(self) -> dict[str, Any]:
        held = [{name: value for name, value in asdict(h).items() if name != "words"} for h in self._held]
        return {"next": self._next, "held": held}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from there; None is a checkpoint of a run without lessons."""
        self._held = [] if state is None else [_Held(**held) for held in state["held"]]
        self._next = 1 if state is None else state["next"]


def _alike(one: Counter[str], other: Counter[str]) -> bool:
    both = one.keys() | other.keys()
    return len(one.keys() & other.keys()) >= _ALIKE * len(both)
