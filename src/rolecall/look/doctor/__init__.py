"""What looks wrong with a run, found in its files: an audit, not a prophecy. docs/doctor.md has a line for every check."""

from rolecall.look.doctor.audit import findings
from rolecall.look.doctor.finding import Finding

__all__ = ["Finding", "findings"]
