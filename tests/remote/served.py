"""Servers for tests: `rolecall serve`'s app behind real HTTP in a thread of this process, whole or with a fault planted in it."""

import asyncio
import contextlib
import threading
import time

from rolecall.jobs.models import fingerprint
from rolecall.policy.load import load
from rolecall.rollout.open import open_engine
from rolecall.serving.app import App
from rolecall.serving.http import HttpServer

KEY = "a-key"


def app_of(model="tiny", *, kind=App, about=None, **engine):
    """An app over an engine of its own."""
    loaded = load(model) if isinstance(model, str) else model
    said = {"version": "0", "engine": "native", "tokenizer": fingerprint(loaded)} | (about or {})
    return kind(loaded, open_engine(loaded, name="native", **engine), about=said)


@contextlib.contextmanager
def serving(handler, *, port=0):
    """The address at which an app, or anything that takes HTTP requests, is served while the block runs."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    found = {}

    async def listen():
        http = HttpServer(handler=handler, key=KEY, hosts=frozenset({"127.0.0.1"}), max_body=2**26, max_upload=2**27)
        found["server"] = await http.start("127.0.0.1", port)
        ready.set()

    def run():
        asyncio.set_event_loop(loop)
        loop.create_task(listen())
        loop.run_forever()
        found["server"].close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(10)
        yield f"http://127.0.0.1:{found['server'].sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        service = getattr(handler, "service", None)
        if service is not None:
            service.close()


def wait_until(true, seconds=10.0):
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
