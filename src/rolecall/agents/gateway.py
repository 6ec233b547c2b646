"""An OpenAI-compatible endpoint for programs that play episodes, each with a key of its own.

It listens on a socket of the file system in a directory of its own; workers pass on to it what arrives at their loopback
address. It runs in a thread, and samples by the engine's service. An episode's calls are kept in its `Transcript`.
"""

import asyncio
import hmac
import json
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from rolecall.agents.chat_api import (
    CHAT,
    COMPLETION,
    Answer,
    ChatBody,
    CompletionBody,
    Stream,
    answer_id,
    call_marks,
    checked_messages,
    checked_tools,
    read_answer,
    whole,
)
from rolecall.agents.conversation import Dialect
from rolecall.agents.transcript import Call, Transcript
from rolecall.config.agents import AgentOptions
from rolecall.rollout.service import Service, ServiceClosedError
from rolecall.serving.dialect import read
from rolecall.serving.http import Events, HttpError, HttpRequest, HttpServer
from rolecall.types import Completion, Finish, Request, Sampling

_log = logging.getLogger("rolecall.agents")

_MAX_BODY = 8 * 2**20


@dataclass(slots=True, eq=False)
class Session:
    """An episode as the endpoint sees it."""

    dialect: Dialect
    sampling: Sampling
    request: Callable[[int, tuple[int, ...], Sampling], Request]
    """What to ask the engine for: of which sample, after which ids, drawn how."""
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    transcript: Transcript = field(default_factory=Transcript)
    counts: dict[str, float] = field(default_factory=dict)
    finish: Finish | None = None
    """The limit that it ran into."""
    refused: Finish | None = None
    """The limit that the last call ran into; None: it was answered."""
    refusal: str | None = None
    """Why a call was last refused."""
    over: bool = False
    since: float = field(default_factory=monotonic)
    """When the last answer was given."""
    tasks: "set[asyncio.Task[Any]]" = field(default_factory=set)
    """Calls that are being answered."""
    streams: "set[asyncio.Task[Answer]]" = field(default_factory=set)
    """Those of them that are streamed: they are drawn to their end, however much of one is read."""

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a count."""
        self.counts[name] = self.counts.get(name, 0.0) + value

    @property
    def waited(self) -> float:
        """Seconds that the program has let pass since its last answer; 0 while one is being sampled."""
        return 0.0 if self.tasks else monotonic() - self.since


class Gateway:
    """The endpoint. One thread answers; `open` and `close` are called from another."""

    def __init__(self, path: Path, options: AgentOptions, *, context_length: int, model: str) -> None:
        """`path` is that of the socket."""
        self.options, self.limit, self.model = options, context_length, model
        self.sessions: list[Session] = []
        self.service: Service | None = None
        """Samples, while episodes are played."""
        self.path = path
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rolecall-gateway", daemon=True)
        self._thread.start()
        self._server = self._do(self._listen())

    def open(self, sessions: list[Session], service: Service) -> None:
        """Let these episodes in; earlier ones are forgotten."""
        self.sessions, self.service = sessions, service

    def end(self, session: Session, *, streams: bool = True) -> None:
        """Answer no more calls of an episode, and give up those that are being answered; without `streams`, not those that
        are streamed."""
        self._do(self._end(session, streams=streams))

    def settle(self, session: Session) -> None:
        """Wait for the streams of an episode, which may have ended before them."""
        self._do(_ended(session.streams))

    @property
    def closed(self) -> bool:
        """Whether it listens no more."""
        return self._loop.is_closed()

    def close(self) -> None:
        if self.closed:
            return
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> asyncio.Server:
        http = HttpServer(
            handler=self._answer,
            key="",
            hosts=frozenset({"127.0.0.1", "localhost"}),
            max_body=_MAX_BODY,
            max_upload=0,
            open_paths=frozenset(),
            admit=self._admit,
        )
        return await http.start_unix(str(self.path))

    async def _stop(self) -> None:
        self._server.close()
        for session in self.sessions:
            await self._end(session, streams=True)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the connections are closed by then

    async def _end(self, session: Session, *, streams: bool) -> None:
        session.over = True
        tasks = session.tasks if streams else session.tasks - session.streams
        for task in tasks:
            task.cancel()
        await _ended(tasks)

    def _session(self, path: str) -> tuple[Session, str]:
        """The episode that a path is of, and the rest of the path."""
        number, _, rest = path.removeprefix("/").partition("/")
        if not (number.isascii() and number.isdigit() and len(number) < 10 and int(number) < len(self.sessions)):
            raise HttpError(404, f"there is no {path[:100]} here: use the address that the program was given")
        return self.sessions[int(number)], f"/{rest}"

    def _admit(self, path: str, key: str) -> None:
        session, _ = self._session(path)
        if not hmac.compare_digest(key.encode(), session.key.encode()):
            session.refusal = "the key was not this episode's"
            other = any(hmac.compare_digest(key.encode(), s.key.encode()) for s in self.sessions)
            session.count("refused_calls")
            if other:
                raise HttpError(403, "this is the key of another episode: use the one that this program was given")
            raise HttpError(401, "the key is missing or not of this episode: send `Authorization: Bearer KEY`")
        if session.over:
            raise HttpError(410, "the episode is over: its program has ended, or was ended")

    async def _answer(self, request: HttpRequest) -> Any:
        session, path = self._session(request.path)
        if request.method == "GET" and path == "/v1/models":
            model = {"id": self.model, "object": "model", "created": 0, "owned_by": "rolecall"}
            return {"object": "list", "data": [model]}
        if path not in ("/v1/chat/completions", "/v1/completions") or request.method != "POST":
            raise HttpError(404, f"there is no {request.method} {path[:100]} here")
        task = asyncio.current_task()
        assert task is not None
        session.tasks.add(task)
        try:
            chat = path == "/v1/chat/completions"
            body = read(CHAT, request.body) if chat else read(COMPLETION, request.body)
            return await self._complete(session, body)
        except (HttpError, ValueError) as error:
            session.count("refused_calls")
            session.refusal = str(error)
            raise error if isinstance(error, HttpError) else HttpError(400, str(error)) from error
        finally:
            session.tasks.discard(task)

    async def _complete(self, session: Session, body: ChatBody | CompletionBody) -> Any:
        body.check(session.sampling)
        if session.over:
            raise HttpError(410, "the episode is over: its program has ended, or was ended")
        tools = checked_tools(body.tools or []) if isinstance(body, ChatBody) and body.tool_choice != "none" else []
        call = self._ask(session, body, tools)
        try:
            request = self._request(session, call, body)
        except Exception:
            session.transcript.give_up(call)
            raise
        if body.stream:
            return self._streamed(session, body, call, request, tools)
        return whole(body, await self._answered(session, call, request, tools))

    def _streamed(
        self,
        session: Session,
        body: ChatBody | CompletionBody,
        call: Call,
        request: Request,
        tools: list[dict[str, Any]],
    ) -> Events:
        """The answer as it is drawn, by a task of its own: what is drawn does not depend on how far the client reads."""
        drawn: asyncio.Queue[tuple[int, float] | None] = asyncio.Queue()

        def heard(token: int, logprob: float) -> None:  # on the engine's thread
            self._loop.call_soon_threadsafe(drawn.put_nowait, (token, logprob))

        def done(task: "asyncio.Task[Answer]") -> None:
            session.tasks.discard(task)
            session.streams.discard(task)
            drawn.put_nowait(None)
            if not task.cancelled() and (error := task.exception()) is not None:
                session.count("refused_calls")
                session.refusal = str(error)

        task = asyncio.create_task(self._answered(session, call, request, tools, heard))
        session.tasks.add(task)
        session.streams.add(task)
        task.add_done_callback(done)
        stream = Stream(
            body,
            answer_id(request),
            tokenizer=session.dialect.tokenizer,
            marks=call_marks(tools),
            stops=request.sampling.stop_strings,
        )

        async def lines() -> AsyncIterator[str]:
            for line in stream.begin():
                yield line
            while (token := await drawn.get()) is not None:
                for line in stream.add(*token):
                    yield line
            try:
                answer = task.result()
            except (asyncio.CancelledError, Exception) as error:
                yield json.dumps({"error": {"message": str(error) or "the answer was given up", "code": 503}})
                return
            for line in stream.end(answer):
                yield line

        return Events(data=lines(), sent=partial(_note_sent, session))

    async def _answered(
        self,
        session: Session,
        call: Call,
        request: Request,
        tools: list[dict[str, Any]],
        heard: Callable[[int, float], None] | None = None,
    ) -> Answer:
        """Draw the answer to a call, and keep it."""
        try:
            completion = await self._sampled(request, heard)
        except (asyncio.CancelledError, Exception) as error:
            session.transcript.give_up(call)
            if isinstance(error, asyncio.CancelledError | CancelledError):
                session.count("aborted_calls")
            raise
        tokenizer = session.dialect.tokenizer
        answer = read_answer(
            _without_stop(session.dialect.text(completion), request.sampling.stop_strings, completion),
            completion,
            pieces=[str(tokenizer.decode([i])) for i in completion.ids],
            tools=tools,
            request=request,
        )
        session.transcript.answer(call, completion, answer.api)
        session.since, session.refused = monotonic(), None
        session.count("turns")
        if answer.bad_calls:
            session.count("bad_tool_calls", answer.bad_calls)
        if completion.finish is Finish.LENGTH:
            session.count("cut_turns")
        if call.why is not None:
            session.count(call.why)
        return answer

    def _ask(self, session: Session, body: ChatBody | CompletionBody, tools: list[dict[str, Any]]) -> Call:
        """What the policy reads; nothing is drawn yet."""
        if session.counts.get("turns", 0) + len(session.tasks) > self.options.max_turns:
            session.finish = session.refused = Finish.MAX_TURNS
            raise HttpError(400, f"the episode has had its {self.options.max_turns} turns (agent.max_turns)")
        dialect = session.dialect
        try:
            if isinstance(body, CompletionBody):
                return session.transcript.ask_text(body.prompt, dialect)
            if tools:
                dialect = replace(dialect, template_kwargs={**dialect.template_kwargs, "tools": tools})
            return session.transcript.ask(checked_messages(body.messages), dialect, tools=repr(tools))
        except HttpError:
            raise
        except Exception as error:  # a template is a program of the model's and raises what it likes
            raise HttpError(400, f"the chat template refuses the messages: {' '.join(str(error).split())}") from error

    def _request(self, session: Session, call: Call, body: ChatBody | CompletionBody) -> Request:
        sampling, o = session.sampling, self.options
        room = min(sampling.max_new_tokens, body.limit or sampling.max_new_tokens)
        if o.max_tokens is not None:
            room = min(room, o.max_tokens - session.transcript.policy_tokens)
            if room < 1:
                session.finish = session.refused = Finish.LENGTH
                raise HttpError(400, f"the episode has had its {o.max_tokens} tokens (agent.max_tokens)")
        room = min(room, self.limit - len(call.ids))
        if room < 1:
            session.refused = Finish.LENGTH
            session.count("too_long")
            raise HttpError(
                400,
                f"the messages have {len(call.ids)} tokens and the maximum context length is {self.limit}: shorten the conversation",
            )
        stops = tuple(dict.fromkeys((*sampling.stop_strings, *body.stops)))
        if room != sampling.max_new_tokens or stops != sampling.stop_strings:
            sampling = replace(sampling, max_new_tokens=room, stop_strings=stops)
        return session.request(call.number, call.ids, sampling)

    async def _sampled(self, request: Request, heard: Callable[[int, float], None] | None) -> Completion:
        assert self.service is not None
        try:
            (completion,) = await asyncio.wrap_future(self.service.submit([request], heard=heard))
        except ServiceClosedError as error:
            raise HttpError(503, "no episodes are played now") from error
        if completion.finish in (Finish.ABORT, Finish.TIMEOUT):
            raise HttpError(503, "the answer was given up")
        return completion


async def _ended(tasks: "set[asyncio.Task[Any]]") -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def _without_stop(text: str, stops: tuple[str, ...], completion: Completion) -> str:
    """The text up to the first of the texts that end an answer."""
    if completion.finish is not Finish.STOP_STRING:
        return text
    return text[: min((text.index(s) for s in stops if s in text), default=len(text))]


def _note_sent(session: Session, all_of_it: bool) -> None:
    session.since = monotonic()
    if not all_of_it:
        session.count("aborted_streams")
