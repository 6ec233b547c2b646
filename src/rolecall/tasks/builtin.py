"""The built-in tasks: short prompts made for tiny byte-level models, exact verifiers, a held-out split.

    addition:digits=2      17+58=            75
    sorting:length=5       sort 31527=       12357
    reversal:length=5      reverse hello=    olleh
    countdown:numbers=3    make 13 of 2 3 7= 2*3+7

Train and test can have no problem in common: a hash of the problem says where it belongs, and problems that are the
same but for their order (17+58 and 58+17) have the same hash.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from random import Random
from string import ascii_lowercase
from typing import Any, ClassVar, Literal, Protocol

from rolecall.tasks.expressions import NotArithmetic, parse_expression
from rolecall.tasks.rows import ListRows, RowError, Rows, share_of

Split = Literal["train", "test"]

TEST_SHARE = 0.1
"""Of all problems of a built-in task, this share is held out."""
_MISSES = 2000
"""So many draws in a row without a new problem mean that there are no more."""


class Task(Protocol):
    """Problems with an exact verifier."""

    @property
    def name(self) -> str:
        """With its options, as `find_task` understands it; rows carry it in the column `task`."""
        ...

    @property
    def reward(self) -> str:
        """The reward function that scores its rows, as a `RewardPool` takes it."""
        ...

    def rows(self, split: Split, *, n: int, seed: int = 0) -> Rows:
        """At most n different rows (fewer if there are no more), with the columns prompt, answer and task."""
        ...

    def gold(self, row: Mapping[str, Any]) -> str:
        """The answer to learn from, which scores 1."""
        ...

    def score(self, answer: str, row: Mapping[str, Any]) -> float:
        """1.0 if the answer is right, else 0.0; some tasks give parts of a point."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A drawn problem."""

    prompt: str
    """What the model sees."""
    answer: str
    """A right answer."""
    content: object
    """What makes it this problem, apart from order: decides whether it is held out."""


def whole(default: int, low: int, high: int) -> Any:
    """An option of a task: a whole number within limits."""
    return field(default=default, metadata={"limits": (low, high)})


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """What all built-in tasks share: a name with options, which are checked."""

    reward: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for option in fields(self):
            (low, high), value = option.metadata["limits"], getattr(self, option.name)
            if not low <= value <= high:
                raise RowError(f"task {self.kind}: {option.name} must lie in {low} to {high}, got {value}")

    @property
    def kind(self) -> str:
        """The name without options."""
        return type(self).__name__.lower()

    @property
    def name(self) -> str:
        """The name with its options."""
        options = ",".join(f"{option.name}={getattr(self, option.name)}" for option in fields(self))
        return f"{self.kind}:{options}" if options else self.kind


@dataclass(frozen=True, kw_only=True)
class Drawn(BuiltIn, ABC):
    """Problems of one answer, drawn one by one and sorted into the two sides."""

    reward: ClassVar[str | None] = "rolecall.tasks.scoring:task"

    def rows(self, split: Split, *, n: int, seed: int = 0) -> Rows:
        if split not in ("train", "test"):
            raise RowError(f"a task has the splits 'train' and 'test', not {split!r}")
        name, problems = self.name, islice(self._different(split, seed), n)
        return ListRows({"prompt": p.prompt, "answer": p.answer, "task": name} for p in problems)

    def gold(self, row: Mapping[str, Any]) -> str:
        return str(row["answer"])

    def score(self, answer: str, row: Mapping[str, Any]) -> float:
        return float(answer.strip() == row["answer"])

    @abstractmethod
    def draw(self, rng: Random) -> Problem:
        """One problem of either side."""

    def _different(self, split: Split, seed: int) -> Iterator[Problem]:
        rng = Random(f"{self.name}/{split}/{seed}")
        seen: set[str] = set()
        misses = 0
        while misses < _MISSES:
            problem = self.draw(rng)
            held_out = share_of([self.kind, problem.content]) < TEST_SHARE
            if problem.prompt in seen or held_out != (split == "test"):
                misses += 1
                continue
            misses = 0
            seen.add(problem.prompt)
            yield problem


@dataclass(frozen=True, kw_only=True)
class Addition(Drawn):
    """Two numbers of up to `digits` digits."""

    digits: int = whole(2, 1, 18)
    """Of each number."""

    def draw(self, rng: Random) -> Problem:
        a, b = rng.randrange(10**self.digits), rng.randrange(10**self.digits)
        return Problem(prompt=f"{a}+{b}=", answer=str(a + b), content=sorted((a, b)))


@dataclass(frozen=True, kw_only=True)
class Sorting(Drawn):
    """Digits to be put in order, smallest first."""

    length: int = whole(5, 2, 64)
    """How many digits."""

    def draw(self, rng: Random) -> Problem:
        digits = "".join(rng.choices("0123456789", k=self.length))
        answer = "".join(sorted(digits))
        return Problem(prompt=f"sort {digits}=", answer=answer, content=answer)


@dataclass(frozen=True, kw_only=True)
class Reversal(Drawn):
    """Letters to be written backwards."""

    length: int = whole(5, 1, 64)
    """How many letters."""

    def draw(self, rng: Random) -> Problem:
        letters = "".join(rng.choices(ascii_lowercase, k=self.length))
        return Problem(prompt=f"reverse {letters}=", answer=letters[::-1], content=min(letters, letters[::-1]))


@dataclass(frozen=True, kw_only=True)
class Countdown(Drawn):
    """An expression that uses each of the numbers once and has the value asked for; any such expression is right."""

    numbers: int = whole(3, 2, 8)
    """How many numbers there are."""
    largest: int = whole(9, 2, 999)
    """They lie between 1 and this."""

    def draw(self, rng: Random) -> Problem:
        numbers = [rng.randint(1, self.largest) for _ in range(self.numbers)]
        value, answer, loose = numbers[0], str(numbers[0]), False
        for number in numbers[1:]:
            signs = [sign for sign, fits in (("+", True), ("-", value > number), ("*", value * number <= 999)) if fits]
            sign = rng.choice(signs)
            if sign == "*":
                answer, value, loose = f"({answer})*{number}" if loose else f"{answer}*{number}", value * number, False
            else:
                answer, value, loose = f"{answer}{sign}{number}", value + (number if sign == "+" else -number), True
        shown = sorted(numbers)
        prompt = f"make {value} of {' '.join(map(str, shown))}="
        return Problem(prompt=prompt, answer=answer, content=[value, shown])

    def score(self, answer: str, row: Mapping[str, Any]) -> float:
        target, _, numbers = row["prompt"].removeprefix("make ").removesuffix("=").partition(" of ")
        try:
            value, used = parse_expression(answer.strip())
        except NotArithmetic:
            return 0.0
        return float(value == int(target) and sorted(used) == sorted(map(int, numbers.split())))


BUILT_IN = {task.__name__.lower(): task for task in (Addition, Sorting, Reversal, Countdown)}
"""The built-in tasks by name."""


def demonstrations(task: Any, split: Split, *, n: int, seed: int = 0) -> Rows:
    """Rows with the gold answer (or the rest of an episode) as `completion`, to learn from by imitation."""
    return ListRows(row | {"completion": task.gold(row)} for row in task.rows(split, n=n, seed=seed))


def preference_rows(task: Task, split: Split, *, n: int, seed: int = 0) -> Rows:
    """Rows with the gold answer as `chosen` and a spoilt one, which scores less, as `rejected`."""
    rng = Random(f"{task.name}/preferences/{seed}")
    return ListRows(
        row | {"chosen": task.gold(row), "rejected": _spoilt(task, row, rng)}
        for row in task.rows(split, n=n, seed=seed)
    )


def _spoilt(task: Task, row: Mapping[str, Any], rng: Random) -> str:
    gold = task.gold(row)
    letters = sorted(set(gold)) if len(set(gold)) > 1 else [*gold[:1], *"0123456789"]
    full = task.score(gold, row)
    while True:
        at = rng.randrange(len(gold))
        tail = gold[at + 1 :]
        spoilt = gold[:at] + rng.choice([rng.choice(letters) + tail, rng.choice(letters) + gold[at:], tail])
        if spoilt and task.score(spoilt, row) < full:
            return spoilt
