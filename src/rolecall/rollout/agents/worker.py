"""The process that runs environments: a fresh interpreter that can be killed at any moment."""

import gc
import hashlib
import inspect
import json
import os
import pickle
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from rolecall.errors import UserError
from rolecall.rewards.worker import HEADER, described, die_with_trainer, limit_memory, receive
from rolecall.tasks.env import BadReply, Reply, first_reply, last_reply, next_reply, players_of
from rolecall.tasks.env_names import as_factory, open_env


def main(channel_fd: int, life_fd: int) -> None:
    """Serve the trainer at the other end of the socket until it hangs up."""
    die_with_trainer(life_fd)
    os.set_inheritable(channel_fd, False)
    channel = socket.socket(fileno=channel_fd)

    def send(message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        channel.sendall(HEADER.pack(len(body)) + body)

    with suppress(BrokenPipeError, ConnectionResetError):  # the trainer has hung up: there is nobody to tell
        _serve(channel, send)


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


def _serve(channel: socket.socket, send: Callable[[dict[str, Any]], None]) -> None:
    setup = receive(channel)
    if setup is None:
        return
    limit_memory(setup["memory_mb"])
    try:
        source = setup["source"]
        factory = open_env(source) if isinstance(source, str) else as_factory(pickle.loads(source))
        known = describe(factory)
    except UserError as error:
        send({"fatal": f"environment {setup['name']}: {error}"})
        return
    except BaseException as error:  # a class may raise anything, SystemExit too
        send({"fatal": f"environment {setup['name']} cannot be made: {described(error)['error']}"})
        return
    gc.freeze()
    send({"ready": known})
    envs: dict[int, Any] = {}
    while (job := receive(channel)) is not None:
        for key in job["forget"]:
            envs.pop(key, None)
        try:
            send({"reply": asdict(_do(job, envs, factory))})
        except BadReply as error:
            send({"error": str(error), "wrong": True})
        except BaseException as error:  # whatever an environment raises is this episode's failure
            send(described(error))


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
