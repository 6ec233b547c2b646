"""Environments in a worker process."""

import hashlib
import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal

from rolecall.agents.environments import as_factory, open_env
from rolecall.agents.replies import BadReply, Reply, first_reply, last_reply, next_reply, players_of
from rolecall.errors import UserError
from rolecall.tasks.env import EnvError
from rolecall.workers.child import Answer, Send, described

Call = Literal["start", "step", "end"]


def call_env(envs: dict[int, Any], factory: Callable[[], Any], key: int, call: Call, given: Any) -> Reply:
    """Let the environment of an episode begin with (row, seed), hear a message, or end before it is done."""
    if call == "start":
        envs[key] = factory()
        return first_reply(envs[key], *given)
    return next_reply(envs[key], given) if call == "step" else last_reply(envs[key])


def describe(factory: Callable[[], Any]) -> dict[str, Any]:
    """What is known of environments before any episode: players and tools. Makes one to find out."""
    env = factory()
    for method, given in (("reset", ("row", "seed")), ("step", ("message",))):
        call = getattr(env, method, None)
        if not callable(call):
            raise UserError(f"an environment needs `{method}`, which {type(env).__name__} has not")
        try:
            inspect.signature(call).bind(*given)
        except TypeError as error:
            gym = hasattr(env, "action_space")
            hint = "; it looks like a Gymnasium environment: register it and name it gym:ID" if gym else ""
            name = f"{type(env).__name__}.{method}"
            raise UserError(f"{name} cannot be called as {method}({', '.join(given)}): {error}{hint}") from error
        except ValueError:  # written in C: nothing is known of its arguments
            continue
    return {"players": list(players_of(env)), "tools": getattr(env, "tools", ())}


def open_worker(setup: Mapping[str, Any]) -> tuple[dict[str, Any], Answer]:
    """(players and tools, what plays)."""
    source, name = setup["source"], setup["name"]
    try:
        factory = open_env(source) if isinstance(source, str) else as_factory(pickle.loads(source))
        known = describe(factory)
    except UserError as error:
        raise EnvError(f"environment {name}: {error}") from error
    envs: dict[int, Any] = {}
    batch = 0

    def answer(job: Mapping[str, Any], send: Send) -> None:
        nonlocal batch
        if job["batch"] != batch:  # episodes of before will not be asked for again
            envs.clear()
            batch = job["batch"]
        try:
            if job["rebuild"] is not None:
                _rebuild(envs, factory, job["key"], *job["rebuild"])
            reply = asdict(call_env(envs, factory, job["key"], job["call"], job["given"]))
            send({"reply": reply, "digest": _digest(reply), "done": True})
        except BadReply as error:
            send({"error": str(error), "wrong": True, "done": True})
        except UserError as error:  # of an environment in its episode, which is that episode's failure
            send(described(error) | {"done": True})

    return known, answer


def _rebuild(envs: dict[int, Any], factory: Callable[[], Any], key: int, calls: list[Any], digests: list[str]) -> None:
    """Bring the environment of an episode whose process is gone to where it was."""
    replies = [call_env(envs, factory, key, call, given) for call, given in calls]
    if [_digest(asdict(reply)) for reply in replies] != digests:
        raise BadReply(
            "its worker was killed because of another episode, and playing it again from its seed went another way; "
            "draw everything random from the seed of reset"
        )


def _digest(reply: Mapping[str, Any]) -> str:
    """Tells replies apart, to know whether an episode that is played again goes the same way."""
    return hashlib.sha256(json.dumps(reply, sort_keys=True).encode()).hexdigest()
