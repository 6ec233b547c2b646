"""When an answer ends."""

from dataclasses import dataclass
from typing import Any

from rolecall.types import Finish, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """The ends of one request's answers."""

    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    max_new_tokens: int
    tokenizer: Any
    tail: int
    """How many of the last tokens can hold a stop string: every token but a partial character has at least one byte."""

    @classmethod
    def of(cls, sampling: Sampling, stop_ids: tuple[int, ...], tokenizer: Any) -> "StopRule":
        """The rule for these settings on a model with these stop ids."""
        if sampling.stop_strings and tokenizer is None:
            raise ValueError("stop_strings need a tokenizer to read the text with; give the engine one")
        own = stop_ids if sampling.stop_ids is None else sampling.stop_ids
        longest = max((len(s.encode()) for s in sampling.stop_strings), default=0)
        return cls(
            stop_ids=frozenset(own),
            stop_strings=sampling.stop_strings,
            max_new_tokens=sampling.max_new_tokens,
            tokenizer=tokenizer,
            tail=longest + 8,
        )

    def finish(self, ids: list[int], *, full: bool) -> Finish | None:
        """Why the answer ends with its last token, or None. `full`: the context has no room for another."""
        if ids[-1] in self.stop_ids:
            return Finish.STOP
        if self.stop_strings and self._holds_stop_string(ids):
            return Finish.STOP_STRING
        return Finish.LENGTH if full or len(ids) >= self.max_new_tokens else None

    def _holds_stop_string(self, ids: list[int]) -> bool:
        # Anywhere in the tail, because the last token can bring more than the end of the stop string. The tokens before
        # it hold none: the answer would have ended there.
        text = self.tokenizer.decode(ids[-self.tail :], clean_up_tokenization_spaces=False)
        return any(s in text for s in self.stop_strings)
