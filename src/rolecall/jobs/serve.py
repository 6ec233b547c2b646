"""A model behind HTTP, tokens in and out: our own engine, or vLLM."""

import asyncio
import errno
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import rolecall
from rolecall.config.use import ServeOptions, server_key
from rolecall.errors import UserError
from rolecall.jobs.models import engine_dtype, fingerprint, open_model
from rolecall.policy.load import LoadedModel, reading
from rolecall.rollout.engine import LocalEngine
from rolecall.rollout.native import NativeEngine
from rolecall.rollout.open import open_engine
from rolecall.serving.app import App
from rolecall.serving.http import HttpServer

_MAX_BODY = 64 * 2**20
LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine reaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """A server that listens."""

    model: str
    engine: str
    dtype: str
    url: str
    key: str
    own_key: bool
    """True: the key was made here, so the caller must be told."""
    loopback: bool


def run(options: ServeOptions, ready: Callable[[Serving], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; `ready` is called when the server listens."""
    if options.vllm:
        from rolecall.jobs.serve_vllm import run as run_vllm

        run_vllm(options, ready)
        return
    loaded = open_model(options.model, dtype=options.dtype, **reading(options.policy))

    def made() -> LocalEngine:
        how = options.engine
        engine = open_engine(loaded, name=how.name, dtype=engine_dtype(options), max_rows=how.max_rows)
        assert isinstance(engine, LocalEngine)
        return engine

    asyncio.run(_serve(options, loaded, made, ready))


async def _serve(
    options: ServeOptions, loaded: LoadedModel, made: Callable[[], LocalEngine], ready: Callable[[Serving], None]
) -> None:
    engine = made()
    name = "native" if isinstance(engine, NativeEngine) else "hf"
    given = server_key()
    key = given or secrets.token_urlsafe(24)
    about = {"version": rolecall.__version__, "engine": name, "tokenizer": fingerprint(loaded)}
    app = App(loaded, engine, about=about, another=made)
    http = HttpServer(
        handler=app,
        key=key,
        hosts=frozenset({*LOOPBACK, options.host, *options.hosts}),
        max_body=_MAX_BODY,
        max_upload=_MAX_BODY + 8 * sum(p.numel() for p in loaded.model.parameters()),
    )
    stop = asyncio.Event()
    for which in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(which, stop.set)
    try:
        server = await _listen(http, options)
        host, port = server.sockets[0].getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        dtype = str(engine.dtype).removeprefix("torch.")
        ready(
            Serving(
                model=loaded.name,
                engine=name,
                dtype=dtype,
                url=url,
                key=key,
                own_key=given is None,
                loopback=options.host in LOOPBACK,
            )
        )
        await stop.wait()
        server.close()
    finally:
        app.close()


async def _listen(http: HttpServer, options: ServeOptions) -> asyncio.Server:
    where = f"{options.host} port {options.port}"
    try:
        return await http.start(options.host, options.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"{where} is taken by another program: give another --port, or 0 for any") from error
        raise UserError(f"cannot listen on {where}: {error.strerror or error}") from error


def serve(options: ServeOptions | None = None, /, **settings: Any) -> None:
    """Serve a model until SIGTERM or Ctrl-C: `serve(model="tiny", port=0)`. Takes the options of `rolecall serve`."""
    from rolecall.jobs.arguments import options_of

    run(options_of(ServeOptions, settings) if options is None else options, lambda serving: None)
