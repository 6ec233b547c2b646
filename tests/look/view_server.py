"""`rolecall view` as its users start it, requests to it as they come over the wire, and runs written by hand."""

import http.client
import json
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

CALL = [sys.executable, "-m", "rolecall"]


@contextmanager
def viewing(runs: Path):
    """A server over these runs, in a process of its own."""
    server = subprocess.Popen([*CALL, "view", str(runs), "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        yield Server(server)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=20) == 0, "Ctrl-C is how one ends it"
        server.stdout.close()


class Server:
    def __init__(self, process: subprocess.Popen) -> None:
        self.pid = process.pid
        self.said = process.stdout.readline()
        self.port, self.path, self.token = re.search(r"127\.0\.0\.1:(\d+)(/[^?]*)\?token=(\S+)", self.said).groups()
        self.base = f"http://127.0.0.1:{self.port}"
        self.host = f"127.0.0.1:{self.port}"
        self.cookie = f"rolecall-view-{self.port}={self.token}"

    def ask(self, path: str, method: str = "GET", *, known: bool = True, **headers: str):
        """(status, headers, body) of one request, sent as it stands; `known` has the cookie."""
        connection = http.client.HTTPConnection("127.0.0.1", int(self.port), timeout=20)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        given = {"host": self.host, **({"cookie": self.cookie} if known else {}), **headers}
        for name, value in given.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, answer.headers, body

    @contextmanager
    def stream(self, path: str):
        """The lines of a stream of events, as they come."""
        connection = http.client.HTTPConnection("127.0.0.1", int(self.port), timeout=20)
        connection.request("GET", path, headers={"host": self.host, "cookie": self.cookie})
        try:
            yield (line.decode().strip() for line in connection.getresponse())
        finally:
            connection.close()

    def json(self, path: str):
        status, _, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)


def write_run(path: Path, *, steps: int = 5, of: int | None = None, command: str = "rl", **config: object) -> Path:
    """A run's files, as a command leaves them."""
    path.mkdir(parents=True)
    about = {"format": 1, "command": command, "arguments": [command], "seed": 0, "versions": {"rolecall": "0.1.0"}}
    (path / "run.json").write_text(json.dumps(about))
    held = {
        "model": "tiny",
        "rows": "sorting",
        "steps": of or steps,
        "seed": 0,
        "algorithm": {"name": "grpo"},
        **config,
    }
    (path / "config.json").write_text(json.dumps(held))
    (path / "metrics.jsonl").write_text("".join(line(i) for i in range(1, steps + 1)))
    return path


def line(step: int, **numbers: float) -> str:
    """A line of the metrics."""
    return json.dumps({"step": step, "reward": step / 10, "entropy": 1.5 - step / 100, **numbers}) + "\n"


def append(run: Path, *lines: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(lines))
