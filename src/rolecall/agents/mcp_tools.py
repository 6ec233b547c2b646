"""The tools of an MCP server as an environment: a server of its own for every episode, so that none sees another's traces.

mcp:python server.py            a program that speaks on stdin and stdout
mcp:http://127.0.0.1:8000/mcp   one that runs elsewhere, and is shared (needs agent.network)
"""

import asyncio
import inspect
import shlex
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from rolecall.agents.adapters import ToolsEnv
from rolecall.tasks.env import EnvError


class MCPEnv(ToolsEnv):
    """The policy may call the server's tools; its first message without a call ends the episode."""

    def __init__(self, where: str) -> None:
        self._server = Server(where)
        super().__init__({tool.name: _as_function(tool, self._server.call) for tool in self._server.tools})

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The server's own schemas."""
        return [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description or "", "parameters": dict(t.input_schema)},
            }
            for t in self._server.tools
        ]


class Server:
    """A connection to an MCP server. It is kept by a thread, and ends with this object."""

    def __init__(self, where: str) -> None:
        client = _client(where)
        self._loop, self._end = asyncio.new_event_loop(), asyncio.Event()
        connected: Future[tuple[Any, list[Any]]] = Future()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(_keep(client, connected, self._end),), daemon=True
        )
        self._thread.start()
        try:
            self._session, self.tools = connected.result()
        except BaseException as error:
            self._thread.join()
            raise EnvError(f"the MCP server {where!r} cannot be used: {_first(error)}") from error
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._end.set)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool answers; a `ValueError` with what it says if it fails."""
        work = asyncio.run_coroutine_threadsafe(self._session.call_tool(name, dict(arguments)), self._loop)
        result = work.result()
        text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
        if result.is_error:
            raise ValueError(text)
        return text


def check_server(where: str) -> None:
    """Refuse what names no server, without starting one."""
    _client(where)


def _client(where: str) -> Any:
    try:
        from mcp import Client, StdioServerParameters
    except ImportError as error:
        raise EnvError("environments named mcp:… need the package mcp: pip install 'rolecall[mcp]'") from error
    if where.startswith(("http://", "https://")):
        return Client(where)
    words = shlex.split(where)
    if not words or shutil.which(words[0]) is None:
        raise EnvError(f"environment 'mcp:{where}': there is no program {words[0] if words else ''!r} to start")
    return Client(StdioServerParameters(command=words[0], args=words[1:]))


async def _keep(client: Any, connected: "Future[tuple[Any, list[Any]]]", end: asyncio.Event) -> None:
    try:
        async with client as session:
            found = await session.list_tools()
            tools = list(found.tools)
            while found.next_cursor is not None:
                found = await session.list_tools(cursor=found.next_cursor)
                tools += found.tools
            connected.set_result((session, tools))
            await end.wait()
    except BaseException as error:
        if not connected.done():
            connected.set_exception(error)


def _first(error: BaseException) -> str:
    """What went wrong, out of a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _as_function(tool: Any, call: Callable[[str, Mapping[str, Any]], str]) -> Callable[..., str]:
    """A tool as a function with the arguments of its schema."""

    def function(**arguments: Any) -> str:
        return call(tool.name, arguments)

    schema = tool.input_schema
    names, required = schema.get("properties") or {}, set(schema.get("required") or ())
    keyword = inspect.Parameter.KEYWORD_ONLY
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(n, keyword, default=inspect.Parameter.empty if n in required else None)
            for n in names
            if n.isidentifier()
        ]
    )
    return function
