"""What the loop trains: the one protocol it knows."""

from collections.abc import Mapping
from typing import Any, Protocol


class Learner(Protocol):
    """Something that learns in steps."""

    def collect(self, step: int) -> Any:
        """Experience for one step."""
        ...

    def update(self, experience: Any) -> Any:
        """Learn from it."""
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers about the last step. `skipped` above 0 means that its gradient was not finite; `rewards/failed`
        without `reward` that no answer has a score: then the learner's `unscored` says why."""
        ...

    def explain(self) -> str:
        """The last step in a short line of up to about 40 columns; then, a line each, remarks: sentences without numbers,
        shown once in a run."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything beside weights and optimiser that the next step depends on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. A learner with much state may have `mark()` too: what it returns takes back all that `collect`
        has changed since."""
        ...
