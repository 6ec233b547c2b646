"""Tool calls in a policy's text: found, checked, answered.

Two ways to write a call, both of which may stand anywhere in a message:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>      any arguments
    <calc>12*34</calc>                                                         the tool's only argument, as text

A call that cannot be read, or that fails, is answered with what is wrong, so that the policy can try again.
"""

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from rolecall.tasks.env import Message, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    """The tool; empty if it could not be read."""
    arguments: Mapping[str, Any]
    """By name; a call of the short form has its one argument under the empty name."""
    error: str | None = None
    """Why it cannot be made."""


_JSON_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)


def find_calls(text: str, tools: Sequence[str] = ()) -> list[ToolCall]:
    """The calls in a text, in order. `tools` are the names that the short form is looked for."""
    return [call for _, call in _calls(text, tools)]


def split_calls(text: str, tools: Sequence[str] = ()) -> tuple[str, list[ToolCall]]:
    """(what stands beside the calls, the calls), as chat APIs tell them apart."""
    found, rest, end = _calls(text, tools), "", 0
    for match, _ in found:
        if match.start() >= end:
            rest += text[end : match.start()]
            end = match.end()
    return (rest + text[end:]).strip() if found else text, [call for _, call in found]


def _calls(text: str, tools: Sequence[str]) -> list[tuple[re.Match[str], ToolCall]]:
    found = [(match, _json_call(match)) for match in _JSON_CALL.finditer(text)]
    for name in tools:
        pattern = re.compile(rf"<{re.escape(name)}>(.*?)(</{re.escape(name)}>|$)", re.DOTALL)
        found += [(match, _short_call(name, match)) for match in pattern.finditer(text)]
    return sorted(found, key=lambda pair: pair[0].start())


def call_tools(text: str, tools: Mapping[str, Callable[..., Any]], *, short: Sequence[str]) -> Step | None:
    """What comes of all calls in a text, counted; None if there is none. `short` are the tools with a short form."""
    calls = find_calls(text, short)
    answers = answer_calls(calls, tools)
    failed = sum(not well for _, well in answers)
    counts = {"tool_calls": float(len(calls)), "tool_failures": float(failed)}
    return Step(messages=[said for said, _ in answers], counts=counts) if calls else None


def answer_calls(calls: Sequence[ToolCall], tools: Mapping[str, Callable[..., Any]]) -> list[tuple[Message, bool]]:
    """(the tool's message, whether the call went well) of each. Whatever a tool raises is told to the policy. Async tools run
    at the same time, when all others have returned."""
    results = [_called(call, tools) for call in calls]
    late = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    for i, found in zip(late, _all(results[i] for i in late), strict=True):
        results[i] = _Failed(str(found) or type(found).__name__) if isinstance(found, Exception) else found
    return [_told(call, result) for call, result in zip(calls, results, strict=True)]


@dataclass(frozen=True, slots=True)
class _Failed:
    """A call that could not be made, or did not go well."""

    why: str


def _called(call: ToolCall, tools: Mapping[str, Callable[..., Any]]) -> Any:
    """What the tool returns; of an async one, what is to be awaited."""
    if call.error is not None:
        return _Failed(call.error)
    if call.name not in tools:
        near = get_close_matches(call.name, tools, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(tools)}"
        return _Failed(f"there is no tool {call.name!r}; {hint}")
    tool, arguments = tools[call.name], dict(call.arguments)
    if "" in arguments:
        first = next(iter(inspect.signature(tool).parameters), None)
        arguments = {} if first is None else {first: arguments[""]}
    try:
        inspect.signature(tool).bind(**arguments)
        return tool(**arguments)
    except Exception as raised:  # a tool may raise anything; the episode goes on
        return _Failed(str(raised) or type(raised).__name__)


def _told(call: ToolCall, result: Any) -> tuple[Message, bool]:
    failed = isinstance(result, _Failed)
    content = f"error: {result.why}" if failed else result if isinstance(result, str) else _as_text(result)
    return {"role": "tool", "name": call.name or "tool", "content": content}, not failed


def awaited(result: Any) -> Any:
    """What a function returned, or what comes of it if it is async. All of a process run on one event loop, so that a client
    that an environment keeps may be used again."""
    if not inspect.isawaitable(result):
        return result
    (found,) = _all([result])
    if isinstance(found, BaseException):
        raise found
    return found


def _all(waiting: Iterable[Awaitable[Any]]) -> list[Any]:
    """What comes of them, at the same time; of one that raises, what it raises."""
    begun = list(waiting)

    async def results() -> list[Any]:
        import asyncio

        return await asyncio.gather(*begun, return_exceptions=True)

    return _runner().run(results()) if begun else []


@cache
def _runner() -> Any:
    import asyncio  # not needed by most, and slow to import
    import atexit

    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


def _as_text(result: Any) -> str:
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def _json_call(match: re.Match[str]) -> ToolCall:
    if not match[2]:
        return ToolCall(name="", arguments={}, error="a tool call was not closed with </tool_call>")
    try:
        call = json.loads(match[1])
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "it is nested too deeply"
        return ToolCall(name="", arguments={}, error=f"the tool call is not JSON: {why}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(name="", arguments={}, error='a tool call needs {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(name=call["name"], arguments={}, error="the arguments of a tool call must be a JSON object")
    return ToolCall(name=call["name"], arguments=arguments)


def _short_call(name: str, match: re.Match[str]) -> ToolCall:
    if not match[2]:
        return ToolCall(name=name, arguments={}, error=f"the call was not closed with </{name}>")
    return ToolCall(name=name, arguments={"": match[1]})
