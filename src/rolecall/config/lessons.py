"""Options of experience-guided rollouts: `--lessons.*` of `rolecall rl`."""

from dataclasses import dataclass
from typing import Literal


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
