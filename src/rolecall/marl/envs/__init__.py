"""Environments of several agents: many at a time behind one interface. Nothing here imports torch."""

from typing import Any

from rolecall.marl.envs.base import EnvError as EnvError
from rolecall.marl.envs.base import Envs as Envs
from rolecall.marl.envs.base import EnvSpec as EnvSpec
from rolecall.marl.envs.names import open_local
from rolecall.marl.envs.pool import PooledEnvs


def open_envs(name: str, count: int, *, limit: int | None = None, workers: int = 0, **how: Any) -> Envs:
    """`count` environments by name: in this process, or spread over `workers` others, `how` being what `PooledEnvs` takes.

    Those have a deadline for every step and no network unless they are given it.
    """
    if workers:
        return PooledEnvs(name, count, limit=limit, workers=workers, **how)
    return open_local(name, count, limit=limit)
