"""Servers are killed, stopped, restarted, slow, fail and cut answers short: what was asked is answered as if nothing had happened."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from served import KEY, app_of, engine_on, listening, requests, serving

from rolecall.errors import UserError
from rolecall.serving.app import App
from rolecall.serving.http import HttpError


@pytest.fixture(scope="module")
def healthy():
    with serving(app_of()) as url:
        yield url


@pytest.fixture(scope="module")
def process():
    """(its address, the process) of a `rolecall serve` of its own."""
    started = subprocess.Popen(
        [sys.executable, "-m", "rolecall", "serve", "tiny", "--port", "0"],
        env={**os.environ, "ROLECALL_SERVER_KEY": KEY},
        stdout=subprocess.PIPE,
        text=True,
    )
    yield started.stdout.readline().split(" on ")[1].strip(), started
    started.kill()
    started.wait()
    started.stdout.close()


class Once(App):
    """Does something else with the first generation that it is asked for."""

    fault, armed, asked = "500", False, 0

    async def _generate_several(self, request):
        self.asked += self.armed
        if self.armed and self.asked == 1:
            if self.fault == "500":
                raise HttpError(500, "the engine has an opinion")
            if self.fault == "slow":
                await asyncio.sleep(6)
            said = await super()._generate_several(request)
            if self.fault == "short":
                said["responses"][0]["choices"].pop()
            if self.fault == "garbled":
                said["responses"][0]["choices"][0]["token_ids"].append(1)
            return said
        return await super()._generate_several(request)


@pytest.mark.parametrize("fault", ["500", "slow", "short", "garbled"])
def test_a_request_that_fails_once_is_asked_again(fault):
    app, measured = app_of(kind=Once), {}
    app.fault = fault
    with serving(app) as url, engine_on(url, measured=measured, worker_deadline=3.0) as (engine, alone):
        app.armed = True
        assert engine.generate(requests()) == alone.generate(requests())
    assert app.asked >= 2
    assert measured["servers/lost"] >= 1


@contextlib.contextmanager
def cutting(url, *, after):
    """An address at which answers to generations come from `url`, one of them, once `cut` is empty, cut off after some
    bytes."""
    cut, port = [True], int(url.rpartition(":")[2])

    async def copy(reader, writer, watch):
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while piece := await reader.read(2**16):
                watch["asks"] = watch.get("asks") or b"/rolecall/v1/generate" in piece
                if watch["asks"] and watch["answers"] is reader and not cut:
                    cut.append(True)
                    writer.write(piece[:after])
                    await writer.drain()
                    break
                writer.write(piece)
                await writer.drain()

    async def connected(reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", port)
        watch = {"answers": there}
        await asyncio.gather(copy(reader, back, watch), copy(there, writer, watch))

    with listening(lambda: asyncio.start_server(connected, "127.0.0.1", 0)) as address:
        yield address, cut


@pytest.mark.parametrize("after", [0, 10, 200])
def test_an_answer_that_is_cut_off_is_asked_for_again(healthy, after):
    measured = {}
    with cutting(healthy, after=after) as (url, cut), engine_on(url, measured=measured) as (engine, alone):
        cut.clear()
        assert engine.generate(requests()) == alone.generate(requests())
        assert cut == [True]
    assert measured["servers/lost"] == 1


def test_a_server_that_is_restarted_gets_the_weights_again(healthy):
    """At the same address, with the weights that it began with, between two calls and without a word."""
    measured = {}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.ExitStack())
        url = first.enter_context(serving(app_of()))
        engine, alone = stack.enter_context(engine_on(url, measured=measured))
        assert engine.generate(requests()) == alone.generate(requests())
        first.close()
        stack.enter_context(serving(app_of(), port=int(url.rpartition(":")[2])))
        assert engine.generate(requests(step=1)) == alone.generate(requests(step=1))
    assert measured["servers/lost"] + measured.get("servers/stale", 0) >= 1


def test_when_all_stay_dead_the_run_may_be_tried_again_later():
    with contextlib.ExitStack() as stack:
        only = stack.enter_context(contextlib.ExitStack())
        url = only.enter_context(serving(app_of()))
        engine, _ = stack.enter_context(engine_on(url, server_patience=0.5))
        only.close()
        begun = time.monotonic()
        for _ in range(2):
            with pytest.raises(UserError, match=r"no server of engine.servers could be asked for 0.5 s") as raised:
                engine.generate(requests())
            assert raised.value.exit_code == 75
        assert time.monotonic() - begun < 10


def test_what_a_stopped_and_then_a_killed_process_was_asked_is_answered_by_another(healthy, process):
    """It is stopped before it is asked, so that it takes its prompts and is silent; killed while it answers."""
    url, server = process
    measured, asked = {}, requests(max_new_tokens=300, stop_ids=())
    with engine_on(healthy, url, measured=measured, worker_silence=3.0) as (engine, alone):
        expected = alone.generate(asked)
        os.kill(server.pid, signal.SIGSTOP)
        assert engine.generate(asked) == expected
        assert measured["servers/lost"] >= 1
        os.kill(server.pid, signal.SIGCONT)
        end = time.monotonic() + 60
        while not all(one.ready for one in engine.fleet.servers):
            assert time.monotonic() < end
            time.sleep(0.05)
        threading.Timer(0.1, server.kill).start()
        assert engine.generate(asked) == expected
        assert engine.generate(asked) == expected
        assert measured["servers/lost"] >= 2
