"""Options of episodes of several turns, and of lessons from them."""

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
    """Environment variables that those environments see in addition to the usual ones (PATH, HOME, caches, thread counts)."""
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


@dataclass(frozen=True, kw_only=True)
class LessonOptions:
    """Lessons in words from earlier episodes, which some rollouts read in their prompt and no training sample holds."""

    share: float = 0.0
    """Share of each group's episodes that read lessons. 0 is no lessons at all."""
    by: str = "policy"
    """Who distils lessons from finished episodes: `policy`, the address of an OpenAI-compatible API
    (http://host:8000/v1), or file.py:function."""
    served_model: str | None = None
    """With an address: which of its models; the only one if not given."""
    recall: str = "bm25"
    """How lessons are found for a prompt: by its words (`bm25`), or by embeddings of the sentence-transformers model of this
    name or directory (`pip install 'rolecall[lessons]'`)."""
    top: int = 3
    """Lessons that an episode reads."""
    per_step: int = 4
    """Episodes of a step that a lesson is distilled from: the best and the worst of the groups whose scores differ most."""
    max_tokens: int = 48
    """Tokens of a lesson; what is longer is cut."""
    size: int = 64
    """Lessons that are held; the one that helped least makes room."""
    trial: int = 8
    """Episodes after which a lesson is retired if those that read it did no better than the others of their groups."""
    ratio: Literal["behaviour", "recomputed"] = "behaviour"
    """What the ratio of a guided sample is to: the log-probs that it was sampled with, lessons read; or those of the policy
    at the start of the update without them, as AgentEvolver does."""
    clip_high: float | None = None
    """The ratio's upper clip for guided samples, 1 + this (AgentEvolver: 0.6). Left out: the algorithm's."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"lessons.share is a share of a group's episodes, 0 to 1, got {self.share}")
        for name in ("top", "per_step", "max_tokens", "size", "trial"):
            if getattr(self, name) < 1:
                raise ValueError(f"lessons.{name} must be at least 1, got {getattr(self, name)}")
        if self.clip_high is not None and self.clip_high < 0:
            raise ValueError(f"lessons.clip_high is what the ratio may be above 1, 0 or more, got {self.clip_high}")
        if self.served_model is not None and not self.by.startswith(("http://", "https://")):
            raise ValueError("lessons.served_model goes with an address in lessons.by")

    @property
    def on(self) -> bool:
        """Whether any episode reads lessons."""
        return self.share > 0
