"""What is said where there is no Ray, or no cluster: without Ray itself."""

import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.policy.load import load
from rolecall.rollout import ray_pool
from rolecall.workers import ray_cluster

HOW = {"name": "native", "dtype": None, "max_rows": 256}
OPTIONS = EngineOptions(workers=1, cluster="ray")


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"this needs Ray, which is not installed: pip install 'rolecall\[ray\]'"):
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


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_listens_and_is_no_ray_is_said(monkeypatch, said):
    monkeypatch.setattr(ray_cluster, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        def answer():
            talking, _ = other.accept()
            talking.sendall(said)
            ended.wait()
            talking.close()

        ended = threading.Event()
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(
                UserError, match=r"no Ray cluster answers at .*\(it is not Ray that listens there, or it hangs\)"
            ):
                ray_cluster._check_reachable(address)
        finally:
            ended.set()
            thread.join()


def test_without_an_address_a_cluster_is_started_whatever_else_runs_here(monkeypatch):
    asked = {}
    fake = SimpleNamespace(is_initialized=lambda: False, init=lambda **how: asked.update(how))
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray_cluster.connected(cpus=3) == (fake, True)
    assert (asked["address"], asked["num_cpus"]) == ("local", 3)


def test_an_actor_that_ray_ended_for_memory_is_said_so():
    kind = type("OutOfMemoryError", (Exception,), {})
    assert ray_cluster.in_words(kind("many\nlines")) == "its machine ran out of memory, so Ray ended it"
    assert ray_cluster.in_words(ValueError("first\nlast")) == "last"


def test_a_machine_without_rolecall_is_said():
    with pytest.raises(
        UserError, match=r"a machine of the Ray cluster has no rolecall, .*: install the same on all machines"
    ):
        ray_cluster.refuse_missing(RuntimeError("failed to unpickle\nModuleNotFoundError: No module named 'rolecall'"))
    ray_cluster.refuse_missing(RuntimeError("No module named 'ray'"))


class Full(Exception):
    """As Ray raises it."""


@pytest.mark.parametrize(
    ("put", "sentence"),
    [
        (
            lambda content: (_ for _ in ()).throw(Full()),
            "has no room for the model's 3 MB: start the cluster with a larger",
        ),
        (lambda content: time.sleep(60), "did not within 1 s take the model's 3 MB"),
    ],
)
def test_a_full_or_slow_object_store_is_one_sentence_within_seconds(put, sentence):
    pool = object.__new__(ray_pool.RayPool)
    pool.options = EngineOptions(workers=1, cluster="ray", worker_silence=1.0)
    pool._ray = SimpleNamespace(put=put, exceptions=SimpleNamespace(ObjectStoreFullError=Full, OutOfDiskError=Full))
    begun = time.monotonic()
    with pytest.raises(UserError, match=sentence) as raised:
        pool._put({"model.safetensors": b"0" * 3_000_000}, size=3_000_000)
    assert raised.value.exit_code == 75
    assert time.monotonic() - begun < 30


def test_a_cluster_is_for_workers():
    with pytest.raises(
        ValueError, match=r"engine\.cluster ray says where engine\.workers or .* are: give their number too"
    ):
        EngineOptions(cluster="ray")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"placed_servers": 2}, "give engine.cluster ray alone"),
        ({"placed_servers": 2, "cluster": "ray", "workers": 1}, "give engine.cluster ray alone"),
        ({"placed_servers": 2, "servers": ("http://a:1",)}, "placed_servers and engine.servers both say what samples"),
        ({"server_gpus": 1.0}, "of engine.placed_servers: give their number too"),
        ({"placed_servers": 1, "cluster": "ray", "server_cpus": -1}, "server_gpus are 0 or more, got 1, -1 and 0"),
    ],
)
def test_placed_servers_are_by_ray_alone(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        EngineOptions(**given)
