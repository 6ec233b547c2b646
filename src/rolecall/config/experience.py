"""Options of experience: `--replay.*` and `--store.*` of `rolecall rl`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Training again on answers of earlier steps."""

    share: float = 0.0
    """Replayed groups / all groups of a step, below 1. They come on top of the fresh ones. 0 is no replay."""
    replace_flat: bool = False
    """Also replace every fresh group whose answers all scored the same by a replayed one."""
    mode: Literal["clipped", "shaped", "observe"] = "clipped"
    """clipped: PPO's loss with a wider upper clip. shaped: -A w / (w + offset). observe: scored and reported, not trained."""
    sampler: Literal["recent", "highest", "max_variance", "difficulty", "version_decay", "random"] = "recent"
    """Which groups are taken: the newest, the best, those whose scores differ most, by how many answers were right, by
    version less uses, or any."""
    answers: int | None = None
    """How many answers of a group to take: the best, the most different or the surest, as the sampler goes. None: all."""
    size: int = 256
    """Groups that are held; the oldest make room."""
    max_staleness: int = 10
    """How many versions of the weights ago a group may have been sampled."""
    max_uses: int = 3
    """How many steps a group may be replayed in."""
    keep_flat: bool = False
    """Hold groups whose answers all scored the same too: a critic can learn from them, a comparison cannot."""
    start_when: float = 0.0
    """Begin once this share of a step's answers is solved."""
    solved_at: float = 1.0
    """The score from which an answer is solved."""
    version_decay: float = 2.0
    """version_decay: versions of age that each use counts as."""
    coef: float = 1.0
    """What the loss of replayed positions is multiplied by."""
    clip_low: float = 0.2
    """clipped: the ratio's lower clip, 1 - this."""
    clip_high: float = 0.6
    """clipped: the ratio's upper clip, 1 + this."""
    dual_clip: float | None = 3.0
    """clipped: cap on the loss of answers with negative advantage, as a multiple of it."""
    offset: float = 0.1
    """shaped: the offset."""
    decoupled: bool = False
    """clipped: clip around the policy at the start of the update, and weigh by its ratio to the one that sampled."""
    weights: Literal["none", "truncate", "mask"] = "none"
    """What is done with positions whose ratio at the start of the update lies outside [weights_low, weights_high]:
    nothing, bring it to the edge (with decoupled or --from), or leave the position out of the sum."""
    weigh_fresh: bool | None = None
    """Do the same with fresh answers, which an engine of another precision or kind than the trainer's samples a little off. Left
    out: if the two differ, by whole answers and truncated at 3 (docs/numerics.md), whatever the options here say."""
    weights_level: Literal["token", "sequence"] = "token"
    """Whether that ratio is a token's or a whole answer's."""
    weights_low: float = 0.0
    """The lower edge."""
    weights_high: float = 2.0
    """The upper edge."""
    normalise: Literal["separate", "joint"] = "separate"
    """Compare replayed answers among themselves, or together with the fresh ones (to the same prompt, or all)."""

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"replay.share must lie in [0, 1), got {self.share}: a step needs fresh answers too")
        if self.size < 1 or self.max_staleness < 1 or self.max_uses < 1:
            raise ValueError(
                f"replay.size, max_staleness and max_uses must be at least 1, got {self.size}, {self.max_staleness}, "
                f"{self.max_uses}; share 0 is no replay"
            )
        if self.answers is not None and self.answers < 1:
            raise ValueError(f"replay.answers must be at least 1, got {self.answers}; leave it out for all")
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0 or self.offset <= 0 or self.coef < 0:
            raise ValueError("replay: clip_low lies in [0, 1], clip_high and coef are 0 or more, offset is above 0")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"replay.dual_clip must be larger than 1, got {self.dual_clip}")
        if not 0 <= self.weights_low <= self.weights_high:
            raise ValueError(
                f"replay.weights_low .. weights_high must be a band above 0, got {self.weights_low} .. {self.weights_high}"
            )
        if self.decoupled and self.mode != "clipped":
            raise ValueError("replay.decoupled belongs to replay.mode clipped")
        if self.decoupled and self.weights == "none":
            raise ValueError(
                "replay.decoupled weighs by a ratio that needs a bound: set replay.weights truncate or mask"
            )
        if self.weigh_fresh and self.weights == "none":
            raise ValueError("replay.weigh_fresh needs replay.weights truncate or mask, which say how")
        if self.mode == "observe" and self.normalise == "joint":
            raise ValueError("replay.mode observe leaves fresh answers alone: set replay.normalise separate")
        if self.mode == "observe" and self.replace_flat:
            raise ValueError("replay.mode observe trains nothing, so it cannot replace flat groups")

    @property
    def on(self) -> bool:
        """Whether anything is replayed."""
        return self.share > 0 or self.replace_flat


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """A copy of the rollouts elsewhere, for other programs and later runs."""

    url: str | None = None
    """Copy every step's rollouts to this address as well: s3://bucket/name, gs://…, sftp://…, or whatever fsspec knows
    (docs/files.md). `--from` and `rescore` read them there."""
    merge: int = 1
    """Merge the rollouts of this many steps into one file there, once all of them have arrived."""
    keep: int = 0
    """Steps whose rollouts stay there; 0: all."""

    def __post_init__(self) -> None:
        if self.merge < 1 or self.keep < 0:
            raise ValueError(f"store.merge is at least 1 and store.keep 0 or more, got {self.merge} and {self.keep}")
        if self.url is None and (self.merge > 1 or self.keep):
            raise ValueError("store.merge and store.keep are about the rollouts at store.url: give it too")
        if self.url is not None and "://" not in self.url:
            raise ValueError(f"store.url wants an address such as s3://bucket/name, got {self.url!r}")
