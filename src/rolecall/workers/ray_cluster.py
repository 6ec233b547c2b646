"""A Ray cluster: reached or started, and looked at before anything is placed on it (needs `rolecall[ray]`)."""

import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from rolecall.errors import UserError

_CONNECT_S = 5.0
_ANSWER_S = 10.0
"""How long something that listens may take to say that it is Ray."""


def connected(*, cpus: float) -> tuple[Any, bool]:
    """(Ray, connected to the cluster that the environment variable RAY_ADDRESS names, or to one of so many CPUs that is started here;
    whether this call connected it)."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError("this needs Ray, which is not installed: pip install 'rolecall[ray]'") from error
    if ray.is_initialized():
        return ray, False
    address = os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if not address or address == "local":
        # Without "local" Ray would take any cluster that runs on this machine, whoever started it.
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
        return ray, True
    _check_reachable(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = in_words(error)
        if "uthentication token" in f"{error} {error.__cause__}":  # Ray sends its token to no address by itself
            why = (
                "it asks for a token, so set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN if it is not in ~/.ray/auth_token"
            )
        raise UserError(f"the Ray cluster of RAY_ADDRESS {address} cannot be used: {why}") from error
    return ray, True


def check_resources(ray: Any, count: int, needs: Mapping[str, float], *, what: str, option: str | None) -> None:
    """Refuse, in a sentence, what no placement on the machines of this moment could hold."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needs = {name: amount for name, amount in needs.items() if amount}
    fit = sum(min((int(node.get(name, 0.0) // each) for name, each in needs.items()), default=count) for node in nodes)
    if fit >= count:
        return
    each = " and ".join(f"{amount:g} {name}s" for name, amount in needs.items())
    there = " and ".join(f"{sum(node.get(name, 0.0) for node in nodes):g} {name}s" for name in needs)
    use = "" if option is None else f"use --{option} {fit}, or " if fit else "use less for each, or "
    raise UserError(
        f"{count} {what} need {each} each, and the Ray cluster has {there} on {len(nodes)} machines, enough for {fit}: {use}add machines"
    )


def refuse_missing(error: BaseException) -> None:
    """Say so where what Ray raised is that a machine has no rolecall, or not this one."""
    if "No module named 'rolecall" in str(error):
        raise UserError(
            "a machine of the Ray cluster has no rolecall, or another version of it: install the same on all machines"
        ) from error


def in_words(error: BaseException) -> str:
    """The last line of what Ray says, which names the cause."""
    if type(error).__name__ == "OutOfMemoryError":
        return "its machine ran out of memory, so Ray ended it"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    why = "it is not Ray that listens there, or it hangs"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as there:
            if os.environ.get("RAY_USE_TLS", "0") != "0" or _speaks_http2(there):
                return
    except OSError as error:
        why = error.strerror or str(error)
    raise UserError(
        f"no Ray cluster answers at RAY_ADDRESS {address} ({why}): start one with `ray start --head`, "
        "or leave RAY_ADDRESS out, and one is started here"
    )


def _speaks_http2(there: socket.socket) -> bool:
    """Whether it answers the first bytes of HTTP/2, which carries all that Ray says, with settings of its own (a frame of type 4)."""
    there.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    there.settimeout(_ANSWER_S)
    try:
        return there.recv(4, socket.MSG_WAITALL)[3:] == b"\4"
    except TimeoutError:
        return False
