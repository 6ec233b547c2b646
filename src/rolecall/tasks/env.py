"""Environments in message space: what a multi-turn episode is played with.

An `Env` is one player's; a `Game` has several, of whom one speaks at a time. An instance plays one episode. Everything
random in it comes from the seed of `reset`, so that an episode can be played again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rolecall.errors import UserError

Message = Mapping[str, Any]
"""A message with "role" and "content". An "author" says who wrote it where the role does not (a memory, say)."""
Said = str | Sequence[Message]
"""Messages, or the text of one by the user."""

SOLO = "agent"
"""The name of the only player of an `Env`."""

_LIMITS = ("max_steps", "_max_episode_steps", "max_episode_steps", "max_cycles")


class EnvError(UserError):
    """An environment, or the name of one, that cannot be used: not found, not of the right shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What an environment makes of the policy's message."""

    messages: Said = ()
    """What the policy reads next."""
    reward: float | None = None
    """Added to the episode's score. None: nothing to say; an episode of which nothing was said has no score."""
    done: bool = False
    """The episode is over."""
    truncated: bool = False
    """With done: cut off by a limit of the environment's own, not ended."""
    context: Sequence[Message] | None = None
    """The whole conversation from here on, in place of all that was before (a summary, say). `messages` follow it."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to add up over the episode, logged as `agents/NAME`."""


class Env(Protocol):
    """One player's environment.

    If it has `final_reward() -> float | None`, that is asked when a limit cuts the episode off. If it has `tools`, JSON
    schemas, the chat template is given them.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Said:
        """Begin the episode of this row; what the policy reads first."""
        ...

    def step(self, message: Message) -> Step:
        """The policy has said this."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """What a game makes of a player's message."""

    speaker: str
    """Who speaks next; of no meaning when it is done."""
    messages: Mapping[str, Said] = field(default_factory=dict)
    """What each player reads before it speaks next."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Added to each player's score."""
    done: bool = False
    """The game is over."""
    truncated: bool = False
    """With done: cut off, not ended."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to add up over the episode, logged as `agents/NAME`."""


class Game(Protocol):
    """Several players, each with a conversation of its own, of whom one speaks at a time."""

    @property
    def players(self) -> Sequence[str]:
        """Their names."""
        ...

    def reset(self, row: Mapping[str, Any], seed: int) -> Move:
        """Begin; `messages` are the players' prompts."""
        ...

    def step(self, message: Message) -> Move:
        """The one whose turn it is has said this."""
        ...


def own_limit(env: Any) -> int | None:
    """The step limit that an environment keeps itself, not Gymnasium's TimeLimit around it."""
    held = [getattr(getattr(env, "unwrapped", env), name, None) for name in _LIMITS]
    return next((x for x in held if isinstance(x, int) and not isinstance(x, bool) and x > 0), None)


def at_own_limit(env: Any, steps: int) -> bool:
    """Whether an environment that says it ended has only reached its own limit, as rware and lbforaging report it."""
    limit = own_limit(env)
    return limit is not None and steps >= limit
