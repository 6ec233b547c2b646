"""A model behind OpenAI's API as the reward: it reads a question with its answer, and says how good that is.

`judge:http://127.0.0.1:8750/v1?prompt=judge.txt` is the name of one. It is asked by the process that trains, so that neither the
network nor the key is open to reward functions. What the policy wrote is put into the prompt as it is; only the judge's reply is read.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.errors import UserError, out_of_range
from rolecall.remote.plain import PlainServer, TextAnswer
from rolecall.rewards.calling import no_column, text_of
from rolecall.rewards.records import Messages, RewardError, Sample, Scored, report_failures
from rolecall.rewards.verifiers import last_number
from rolecall.types import Sampling

PREFIX = "judge:"
_DEFAULT = (
    "Here is a question, and an answer to it.\n\nQuestion:\n{prompt}\n\nAnswer:\n{completion}\n\n"
    "How good is the answer, from 0 (wrong) to 10 (could not be better)? Give your reasons in a few sentences, then the number."
)
_TOKENS = 256
_GIVEN = ("prompt", "completion")
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSource:
    """What `judge:URL?…` says."""

    url: str
    model: str | None = None
    """Which of the server's models."""
    prompt: str = _DEFAULT
    """What the judge reads, with {prompt}, {completion} and columns of the row in braces."""
    score: str | None = None
    """A pattern whose last match in the reply has the score as its first group; else it is the reply's last number."""
    tokens: int = _TOKENS
    """How long a reply may be."""

    @classmethod
    def read(cls, source: str) -> "JudgeSource":
        """A `RewardError` if it says something else."""
        url, _, query = source.removeprefix(PREFIX).partition("?")
        if not re.fullmatch(r"https?://[^@\s]+", url):
            raise RewardError(f"reward {source!r}: give an address, such as judge:http://127.0.0.1:8750/v1")
        given = {name: value for name, _, value in (part.partition("=") for part in query.split("&") if part)}
        if unknown := set(given) - {"model", "prompt", "score", "tokens"}:
            raise RewardError(
                f"reward {source!r}: {min(unknown)!r} is not known; a judge has model, prompt (a file), score, tokens"
            )
        try:
            if "prompt" in given:
                given["prompt"] = Path(given["prompt"]).expanduser().read_text(encoding="utf-8")
            if "score" in given and re.compile(given["score"]).groups < 1:
                raise ValueError("score has no group in parentheses that is the number")
            tokens = int(given.pop("tokens", _TOKENS))
            Sampling(max_new_tokens=tokens)
        except (OSError, ValueError, re.error) as error:
            raise RewardError(f"reward {source!r}: {error}") from error
        return cls(url=url, tokens=tokens, **given)


class Judge:
    """The `Reward` of a judge. Answers are judged at the same time; one of which no score comes has failed."""

    def __init__(self, source: str, *, name: str = "judge", weight: float = 1.0, seconds: float) -> None:
        """A reply may take `seconds`, tries after failures included."""
        self.source, self.name, self.weight, self.seconds = JudgeSource.read(source), name, weight, seconds
        self.server = PlainServer(self.source.url, model=self.source.model)
        self._failed = 0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Refuse a prompt that asks for a column which the rows do not have."""
        there = list(columns)
        for name in _FIELD.findall(self.source.prompt):
            if name not in (*_GIVEN, *there):
                raise RewardError(no_column(self.name, name, there))

    def score(self, samples: Sequence[Sample], *, state: Mapping[str, Any] | None = None) -> list[Scored]:
        with self.scoring(state or {}) as asked:
            asked.add(dict(enumerate(samples)))
            return asked.finish()

    @contextmanager
    def scoring(self, state: Mapping[str, Any]) -> "Iterator[_Asked]":
        """Ask about samples as they come."""
        asked = _Asked(self)
        try:
            yield asked
        finally:
            asked.give_up()

    def begin(self, sample: Sample) -> "Future[TextAnswer]":
        """Ask about a sample, and do not wait for the reply."""
        sampling = Sampling(temperature=0.0, max_new_tokens=self.source.tokens)
        question = [{"role": "user", "content": self.asks(sample)}]
        return self.server.begin(question, sampling, seed=0, seconds=self.seconds)

    def heard(self, sample: Sample, reply: "Future[TextAnswer]") -> Scored:
        """What the reply says of it; waits for it."""
        try:
            return self._scored(sample, reply.result().text)
        except UserError as error:
            return self._failure(sample, str(error))

    def count(self, scored: Sequence[Scored]) -> None:
        """Name and count those without a score."""
        self._failed += report_failures(self.name, scored)

    def asks(self, sample: Sample) -> str:
        """What the judge reads. Braces in what is put in mean nothing."""
        given = {**sample.row, "prompt": _shown(sample.prompt), "completion": _shown(sample.completion)}
        return _FIELD.sub(lambda found: str(given.get(found[1], found[0])), self.source.prompt)

    def _scored(self, sample: Sample, reply: str) -> Scored:
        pattern = self.source.score
        if pattern is None:
            found: Any = last_number(reply)
        else:
            matches = list(re.finditer(pattern, reply))
            found = matches[-1][1] if matches else None
        try:
            score = None if found is None else float(found)
        except ValueError:
            score = None
        if score is None or out_of_range(self.weight * score):
            return self._failure(sample, f"no score can be read from its reply {reply[-80:]!r}")
        extras = {f"{self.name}/reply": reply}
        return Scored(scores={self.name: score}, total=self.weight * score, extras=extras)

    def _failure(self, sample: Sample, why: str) -> Scored:
        failure = f"reward `{self.name}` failed on {sample.place}: {why}"
        return Scored(scores={self.name: None}, total=None, failure=failure)

    def take_metrics(self) -> dict[str, float]:
        """Answers it could not score since the last call."""
        failed, self._failed = self._failed, 0
        return {f"rewards/{self.name}/failed": float(failed)}

    def close(self) -> None:
        self.server.close()


class _Asked:
    """The samples that a judge was asked about, and its replies."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._begun: dict[int, tuple[Sample, Future[TextAnswer]]] = {}

    def add(self, samples: Mapping[int, Sample]) -> None:
        self._begun |= {number: (sample, self._judge.begin(sample)) for number, sample in samples.items()}

    def poll(self) -> None:
        pass

    def finish(self) -> list[Scored]:
        scored = [self._judge.heard(*self._begun[number]) for number in sorted(self._begun)]
        self._judge.count(scored)
        return scored

    def give_up(self) -> None:
        for _, reply in self._begun.values():
            reply.cancel()


def _shown(given: str | Messages) -> str:
    """A text as it is, a conversation with who said what, the last message of an answer alone as its text."""
    if isinstance(given, str):
        return given
    return (
        "\n".join(f"{message['role']}: {text_of([message])}" for message in given) if len(given) > 1 else text_of(given)
    )
