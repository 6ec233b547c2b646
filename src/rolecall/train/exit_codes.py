"""What the exit code of a job says."""

from enum import IntEnum


class ExitCode(IntEnum):
    """One number per way a job can end."""

    DONE = 0
    """Finished."""
    ERROR = 1
    """An error, or stopped at once without saving."""
    USAGE = 2
    """The command line or the config is wrong."""
    DIVERGED = 3
    """Too many steps in a row were not finite; the last finite checkpoint is kept."""
    DISK = 74
    """The disk is full, read-only or gone."""
    RETRY = 75
    """A worker or a peer failed; the same command may succeed."""
    INTERRUPTED = 130
    """Ctrl-C: saved, then stopped."""
    TERMINATED = 143
    """SIGTERM: saved, then stopped."""
