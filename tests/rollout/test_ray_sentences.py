"""What is said where there is no Ray, or no cluster: without Ray itself."""

import socket
import sys
import time

import pytest

from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.policy.load import load
from rolecall.rollout import ray_cluster, ray_pool

HOW = {"name": "native", "dtype": None, "max_rows": 256}
OPTIONS = EngineOptions(workers=1, cluster="ray")


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"engine\.cluster ray needs Ray: pip install 'rolecall\[ray\]'"):
        ray_pool.RayPool(load("tiny"), OPTIONS, how=HOW, reads={})


def test_a_cluster_that_is_not_there_is_named_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    begun = time.monotonic()
    with pytest.raises(
        UserError, match=f"no Ray cluster answers at RAY_ADDRESS {address} .Connection refused.: start one"
    ):
        ray_cluster._check_reachable(address)
    assert time.monotonic() - begun < 5


def test_a_cluster_is_for_workers():
    with pytest.raises(ValueError, match=r"engine\.cluster ray says where engine\.workers are: give their number too"):
        EngineOptions(cluster="ray")
