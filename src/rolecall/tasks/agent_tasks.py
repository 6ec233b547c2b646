"""The built-in tasks of several turns, short enough for tiny byte-level models.

    calculator:digits=2           12*34  ->  <calc>12*34</calc>  ->  408  ->  408
    guessing:high=7,tries=3       1 to 7  ->  4  ->  higher  ->  6  ->  lower  ->  5
    kuhn                          two players of Kuhn poker, in `tasks.kuhn`

Each is both a task (rows, demonstrations to imitate) and the environment its episodes are played in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Protocol

from rolecall.tasks.builtin import Drawn, Problem, Split
from rolecall.tasks.env import Env, Game, Message, Step
from rolecall.tasks.expressions import NotArithmetic, parse_expression
from rolecall.tasks.kuhn import Kuhn
from rolecall.tasks.rows import ListRows, RowError, Rows, share_of
from rolecall.tasks.tools import answer_call, find_calls


class AgentTask(Protocol):
    """Rows with an environment to play them in."""

    @property
    def name(self) -> str:
        """With its options."""
        ...

    def rows(self, split: Split, *, n: int, seed: int = 0) -> Rows:
        """At most n rows; `prompt` holds the messages the policy reads first."""
        ...

    def gold(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """The rest of an episode to imitate."""
        ...

    def env(self) -> Env | Game:
        """A fresh environment, for one episode."""
        ...


@dataclass(frozen=True, kw_only=True)
class Calculator(Drawn):
    """A product too large to know by heart, and a calculator. The episode ends with the first message without a call.

    One demonstration in four uses the calculator, the others answer at once, which a small model cannot do: what is to be
    learnt is to call.
    """

    kind: ClassVar[str] = "calculator"
    limits: ClassVar[Mapping[str, tuple[int, int]]] = {"digits": (1, 18)}
    digits: int = 2
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
        calls = find_calls(message["content"], ("calc",))
        if not calls:
            return Step(reward=float(message["content"].strip() == self.answer), done=True)
        answers = [answer_call(call, {"calc": calculate}) for call in calls]
        failed = sum(not well for _, well in answers)
        counts = {"tool_calls": float(len(calls)), "tool_failures": float(failed)}
        return Step(messages=[said for said, _ in answers], counts=counts)


def calculate(expression: str) -> str:
    """The value of a sum, product or quotient of whole numbers."""
    try:
        return str(parse_expression(expression.strip())[0])
    except NotArithmetic as error:
        raise ValueError(f"not arithmetic: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Guessing:
    """A number to be found in a few tries; after each the policy hears `higher` or `lower`.

    Three demonstrations in four count up from 1, whatever they hear; one halves what is left, which finds every number
    with the defaults: what is to be learnt is to halve.
    """

    kind: ClassVar[str] = "guessing"
    reward: ClassVar[None] = None
    high: int = 7
    """The numbers are 1 to this."""
    tries: int = 3
    """How many guesses there are."""

    def __post_init__(self) -> None:
        if not 2 <= self.high <= 10**6 or not 1 <= self.tries <= 100:
            raise RowError(
                f"task guessing: high must lie in 2 to 1000000 and tries in 1 to 100, got {self.high}, {self.tries}"
            )

    @property
    def name(self) -> str:
        return f"guessing:high={self.high},tries={self.tries}"

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


AGENT_TASKS: dict[str, Callable[..., AgentTask]] = {"calculator": Calculator, "guessing": Guessing, "kuhn": Kuhn}
"""The built-in tasks of several turns, by name."""
