"""Environments in a worker process."""

import hashlib
import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rolecall.errors import UserError
from rolecall.tasks.env import BadReply, EnvError, Reply, first_reply, last_reply, next_reply, players_of
from rolecall.tasks.env_names import as_factory, open_env
from rolecall.workers.child import Answer, Send, described


def digest(reply: Mapping[str, Any]) -> str:
    """Tells replies apart, to know whether an episode that is played again goes the same way."""
    return hashlib.sha256(json.dumps(reply, sort_keys=True).encode()).hexdigest()


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
    return {"players": list(players_of(env)), "tools": list(getattr(env, "tools", ()))}


def open_worker(setup: Mapping[str, Any]) -> tuple[dict[str, Any], Answer]:
    """(players and tools, what plays)."""
    source, name = setup["source"], setup["name"]
    try:
        factory = open_env(source) if isinstance(source, str) else as_factory(pickle.loads(source))
        known = describe(factory)
    except UserError as error:
        raise EnvError(f"environment {name}: {error}") from error
    envs: dict[int, Any] = {}

    def answer(job: Mapping[str, Any], send: Send) -> None:
        for key in job["forget"]:
            envs.pop(key, None)
        try:
            send({"reply": asdict(_do(job, envs, factory)), "done": True})
        except BadReply as error:
            send({"error": str(error), "wrong": True, "done": True})
        except UserError as error:  # of an environment in its episode, which is that episode's failure
            send(described(error) | {"done": True})

    return known, answer


def _do(job: Mapping[str, Any], envs: dict[int, Any], factory: Callable[[], Any]) -> Reply:
    key = job["key"]
    if job["what"] == "start":
        envs[key] = factory()
        return first_reply(envs[key], job["row"], job["seed"])
    if job["rebuild"] is not None:
        envs[key] = _rebuilt(job["rebuild"], factory)
    if job["what"] == "end":
        return last_reply(envs[key])
    return next_reply(envs[key], job["message"])


def _rebuilt(played: Mapping[str, Any], factory: Callable[[], Any]) -> Any:
    """The environment of an episode whose process is gone, brought to where it was."""
    env = factory()
    replies = [first_reply(env, played["row"], played["seed"])]
    replies += [next_reply(env, message) for message in played["said"]]
    if [digest(asdict(reply)) for reply in replies] != played["digests"]:
        raise BadReply(
            "its worker was killed because of another episode, and playing it again from its seed went another way; "
            "draw everything random from the seed of reset"
        )
    return env
