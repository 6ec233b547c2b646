"""Workers behind a host: the pool notices no difference, and neither end outlives the other."""

import socket

import psutil
import pytest

from rolecall.rewards.pool import RewardPool
from rolecall.rewards.records import Sample
from rolecall.workers.hosts import Host, WorkerHost

REWARD = """
import os, time
def digits(completion_text):
    print("scored", completion_text, os.getppid() > 0)
    if completion_text == "hang":
        time.sleep(600)
    if completion_text == "die":
        os._exit(7)
    return float(len(completion_text))
"""


@pytest.fixture
def host():
    made = WorkerHost("127.0.0.1")
    yield made.where()
    made.close()


@pytest.fixture
def reward(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(REWARD)
    return f"{path}:digits"


def samples(*texts):
    return [
        Sample(prompt="p", completion=text, completion_ids=(1,), row={"prompt": "p"}, prompt_index=0, sample_index=i)
        for i, text in enumerate(texts)
    ]


def test_what_a_worker_elsewhere_says_is_what_one_here_says(host, reward, caplog):
    asked = samples("a", "bb", "ccc")
    with RewardPool(reward, workers=2) as here, RewardPool(reward, workers=2, hosts=[host]) as there:
        assert there.score(asked) == here.score(asked)
        assert [s.total for s in there.score(asked)] == [1.0, 2.0, 3.0]
    assert "printed: scored ccc" in caplog.text


def test_one_that_dies_or_hangs_is_replaced_and_only_its_sample_fails(host, reward):
    with RewardPool(reward, workers=2, deadline_s=4.0, hosts=[host]) as there:
        found = there.score(samples("a", "die", "hang", "dd"))
    assert [s.total for s in found] == [1.0, None, None, 2.0]
    assert "exit code 7" in found[1].failure
    assert "no answer within 4 s; it was killed" in found[2].failure


def test_a_host_that_is_gone_is_passed_over(host, reward):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = Host(address="127.0.0.1", port=free.getsockname()[1], token="x")
    with RewardPool(reward, workers=2, hosts=[gone, host]) as there:
        assert [s.total for s in there.score(samples("a", "bb"))] == [1.0, 2.0]


def test_who_does_not_know_the_token_starts_nothing(host):
    with socket.create_connection((host.address, host.port)) as stranger:
        stranger.sendall(b'{"token": "guess", "module": "os"}\n')
        stranger.settimeout(30)
        assert stranger.recv(1) == b""


def test_a_worker_ends_with_its_pool(host, reward):
    """The host runs in this process, so relay and worker are both its children."""
    before = set(psutil.Process().children(recursive=True))
    with RewardPool(reward, workers=1, hosts=[host]) as there:
        assert [s.total for s in there.score(samples("a"))] == [1.0]
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) >= 2
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
