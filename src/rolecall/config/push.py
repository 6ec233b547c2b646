"""The options of `rolecall push`."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Upload a run's model to the Hugging Face hub, with a model card made from the run and its report."""

    run: str = field(metadata={"bare": True})
    """The directory of a run of sft, rm, rl, dpo or expert-iteration that has ended."""
    repo: str = field(metadata={"bare": True})
    """Where it goes: a hub id such as me/my-model; it is made if it is not there."""
    private: bool = True
    """Make a new repository private; the report shows prompts and answers of the run. --no-private makes it public."""
    out: str | None = None
    """The folder to write before uploading; `push` in the run's directory if not given."""
    dry_run: bool = False
    """Write the folder, say where, and upload nothing."""
