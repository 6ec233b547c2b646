"""A model behind vLLM: started in an environment of its own, watched, and ended with this process."""

import errno
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from urllib.error import URLError
from urllib.request import urlopen

from rolecall.config.use import ServeOptions, server_key
from rolecall.errors import UserError
from rolecall.jobs.models import model_directory, open_model
from rolecall.jobs.serve import LOOPBACK, Serving
from rolecall.policy.load import cache_root, reading, save
from rolecall.serving.vllm import VERSION, Launch, vllm_python

_START_SECONDS = 1800.0
_END_SECONDS = 20.0
_PROCESS = re.compile(r"^\(.*? pid=\d+\) (ERROR .*?\] )?")
"""What a line of its log begins with."""


def run(options: ServeOptions, ready: Callable[[Serving], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; `ready` is called when the server answers."""
    given = server_key()
    with tempfile.TemporaryDirectory(prefix="rolecall-vllm-") as scratch:
        launch = Launch(
            python=vllm_python(options.vllm_python),
            directory=_readable(options, Path(scratch) / "model"),
            name=options.model,
            dtype=options.engine.dtype or options.dtype,
            host=options.host,
            port=_free_port(options),
            key=given or secrets.token_urlsafe(24),
            hosts=options.hosts,
            max_rows=options.engine.max_rows,
            trust_remote_code=options.policy.trust_remote_code,
            extra=shlex.split(options.vllm_args),
        )
        log = cache_root() / f"vllm-{launch.port}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                launch.command(),
                env=launch.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {which: signal.signal(which, _raise) for which in signals}
        try:
            host = f"[{launch.host}]" if ":" in launch.host else launch.host
            url = f"http://{host}:{launch.port}"
            _wait_until_up(process, url, log)
            ready(
                Serving(
                    model=options.model,
                    engine=f"vllm {VERSION}" if options.vllm_python is None else "vllm",
                    dtype=launch.dtype,
                    url=url,
                    key=launch.key,
                    own_key=given is None,
                    loopback=options.host in LOOPBACK,
                )
            )
            process.wait()
            raise UserError(f"vLLM ended with status {process.returncode}: {_last_words(log)}", exit_code=1)
        except _Ended:
            pass
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)
            _end(process)


class _Ended(Exception):
    """SIGTERM or Ctrl-C."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise _Ended


def _readable(options: ServeOptions, scratch: Path) -> str:
    """What vLLM can read: a model directory or a hub id as they are; everything else is written out first."""
    name = model_directory(options.model)
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return str(path.resolve())
    if name == "tiny" or path.exists():  # a .gguf file, an adapter's directory
        save(open_model(options.model, dtype=options.dtype, **reading(options.policy)), scratch)
    else:
        return name
    return str(scratch)


def _free_port(options: ServeOptions) -> int:
    """The port, or a free one for 0."""
    where = f"{options.host} port {options.port}"
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, options.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"{where} is taken by another program: give another --port, or 0 for any") from error
            raise UserError(f"cannot listen on {where}: {error.strerror or error}") from error
        return int(probe.getsockname()[1])


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    begun = time.monotonic()
    while True:
        if process.poll() is not None:
            raise UserError(f"vLLM did not start (status {process.returncode}): {_last_words(log)}", exit_code=1)
        if time.monotonic() - begun > _START_SECONDS:
            raise UserError(f"vLLM did not answer within {_START_SECONDS:g} s: {_last_words(log)}", exit_code=1)
        with suppress(URLError, OSError), urlopen(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)


def _last_words(log: Path) -> str:
    """The error that its log ends with, without the name of the process, and where the rest is. An engine that died is only
    reported by others, so what it said itself comes first."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*Error\b: ", line)]
    own = [line for line in errors if line.startswith("(EngineCore")]
    last = (own or errors or lines or ["it said nothing"])[-1]
    return f"{_PROCESS.sub('', last)[:300]} (its output is in {log})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End vLLM's processes: they are one session of their own."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
