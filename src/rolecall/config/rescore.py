"""Options of `rolecall rescore`."""

from dataclasses import dataclass, field

from rolecall.config.parts import RewardProcessOptions


@dataclass(frozen=True, kw_only=True)
class RescoreOptions(RewardProcessOptions):
    """Apply another reward to the answers a run has stored: `rolecall rescore runs/x --reward f`. Nothing is sampled, and
    the run stays as it is; what comes out is a new one, for `rolecall rl --from`."""

    run: str = field(metadata={"bare": True})
    """The run whose rollouts are scored anew."""
    reward: tuple[str, ...] = ()
    """Reward functions: file.py:name, module:name, a built-in verifier, or a reward model's run. A task brings its own."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward; 1 each if not given."""
    rows: str | None = None
    """The rows that the run answered, for the columns that rewards ask for; those it names itself if not given."""
    out: str | None = None
    """Where the new run goes; beside the old one, as NAME-rescored-NUMBER, if not given. Nothing is ever overwritten."""
    quiet: bool = False
    """Say nothing while running."""
