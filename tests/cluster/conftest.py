"""A cluster of three machines that Ray fakes on this one."""

import os

import pytest


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="needs rolecall[ray]")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112  Ray's name; other programs are none of its business
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.extra = [made.add_node(num_cpus=1) for _ in range(2)]
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()
    made.shutdown()
