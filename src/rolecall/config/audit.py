"""Options of `rolecall audit`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rolecall.config.rl import RLOptions
from rolecall.config.training import SFTOptions


@dataclass(frozen=True, kw_only=True)
class AuditOptions(RLOptions):
    """Look before training: what would go wrong with this model, template, rows and reward.

    Takes the settings of `rolecall rl`, or with `--job sft` those of `rolecall sft`, and some of its own. Nothing is
    trained, and `out` is not written to.
    """

    command: ClassVar[str] = "audit"
    out: str | None = None
    """Not written to. With resume: the run whose settings are audited."""
    resume: bool = False
    """Audit the settings of the run in `out`; options given here override them."""
    overwrite: bool = False
    """Replace the page that `html` names. No run is removed."""
    view: bool = False
    """Without effect: an audit makes no run."""
    quiet: bool = False
    """Warnings and errors only."""
    job: Literal["rl", "sft"] = "rl"
    """The command whose settings these are."""
    groups: int = 8
    """Prompts that are answered, `samples` times each, with the random numbers of the first step."""
    show: int = 2
    """Sequences shown token by token."""
    gold_form: str | None = None
    """How the reward wants an answer written if not in a common way: `The answer is {}`. {} is the row's answer."""
    html: str | None = None
    """The page to write; runs/audit-NUMBER.html if not given."""
    page: bool = True
    """Write the page."""
    json: bool = False
    """Print the findings as one JSON object."""
    batch: int | None = None
    """sft: rows per step."""
    max_length: int | None = None
    """sft: longer rows are left out."""
    train_stop: bool | None = None
    """sft: train the choice to stop."""
    max_new_tokens: int | None = None
    """sft: longest answer when evaluating."""

    @property
    def longest_row(self) -> int:
        """sft: `max_length`, or what it is there if not given."""
        return SFTOptions.max_length if self.max_length is None else self.max_length

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups < 1 or self.show < 0:
            raise ValueError(f"groups must be at least 1 and show at least 0, got {self.groups} and {self.show}")
        if self.gold_form is not None and "{}" not in self.gold_form:
            raise ValueError(f"gold_form needs a {{}} where the row's answer goes, got {self.gold_form!r}")
        given = [
            name for name in ("batch", "max_length", "train_stop", "max_new_tokens") if getattr(self, name) is not None
        ]
        if given and self.job == "rl":
            there = f"; in rl it is {_IN_RL[given[0]]}" if given[0] in _IN_RL else ""
            raise ValueError(f"{given[0]} is a setting of sft{there}: give job sft, or leave it out")
        if self.reward and self.job == "sft":
            raise ValueError("sft takes no reward: leave it out, or give job rl")


_IN_RL = {"train_stop": "algorithm.train_stop", "max_new_tokens": "sampling.max_new_tokens"}
