"""Reward functions in a worker process."""

from collections.abc import Mapping, Sequence
from typing import Any

from rolecall.rewards.calling import Answers, Log, RewardFunction, inspect_function
from rolecall.rewards.records import RewardError
from rolecall.rewards.sources import Packed, open_packed
from rolecall.workers.child import Answer, Send, described


def open_worker(setup: Sequence[Packed]) -> tuple[dict[str, Any], Answer]:
    """(what the pool needs to know of the functions, what scores answers)."""
    functions = [inspect_function(packed.name, open_packed(packed)) for packed in setup]

    def answer(job: Mapping[str, Any], send: Send) -> None:
        function, answers = functions[job["function"]], Answers(**job["answers"])
        if function.style == "batch":
            log = Log()
            values = function.of_batch(answers, log)
            send({"values": values, "extras": log.extras, "metrics": log.metrics, "done": True})
            return
        for index in range(len(answers)):
            _score_one(function, answers, index, send)
        send({"done": True})

    return {"styles": [f.style for f in functions], "columns": [f.columns for f in functions]}, answer


def _score_one(function: RewardFunction, answers: Answers, index: int, send: Send) -> None:
    log = Log()
    try:
        value, extras = function.of_sample(answers, index, log)
    except (RewardError, MemoryError):
        raise
    except BaseException as error:
        send({"at": index} | described(error))
    else:
        send({"at": index, "value": value, "extras": extras, "metrics": log.metrics})
