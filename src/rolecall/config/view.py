"""Options of `rolecall view`."""

from dataclasses import dataclass, field
from typing import ClassVar

PORT = 8624
"""Where `rolecall view` listens unless told otherwise, so that an address stays the same from day to day."""


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """A local page over every run in a directory, live while they train: curves, findings, answers token by token, runs
    compared. Only this machine can open it, with the token in the address that is printed (needs `rolecall[view]`)."""

    command: ClassVar[str] = "view"
    dir: str = field(default="runs", metadata={"bare": True})
    """The directory that holds the runs, or one run."""
    port: int = PORT
    """The port to listen on; 0 takes any that is free."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
