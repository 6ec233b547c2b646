"""Servers that tests start."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def serving(*words: str) -> Iterator[int]:
    """A Python program that serves on the port it is given last, until the end of the block."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = subprocess.Popen([sys.executable, *words, str(port)])
    try:
        end = time.monotonic() + 120
        while server.poll() is None and time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        assert server.poll() is None, "the server ended"
        yield port
    finally:
        server.kill()
        server.wait()
