"""Rewards that try what a worker must not do, or what any honest one may; the answer says what. Imports nothing heavy."""

import fcntl
import http.client
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def act(completion):
    what, _, given = completion.partition(" ")
    return globals()[what](given)


def environment(name):
    return float(name in os.environ)


def needs(name):
    return float(os.environ[name])


def opens(path):
    with Path(path).open("rb"):
        return 1.0


def connects(address):
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5):
        return 1.0


def sends_out(address):
    """Another program that connects."""
    host, _, port = address.rpartition(":")
    code = f"import socket; socket.create_connection(({host!r}, {port}), 5)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0)


def signals(pid):
    os.kill(int(pid), 0)
    return 1.0


def swallows(address):
    try:
        return connects(address)
    except OSError:
        return 0.5


def listens(path):
    server = socket.create_server(("0.0.0.0", 0))
    Path(path).write_text(str(server.getsockname()[1]))
    time.sleep(0.3)
    return 1.0


def orphans(path):
    """A process in a session of its own, whose parent is gone, that holds a lock as long as it lives."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with Path(path).open("w") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                held.write("mine")
                held.flush()
                time.sleep(1000)
        os._exit(0)
    os.wait()
    while not (Path(path).exists() and Path(path).read_text()):
        time.sleep(0.01)
    return 1.0


def forks(most):
    """How many processes there can be at a time, up to `most`."""
    children = []
    try:
        for _ in range(int(most)):
            child = os.fork()
            if child == 0:
                time.sleep(1000)
            children.append(child)
    except OSError:
        pass
    return float(len(children))


def sends(megabytes):
    return {"score": 1.0, "text": "a" * (int(megabytes) << 20)}


def floods(megabytes):
    """Past the worker's own check: frames on every socket there is."""
    for fd in range(3, 64):
        try:
            channel = socket.socket(fileno=os.dup(fd))
            channel.sendall((int(megabytes) << 20).to_bytes(8, "big"))
            for _ in range(int(megabytes)):
                channel.sendall(bytes(1 << 20))
        except OSError:
            continue
    return 1.0


def prints(text):
    sys.stdout.write(text.encode().decode("unicode_escape") + "\n")
    os.system("printf '\\033]0;title\\007\\n' >&2")
    return 1.0


def chatters(lines):
    for i in range(int(lines)):
        sys.stdout.write(f"line {i}\n")
    return 1.0


def runs_tests(_):
    with tempfile.TemporaryDirectory() as place:
        Path(place, "test_it.py").write_text("def test_it(tmp_path):\n    (tmp_path / 'a').write_text('b')\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", place]
        quick = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return float(subprocess.run(command, capture_output=True, cwd=place, env=quick).returncode == 0)


def reads_here(name):
    return float(Path(name).read_text())


def imports_here(name):
    return float(__import__(name).VALUE)


def shares_work(_):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        return float(sum(pool.map(abs, range(10))))


def asks_judge(port):
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=5)
    connection.request("GET", "/")
    return float(connection.getresponse().read())


def serves_itself(_):
    """A server of its own on its own loopback device."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connects(f"127.0.0.1:{server.getsockname()[1]}")
    return 1.0


class Env:
    """An environment that does the same in its first step."""

    def reset(self, row, seed):
        return "go"

    def step(self, message):
        from rolecall.tasks.env import Step

        return Step(messages=str(act(message["content"])), done=True)
