"""Servers for tests: `rolecall serve`'s app behind real HTTP in a thread of this process, whole or with a fault planted in it."""

import asyncio
import contextlib
import functools
import threading

import torch

import rolecall
from rolecall.config.parts import EngineOptions
from rolecall.jobs.models import fingerprint, sampler
from rolecall.policy.load import load
from rolecall.rollout.open import open_engine
from rolecall.serving.app import App
from rolecall.serving.http import HttpServer
from rolecall.types import Request, Sampling

KEY = "a-key"


def app_of(model="tiny", *, kind=App, about=None, **engine):
    """An app over an engine of its own."""
    loaded = load(model) if isinstance(model, str) else model
    said = {"version": rolecall.__version__, "engine": "native", "tokenizer": fingerprint(loaded)} | (about or {})
    made = functools.partial(open_engine, loaded, name="native", **engine)
    return kind(loaded, made(), about=said, another=made)


@contextlib.contextmanager
def listening(start):
    """The address of the server that the coroutine `start` returns, which runs in a thread of its own while the block runs."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []

    async def listen():
        found.append(await start())
        ready.set()

    def run():
        asyncio.set_event_loop(loop)
        first = loop.create_task(listen())
        loop.run_forever()
        found[0].close()
        under_way = asyncio.all_tasks(loop) | {first}
        for task in under_way:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*under_way, return_exceptions=True))
        loop.run_until_complete(asyncio.sleep(0.05))  # what these closed is gone only some turns of the loop later
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(10)
        yield f"http://127.0.0.1:{found[0].sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@contextlib.contextmanager
def serving(app, *, port=0):
    """The address at which an app is served while the block runs."""
    hosts = frozenset({"127.0.0.1"})
    http = HttpServer(handler=app, key=KEY, hosts=hosts, max_body=2**26, max_upload=2**27)
    try:
        with listening(lambda: http.start("127.0.0.1", port)) as url:
            yield url
    finally:
        app.close()


class Options:
    """As much of a command's options as an engine is made from."""

    def __init__(self, *urls, max_new_tokens=12, **engine):
        self.engine = EngineOptions(servers=urls, **{"worker_silence": 10.0} | engine)
        self.sampling = Sampling(max_new_tokens=max_new_tokens)
        self.policy = type("Policy", (), {"mixed_precision": "no"})


def requests(count=5, *, step=0, **sampling):
    """Prompts of different lengths, three answers each."""
    settings = Sampling(**{"max_new_tokens": 12} | sampling)
    return [
        Request(
            prompt_ids=tuple(range(65, 70 + i)), sampling=settings, n=3, prompt=i, seed=5, step=step, first_sample=2
        )
        for i in range(count)
    ]


@contextlib.contextmanager
def engine_on(*urls, measured=None, **engine):
    """(an engine over servers with weights of version 3, other than those they began with; one in this process with the same)."""
    loaded = load("tiny")
    made = sampler(loaded, Options(*urls, **engine))
    try:
        if measured is not None:
            made._tell = lambda name, value: measured.update({name: measured.get(name, 0) + value})
        alone = open_engine(loaded, name="native")
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                parameter.mul_(1.1)
        for one in (made, alone):
            one.load(dict(loaded.model.named_parameters()), 3)
        yield made, alone
    finally:
        made.close()
