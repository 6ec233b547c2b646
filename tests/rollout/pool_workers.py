"""Workers that go wrong, for the tests of the pool."""

import os
from pathlib import Path

from rolecall.rollout import worker
from rolecall.serving.inside_vllm.rolecall_weights import merged


def merge_otherwise(base, adapter):
    """In workers, as on another kind of processor, the last bits differ."""
    found = merged(base, adapter)
    other = os.environ["POOL_TRAINER"] != str(os.getpid())
    return {name: w * (1 + 1e-6) if other else w for name, w in found.items()}


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
