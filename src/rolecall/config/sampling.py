"""How to draw tokens, an option of every command that samples and part of every request to an engine; and why an answer ended."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Finish(StrEnum):
    """Why an answer or episode ended."""

    STOP = "stop"
    """The policy chose a stop id; it is the last token."""
    STOP_STRING = "stop_string"
    """The text ended with a stop string; its tokens are content."""
    LENGTH = "length"
    """Cut off: max_new_tokens or the context was used up."""
    TOOL = "tool"
    """Ended with a tool call; the episode continues."""
    MAX_TURNS = "max_turns"
    """Cut off: no turns left."""
    TIMEOUT = "timeout"
    """Cut off: no time left."""
    ENVIRONMENT = "environment"
    """The environment ended the episode."""
    ABORT = "abort"
    """Broken off by an error; recorded and counted, never trained."""

    @property
    def truncated(self) -> bool:
        """Cut off by a limit rather than ended by the policy or the environment."""
        return self in (Finish.LENGTH, Finish.MAX_TURNS, Finish.TIMEOUT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to draw tokens."""

    temperature: float = 1.0
    """0 is greedy. Log-probs are of the tempered distribution (of temperature 1 when greedy)."""
    top_k: int | None = None
    """Draw from the k most likely tokens only."""
    top_p: float | None = None
    """Draw from the smallest set of most likely tokens whose probability reaches p."""
    min_p: float | None = None
    """Draw only from tokens at least min_p times as likely as the most likely one."""
    logprobs: Literal["drawn", "full"] = "drawn"
    """What log-probs are of where top_k, top_p or min_p cut the vocabulary: `drawn` is the distribution the token was
    drawn from, whose tokens are recorded so that training scores it too; `full` is the whole vocabulary, which biases
    the gradient. Without a cut both are the same."""
    max_new_tokens: int = 256
    """The stop token counts."""
    stop_ids: tuple[int, ...] | None = None
    """None: the model's own. Empty: none, every answer runs to its limit."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end an answer; their tokens stay in it."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1, got {self.max_new_tokens}; an answer has at least one token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}; leave it out to draw from all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}")

    @property
    def cuts_support(self) -> bool:
        """True if some tokens can never be drawn."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1) or bool(self.min_p)

    @property
    def records_support(self) -> bool:
        """True if engines record which tokens could be drawn, and log-probs are of these. Greedy answers are scored
        over the whole vocabulary."""
        return self.cuts_support and self.logprobs == "drawn" and self.temperature > 0

    @property
    def cuts(self) -> str:
        """The settings that cut the vocabulary, as `top_k=20, top_p=0.9`."""
        given = {name: getattr(self, name) for name in ("top_k", "top_p", "min_p")}
        return ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)

    @property
    def scoring_temperature(self) -> float:
        """The temperature at which log-probs are computed: greedy answers are scored at 1."""
        return self.temperature if self.temperature > 0 else 1.0
