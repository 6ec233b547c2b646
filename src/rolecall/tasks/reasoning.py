"""Any task of reasoning-gym: `rg:chain_sum`, with options `rg:chain_sum:min_terms=2,max_terms=3`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import count, islice
from typing import Any

from rolecall.tasks.builtin import TEST_SHARE, Split
from rolecall.tasks.rows import ListRows, RowError, Rows, share_of

_BLOCK = 64
_BARREN = 10
"""So many blocks in a row without a new problem mean that there are no more."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """A task of reasoning-gym. Its scorer may run sympy on the answer, so call `score` in reward workers only."""

    dataset: str
    """The name in reasoning-gym."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its configuration."""
    reward: str = "rolecall.tasks.scoring:task"
    """Runs `score` in a worker."""

    @property
    def name(self) -> str:
        """As `find_task` understands it."""
        options = ",".join(f"{key}={json.dumps(value)}" for key, value in self.options.items())
        return f"rg:{self.dataset}" + (f":{options}" if options else "")

    def rows(self, split: Split, *, n: int, seed: int = 0) -> Rows:
        """At most n different rows, with reasoning-gym's metadata; a hash of the question says which are held out."""
        if split not in ("train", "test"):
            raise RowError(f"a task has the splits 'train' and 'test', not {split!r}")
        return ListRows(islice(self._different(split, seed), n))

    def gold(self, row: Mapping[str, Any]) -> str:
        """reasoning-gym's answer."""
        if row["answer"] is None:
            raise RowError(f"task {self.name} has no gold answers; it cannot be learnt by imitation")
        return str(row["answer"])

    def score(self, answer: str, row: Mapping[str, Any]) -> float:
        """reasoning-gym's score, of what stands between <answer> tags if there are any."""
        if "<answer>" in answer:
            answer = answer.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        entry = {"question": row["prompt"], "answer": row["answer"], "metadata": row["metadata"]}
        return float(self._make(seed=0, size=1).score_answer(answer, entry))

    def _different(self, split: Split, seed: int) -> Iterator[dict[str, Any]]:
        seen: set[str] = set()
        barren = 0
        for block in count():
            known = len(seen)
            # Entry i of a dataset is drawn with seed + i, so that neighbouring seeds share all entries but one.
            for entry in self._make(seed=(seed << 32) + block * _BLOCK, size=_BLOCK):
                question = entry["question"]
                if question in seen or (share_of([self.dataset, question]) < TEST_SHARE) != (split == "test"):
                    continue
                seen.add(question)
                yield {"prompt": question, "answer": entry["answer"], "task": self.name, "metadata": entry["metadata"]}
            barren = barren + 1 if len(seen) == known else 0
            if barren == _BARREN:
                return

    def _make(self, *, seed: int, size: int) -> Any:
        gym = _reasoning_gym()
        try:
            return gym.create_dataset(self.dataset, seed=seed, size=size, **self.options)
        except (TypeError, AssertionError, ValueError) as error:
            raise RowError(f"task {self.name}: reasoning-gym does not take these options ({error})") from error


def find_reasoning(name: str, options: Mapping[str, Any]) -> ReasoningGym:
    """The task of that name, or a sentence with the nearest one."""
    names = sorted(_reasoning_gym().factory.DATASETS)
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean 'rg:{near[0]}'?" if near else f"it has {', '.join(names)}"
        raise RowError(f"reasoning-gym has no task {name!r}; {hint}")
    return ReasoningGym(dataset=name, options=dict(options))


@cache
def _reasoning_gym() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ImportError as error:
        raise RowError("tasks named rg:… need reasoning-gym: pip install 'rolecall[tasks]'") from error
    return reasoning_gym
