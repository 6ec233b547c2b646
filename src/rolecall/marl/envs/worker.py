"""Environments of several agents in a worker process."""

from base64 import b64encode
from dataclasses import asdict
from typing import Any

from rolecall.marl.envs.base import Frame
from rolecall.marl.envs.names import open_local
from rolecall.workers.child import Answer, Send

ARRAYS = ("obs", "avail", "present", "reward", "terminated", "truncated", "state")


def open_worker(setup: tuple[str, int, int | None]) -> tuple[dict[str, Any], Answer]:
    """(the fields of the specification, what resets and steps)."""
    name, count, limit = setup
    envs = open_local(name, count, limit=limit)

    def answer(job: tuple[Any, ...], send: Send) -> None:
        what, *arguments = job
        frame: Frame = envs.reset(*arguments) if what == "reset" else envs.step(*arguments)
        arrays = [getattr(frame, array) for array in ARRAYS]
        send(
            {
                "arrays": [None if array is None else b64encode(array.tobytes()).decode() for array in arrays],
                "faults": list(frame.faults.items()),
                "done": True,
            }
        )

    return asdict(envs.spec), answer
