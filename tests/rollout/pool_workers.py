"""Workers that go wrong, for the tests of the pool."""

import os
from pathlib import Path

from rolecall.rollout import worker


def open_worker(setup):
    """Answers of the version before, from the first worker that is asked."""
    ready, answer = worker.open_worker(setup)

    def stale(unit, send):
        first = Path(os.environ["POOL_MARK"])
        lies = not first.exists()
        first.touch()

        def say(message):
            if lies and "answer" in message:
                message["answer"]["version"] -= 1
            send(message)

        answer(unit, say)

    return ready, stale
