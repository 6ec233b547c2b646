"""Reward functions that do what their answers tell them to, in every style, for the tests of the pool."""

import ctypes
import fcntl
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

leak = []
FORGED = {
    "count": b'{"values":9}',
    "types": b'{"at":0,"value":1,"extras":{},"metrics":[["a","b"]]}',
    "huge": b'{"at":0,"value":1' + b"0" * 400 + b',"extras":{},"metrics":[]}',
    "deep": b"[" * 100_000,
    "binary": b"\x80\x04}",
    "list": b"[]",
    "done": b'{"done":true}',
}


def act(text):
    """Score 1 for "ok", its value for a number, else misbehave as told."""
    match text.split():
        case ["ok"]:
            return 1.0
        case ["none"]:
            return None
        case ["hang"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)
        case ["backtrack"]:
            return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))
        case ["exit"]:
            os._exit(7)
        case ["segfault"]:
            ctypes.string_at(0)
        case ["bomb"]:
            while True:
                leak.append(bytearray(1 << 24))
        case ["raise"]:
            raise ValueError("no good")
        case ["quit"]:
            sys.exit(3)
        case ["recurse"]:
            return act(text)
        case ["text"]:
            return "1.0"
        case ["sleep", seconds]:
            time.sleep(float(seconds))
            return 1.0
        case ["once", marker]:
            if not Path(marker).exists():
                Path(marker).touch()
                os._exit(1)
            return 1.0
        case ["forge", body]:
            body = FORGED[body]
            for fd in range(3, 64):
                try:
                    socket.socket(fileno=os.dup(fd)).send(len(body).to_bytes(8, "big") + body)
                except OSError:
                    continue
            return 1.0
        case ["fork", marker]:
            if os.fork() == 0:
                with Path(marker).open("w") as held:
                    fcntl.flock(held, fcntl.LOCK_EX)
                    time.sleep(60)
            time.sleep(0.1)
            os._exit(1)
    return float(text)


def batch(completions, **kwargs):
    return [act(completion) for completion in completions]


def single(completion):
    return act(completion)


async def coroutine(completions, **kwargs):
    return batch(completions)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": act(solution_str), "source": data_source, "right": solution_str == ground_truth}


def one_too_few(completions, **kwargs):
    return [0.0] * (len(completions) - 1)


def nothing(completions, **kwargs):
    return None


def mean_removed(completions, **kwargs):
    scores = batch(completions)
    return [score - sum(scores) / len(scores) for score in scores]


def not_a_reward(x, y):
    return [0.0]


not_callable = 3
