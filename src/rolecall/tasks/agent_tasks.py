"""The built-in tasks of several turns, short enough for tiny byte-level models.

    calculator:digits=2           12*34  ->  <calc>12*34</calc>  ->  408  ->  408
    guessing:high=7,tries=3       1 to 7  ->  4  ->  higher  ->  6  ->  lower  ->  5
    kuhn                          two players of Kuhn poker, in `tasks.kuhn`

Each is both a task (`rows`, and `gold`, the rest of an episode to imitate) and, by `env`, what makes the environment of
one episode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from rolecall.tasks.builtin import BuiltIn, Drawn, Problem, Split, whole
from rolecall.tasks.env import Message, Step
from rolecall.tasks.expressions import NotArithmetic, parse_expression
from rolecall.tasks.kuhn import Kuhn
from rolecall.tasks.rows import ListRows, Rows, share_of
from rolecall.tasks.tools import call_tools


@dataclass(frozen=True, kw_only=True)
class Calculator(Drawn):
    """A product too large to know by heart, and a calculator. The episode ends with the first message without a call.

    One demonstration in four uses the calculator, the others answer at once, which a small model cannot do: what is to be
    learnt is to call.
    """

    digits: int = whole(2, 1, 18)
    """Of each number."""

    def draw(self, rng: Random) -> Problem:
        a, b = rng.randrange(10**self.digits), rng.randrange(10**self.digits)
        return Problem(prompt=f"{a}*{b}", answer=str(a * b), content=sorted((a, b)))

    def rows(self, split: Split, *, n: int, seed: int = 0) -> Rows:
        drawn = super().rows(split, n=n, seed=seed)
        return ListRows({**row, "prompt": [_user(row["prompt"])]} for row in drawn)

    def gold(self, row: Mapping[str, Any]) -> Any:
        asked = row["prompt"][0]["content"]
        if share_of(["by heart", asked]) < 0.75:
            return [_assistant(row["answer"])]
        call = f"<calc>{asked}</calc>"
        return [_assistant(call), {"role": "tool", "content": row["answer"]}, _assistant(row["answer"])]

    def env(self) -> "CalculatorEnv":
        return CalculatorEnv()


class CalculatorEnv:
    """Answers calls of `calc`; the first message without one is the answer."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self.answer = str(row["answer"])
        return row["prompt"]

    def step(self, message: Message) -> Step:
        text = message["content"]
        called = call_tools(text, {"calc": calculate}, short=("calc",))
        return called or Step(reward=float(text.strip() == self.answer), done=True)


def calculate(expression: str) -> str:
    """The value of a sum, product or quotient of whole numbers."""
    try:
        return str(parse_expression(expression.strip())[0])
    except NotArithmetic as error:
        raise ValueError(f"not arithmetic: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Guessing(BuiltIn):
    """A number to be found in a few tries; after each the policy hears `higher` or `lower`.

    Three demonstrations in four count up from 1, whatever they hear; one halves what is left, which finds every number
    with the defaults: what is to be learnt is to halve.
    """

    high: int = whole(7, 2, 10**6)
    """The numbers are 1 to this."""
    tries: int = whole(3, 1, 100)
    """How many guesses there are."""

    def rows(self, split: Split, *, n: int, seed: int = 0) -> Rows:
        """The secrets of both splits are drawn from all numbers: the policy never reads them."""
        rng = Random(f"{self.name}/{split}/{seed}")
        prompt = [_user(f"1 to {self.high}")]
        secrets = [rng.randint(1, self.high) for _ in range(n)]
        return ListRows({"prompt": prompt, "secret": s, "draw": i, "task": self.name} for i, s in enumerate(secrets))

    def gold(self, row: Mapping[str, Any]) -> Sequence[Message]:
        counts = share_of(["count", self.name, row["draw"], row["secret"]]) < 0.75
        low, high, messages = 1, self.high, list[Message]()
        for left in range(self.tries - 1, -1, -1):
            guess = low if counts else (low + high) // 2
            messages.append(_assistant(str(guess)))
            if guess == row["secret"] or not left:
                break
            higher = guess < row["secret"]
            messages.append(_user("higher" if higher else "lower"))
            low, high = (guess + 1, high) if higher else (low, guess - 1)
        return messages

    def env(self) -> "GuessingEnv":
        return GuessingEnv(tries=self.tries)


class GuessingEnv:
    """1 for the number, 0 when the tries are used up. What is no number costs a try."""

    def __init__(self, *, tries: int) -> None:
        self.left = tries

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self.secret = int(row["secret"])
        return row["prompt"]

    def step(self, message: Message) -> Step:
        self.left -= 1
        text = message["content"].strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
        if guess == self.secret:
            return Step(reward=1.0, done=True)
        if not self.left:
            return Step(reward=0.0, done=True)
        if guess is None:
            return Step(messages="a number", counts={"not_numbers": 1.0})
        return Step(messages="higher" if guess < self.secret else "lower")


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


AGENT_TASKS: dict[str, type[BuiltIn]] = {"calculator": Calculator, "guessing": Guessing, "kuhn": Kuhn}
"""The built-in tasks of several turns, by name."""
