"""Who is noticed to be lost, when, and what this rank does then; with a store that says what the test wants."""

import socket
import threading
import time

import pytest

from rolecall.errors import UserError
from rolecall.train import peers as peers_module
from rolecall.train.peers import PeerLost, Peers

TIMEOUT = 0.25  # five rounds
COLLECTIVE = RuntimeError("[/gloo/transport/tcp/pair.cc] connection closed by peer")


class Store(dict):
    """What the processes of a job share. `script` is what is heard of the others, round by round; its last entry stays."""

    def __init__(self, *script):
        super().__init__()
        self.script, self.rounds, self.answers = script, 0, threading.Event()
        self.answers.set()

    def clone(self):
        return self

    def set(self, key, value):
        self[key] = value

    def get(self, key):
        return str.encode(self[key]) if isinstance(self[key], str) else self[key]

    def check(self, keys):
        return all(key in self for key in keys)

    def multi_get(self, keys):
        self.answers.wait()
        heard = self.script[min(self.rounds, len(self.script) - 1)]
        self.rounds += 1
        return [b"own", *(str(word).encode() for word in heard)]


@pytest.fixture
def job(monkeypatch):
    """Makes ranks of one job on a store, and ends their threads."""
    made, exits = [], []

    def leave_at_once(code):
        exits.append(code)
        made[-1].close()

    monkeypatch.setattr(peers_module.os, "_exit", leave_at_once)

    def rank(store, number=0, ranks=2, timeout=TIMEOUT, **options):
        monkeypatch.setattr(peers_module.dist.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(Peers, "_jobs", 0)
        made.append(Peers(rank=number, ranks=ranks, timeout=timeout, **options))
        made[-1].exits = exits
        return made[-1]

    yield rank
    for one in made:
        one.close()


def watched(peers, *, until, rounds=40):
    """Watch until something holds."""
    peers.watch()
    for _ in range(10 * rounds):
        if until():
            return
        time.sleep(TIMEOUT / 50)
    raise AssertionError(f"did not happen: {peers.lost}")


def test_a_rank_that_is_silent_for_the_whole_timeout_is_lost_and_waiting_ends(job):
    ours, theirs = socket.socketpair()
    told = []
    peers = job(Store(["4"]), sockets=frozenset({ours.fileno()}))
    peers.on_loss = lambda: told.append(peers.lost)
    watched(peers, until=lambda: told)
    assert told[0] == "rank 1 has given no sign of life for 0.25 s (rank_timeout)"
    assert peers.lost_code is None
    theirs.settimeout(5)
    assert theirs.recv(1) == b"", "whoever waits for the other rank comes back"
    assert peers.why(ValueError("of something else")) == told[0]
    ours.close()
    theirs.close()


def test_a_rank_that_is_silent_for_a_round_less_is_not_lost(job):
    rounds = [[str(number)] for number in range(4) for _ in range(5)]  # heard anew, then four times the same
    store = Store(*rounds, ["left 0 done"])
    peers = job(store)
    watched(peers, until=lambda: peers.lost)
    assert store.rounds == len(rounds) + 1
    assert peers.lost == "rank 1 ended with exit code 0 (done)"


def test_a_rank_that_leaves_a_word_is_lost_at_once_with_its_exit_code(job):
    store = Store(["1", "1"], ["2", "left 143 stopped after step 3"])
    peers = job(store, ranks=3)
    watched(peers, until=lambda: peers.lost)
    assert (peers.lost, peers.lost_code) == ("rank 2 ended with exit code 143 (stopped after step 3)", 143)
    assert store.rounds == 2


def test_a_store_that_does_not_answer_is_lost_after_the_timeout_and_not_before(job):
    peers = job(Store(["1"], ["2"]), number=1)
    watched(peers, until=lambda: peers._store.rounds)
    peers._store.answers.clear()
    begun = time.monotonic()
    watched(peers, until=lambda: peers.lost)
    assert peers.lost == "rank 0 has not answered for 0.25 s (rank_timeout)"
    assert time.monotonic() - begun >= TIMEOUT - 2 * peers.interval
    peers._store.answers.set()


def test_a_store_that_is_gone_is_lost_at_once(job, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    peers = job(Store())  # has nothing to say: an error
    watched(peers, until=lambda: peers.lost)
    assert peers.lost == "the launcher is gone"


def test_a_process_that_does_not_come_back_to_save_is_ended(job, capsys):
    peers = job(Store(["left 1 broken"]))
    watched(peers, until=lambda: peers.exits)
    assert peers.exits == [75]
    assert capsys.readouterr().err == (
        "rolecall: rank 1 ended with exit code 1 (broken); this process did not come back to save, the last checkpoint "
        "stands\n"
    )


@pytest.mark.parametrize("how", ["why", "leave", "close"])
def test_a_process_that_comes_back_is_not_ended(job, how):
    peers = job(Store(["left 1 broken"]))
    watched(peers, until=lambda: peers.lost)
    if how == "why":
        assert peers.why(ValueError("of something else")) == peers.lost
    elif how == "leave":
        peers.leave(75, "a peer is lost")
    else:
        peers.close()
    time.sleep(2 * TIMEOUT)
    assert peers.exits == []


def test_who_is_gone_when_a_connection_breaks(job):
    silent = Store(*([str(number), "7"] for number in range(50)))
    peers = job(silent, ranks=3, timeout=1.0)
    watched(peers, until=lambda: silent.rounds == 2)
    assert peers.why(ValueError("of something else")) is None, "no peer is to blame"
    assert peers.why(COLLECTIVE) == "rank 2 is gone (its connection closed)"
    all_there = Store(*([str(number), str(number)] for number in range(50)))
    peers = job(all_there, ranks=3)
    watched(peers, until=lambda: all_there.rounds)
    assert peers.why(COLLECTIVE) == "a peer is gone (its connection closed)"
    speaks = Store(["1", "1"], ["left 3 diverged", "2"])
    peers = job(speaks, ranks=3)
    peers.watch()
    assert peers.why(COLLECTIVE) == "rank 1 ended with exit code 3 (diverged)"


def test_whoever_leaves_says_so_and_loses_nobody_afterwards(job):
    store = Store(["1"])
    peers = job(store)
    peers.watch()
    peers.leave(3, "diverged:\n  a weight")
    assert store[peers._keys[0]] == b"left 3 diverged: a weight"
    time.sleep(2 * TIMEOUT)
    assert peers.lost is None


def test_a_job_that_is_over_loses_nobody(job):
    peers = job(Store(["1"]))
    peers.watch()
    peers.close()
    time.sleep(2 * TIMEOUT)
    assert peers.lost is None


def started(job, *settings):
    """What each rank says to its settings."""
    store, said = Store(), {}
    ranks = [job(store, number, ranks=len(settings)) for number in range(len(settings))]

    def check(peers, given):
        try:
            peers.check_same(given)
        except UserError as error:
            said[peers.rank] = str(error)

    threads = [threading.Thread(target=check, args=pair) for pair in zip(ranks, settings, strict=True) if pair[1]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_ranks_that_were_started_differently_are_refused_by_all_of_them(job):
    same = {"seed": 1, "train": {"lr": 0.1}}
    assert started(job, same, same, same) == {}
    said = started(job, same, same, {"seed": 2, "train": {"lr": 0.1}})
    one = "the processes of this job were started differently: seed is 1 on rank 0 and 2 on rank 2; start all of them alike"
    assert said == {0: one, 1: one, 2: one}
    many = started(job, {f"o{i}": 0 for i in range(7)}, {f"o{i}": 1 for i in range(7)})[0]
    assert "; o4 is 0 on rank 0 and 1 on rank 1; and 2 more; start" in many
    missing = started(job, same, None)[0]
    assert missing == "rank 1 has not come within 0.25 s (rank_timeout)"


def test_a_job_of_one_process_has_no_peers():
    peers = Peers()
    peers.check_same({"seed": 1})
    peers.watch()
    peers.leave(1, "why")
    assert peers.why(COLLECTIVE) is None
    assert PeerLost("gone").exit_code == 75
