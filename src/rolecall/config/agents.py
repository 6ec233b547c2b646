"""Options of episodes of several turns."""

from dataclasses import dataclass, field
from typing import Literal

AGENT_FLAG = {"prefixed": {"agent": "agent:"}}
"""Of the option `env`: --agent PROGRAM is --env agent:PROGRAM."""


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Episodes of several turns: their limits, and how environments are run."""

    max_turns: int = 16
    """Turns of the policy in an episode, of all players together; then it is cut off (finish `max_turns`)."""
    max_tokens: int | None = None
    """Tokens that a player may write in an episode; then it is cut off (finish `length`)."""
    max_seconds: float | None = None
    """Seconds for the episodes of a step; then they are cut off (finish `timeout`). Results then depend on the clock."""
    context_tokens: int | None = None
    """Tokens of context, if less than the model's."""
    context: Literal["append", "window", "memory", "summary", "thoughts"] = "append"
    """What becomes of the conversation as it grows: nothing (when it is full the episode ends, finish `length`); the oldest
    turns are dropped when it is full; the same, but what the policy wrote in `<note>…</note>` stays; the policy summarises it before it
    is full; `<think>…</think>` of earlier turns is dropped. A row may name its own in the column `context_manager`."""
    when_full: Literal["end", "cut"] = "end"
    """`cut` is an older name of `context window`."""
    deadline: float = 60.0
    """Seconds an environment may take to answer, or a program may let pass between its calls, before it is killed and its
    episode given up."""
    workers: int = 2
    """Processes that run environments which are not built in, or look after the programs of `--agent`."""
    programs: int = 64
    """Programs of `--agent` that run at the same time, each in a process of its own."""
    network: bool = False
    """Let those environments and their tools use the network."""
    variables: tuple[str, ...] = ()
    """Environment variables that those environments see beside the usual ones (PATH, HOME, caches, thread counts)."""
    cluster: Literal["none", "ray"] = "none"
    """`ray`: the workers of those environments run on the machines of a Ray cluster (docs/cluster.md)."""
    frozen: tuple[str, ...] = ()
    """Players of a game who do not learn, each as PLAYER=MODEL: the address of an OpenAI-compatible API, or whatever `model` may be, such
    as an earlier run. Repeat the flag for several."""
    prompt: str | None = field(default=None, metadata={"flag": "env.prompt"})
    """gym:ID: what the policy reads before the first observation, in place of the environment's own description."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "workers", "programs"):
            if getattr(self, name) < 1:
                raise ValueError(f"agent.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_tokens", "max_seconds", "context_tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"agent.{name} must be above 0, got {value}; leave it out for no such limit")
        if self.when_full == "cut" and self.context not in ("append", "window"):
            raise ValueError(f"agent.when_full cut is agent.context window, and there is {self.context}: keep one")
        names = [given.partition("=")[0] for given in self.frozen]
        for given in self.frozen:
            if not all(given.partition("=")) or names.count(given.partition("=")[0]) > 1:
                raise ValueError(f"agent.frozen wants each player once, as PLAYER=MODEL, got {given!r}")
        if not self.deadline > 0:
            raise ValueError(f"agent.deadline must be above 0 seconds, got {self.deadline}")

    @property
    def manager(self) -> str:
        """The context's, under its name of today."""
        return "window" if self.when_full == "cut" else self.context
