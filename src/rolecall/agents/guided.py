"""Which episodes of a step read lessons, and what is learned from all of them. All ranks hold the same pool."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rolecall.agents.distil import Attempt, Distil, chosen
from rolecall.agents.lessons import LessonPool, Read
from rolecall.agents.played import Side
from rolecall.config.agents import LessonOptions
from rolecall.train.ranks import Ranks


class Lessons:
    """The pool of a run, and who fills it."""

    def __init__(
        self, options: LessonOptions, pool: LessonPool, distil: Distil, *, tokenizer: Any, ranks: Ranks | None = None
    ) -> None:
        self.options, self.pool, self.distil = options, pool, distil
        self.tokenizer, self.ranks = tokenizer, ranks or Ranks()

    def guided(self, samples: int) -> int:
        """How many of a group's episodes read lessons: the first ones."""
        return round(self.options.share * samples)

    def learn(self, step: int, sides: Sequence[Side]) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Credit the lessons that were read, and distil new ones: what is written down, and what is logged."""
        read = sorted(self.ranks.gather([_read(side) for side in sides]), key=lambda r: (r.group, r.sample))
        lines = self.pool.credit(read)
        found, counts = self._distilled(step, sides), Counter(retired=len(lines))
        for text, origin in found:
            short = self._short(text)
            added = self.pool.add(short, step=step + 1, **origin) if short else []
            counts["new" if added else "repeated" if short else "failed"] += 1
            counts["retired"] += max(0, len(added) - 1)
            lines += added
        return lines, _measured(read) | {
            "lessons/pool": float(len(self.pool.live)),
            **{f"lessons/{name}": float(counts[name]) for name in ("new", "repeated", "failed", "retired")},
        }

    def _distilled(self, step: int, sides: Sequence[Side]) -> list[tuple[str | None, dict[str, Any]]]:
        """The lessons of all ranks and where they come from, in the order of one process."""
        scored: dict[tuple[int, str], list[tuple[int, float]]] = {}
        own = {(_group(side), side.episode.wanted.sample): side for side in sides}
        for side in sides:
            if side.scored.total is not None:
                scored.setdefault(_group(side), []).append((side.episode.wanted.sample, side.scored.total))
        wanted = sorted(self.ranks.gather(chosen(scored)))[: self.options.per_step]
        mine = [(i, *w) for i, w in enumerate(wanted) if (w[1], w[2]) in own]
        attempts = [_attempt(i, own[group, sample], mean) for i, _, group, sample, mean in mine]
        texts = self.distil(attempts, step) if attempts else []
        found = [
            (i, text, {"row": group[0], "sample": sample, "score": attempt.score, "mean": mean})
            for (i, _, group, sample, mean), attempt, text in zip(mine, attempts, texts, strict=True)
        ]
        return [(text, origin) for _, text, origin in sorted(self.ranks.gather(found), key=lambda f: f[0])]

    def _short(self, text: str | None) -> str:
        """In one line of at most `max_tokens` tokens."""
        line = " ".join((text or "").split())
        ids = self.tokenizer(line, add_special_tokens=False)["input_ids"] if line else []
        if len(ids) > self.options.max_tokens:
            line = self.tokenizer.decode(ids[: self.options.max_tokens], skip_special_tokens=True)
        return " ".join(line.split())


def _group(side: Side) -> tuple[int, str]:
    return side.episode.wanted.prompt, side.player


def _read(side: Side) -> Read:
    lessons = side.episode.lessons.get(side.player, ())
    return Read(group=_group(side), sample=side.episode.wanted.sample, lessons=lessons, total=side.scored.total)


def _attempt(number: int, side: Side, mean: float) -> Attempt:
    messages = side.episode.sides[side.player].messages
    start = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    assert side.scored.total is not None
    return Attempt(
        number=number,
        prompt=messages[:start],
        completion=messages[start:],
        score=side.scored.total,
        mean=mean,
        row=side.episode.wanted.row,
    )


def _measured(read: Sequence[Read]) -> dict[str, float]:
    """How many sides read lessons, and what both kinds scored."""
    found: Mapping[bool, list[float]] = {True: [], False: []}
    for side in read:
        if side.total is not None:
            found[bool(side.lessons)].append(side.total)
    numbers = {"lessons/guided": sum(bool(side.lessons) for side in read) / max(1, len(read))}
    for name, with_lessons in (("score_with", True), ("score_without", False)):
        if found[with_lessons]:
            numbers[f"lessons/{name}"] = sum(found[with_lessons]) / len(found[with_lessons])
    return numbers
