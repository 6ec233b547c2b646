"""Agents as people write them, against OpenAI's API."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def post(base_url, key, body, path="/chat/completions"):
    """(status, answer) of a call without any client library."""
    request = urllib.request.Request(
        f"{base_url}{path}",
        data=body if isinstance(body, bytes) else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def said(base_url, key, messages, **more):
    if more.get("stream"):
        return {"role": "assistant", "content": "".join(pieces(base_url, key, {"messages": messages, **more}))}
    status, answer = post(base_url, key, {"model": "m", "messages": messages, **more})
    assert status == 200, answer
    return answer["choices"][0]["message"]


def guess(base_url, key, row):
    """The guessing game of `rolecall.tasks.agent_tasks`, as somebody would write it."""
    messages = [dict(m) for m in row["prompt"]]
    for left in range(2, -1, -1):
        message = said(base_url, key, messages, stream=row.get("stream", False))
        text = message["content"].strip()
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
        if number == row["secret"]:
            return 1.0
        if not left:
            return 0.0
        reply = "a number" if number is None else "higher" if number < row["secret"] else "lower"
        messages += [message, {"role": "user", "content": reply}]
    return 0.0


def guess_with_help(base_url, key, row):
    """The same, with another conversation before it."""
    said(base_url, key, [{"role": "system", "content": "You help."}, {"role": "user", "content": "how?"}])
    return guess(base_url, key, row)


# -- what programs do, by the row's `do` ---------------------------------------------------------------------------

GO = [{"role": "user", "content": "go"}]


def run(base_url, key, row):
    return globals()[row["do"]](base_url, key, row)


def well(base_url, key, row):
    return {"reward": 1, "said": said(base_url, key, GO)["content"], "seen": row["do"]}


async def later(base_url, key, row):
    await asyncio.sleep(0)
    return well(base_url, key, row)["reward"] + 1


def alone():
    return 0


def never_calls(base_url, key, row):
    return 1.0


def raises(base_url, key, row):
    said(base_url, key, GO)
    raise RuntimeError("the sky fell")


def runs_out_of_memory(base_url, key, row):
    said(base_url, key, GO)
    raise MemoryError


def writes_its_own_result(base_url, key, row):
    """Where its process says what came of it."""
    said(base_url, key, GO)
    os.write(3, json.dumps(row["writes"]).encode())
    os._exit(0)


def goes_on_for_ever(base_url, key, row):
    """Ends with the error of a call that is refused, as most do."""
    messages = list(GO)
    while True:
        messages += [said(base_url, key, messages), {"role": "user", "content": "and then?"}]


def exits(base_url, key, row):
    said(base_url, key, GO)
    os._exit(7)


def crashes(base_url, key, row):
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(base_url, key, row):
    said(base_url, key, GO)
    time.sleep(60)


def leaves_processes(base_url, key, row):
    said(base_url, key, GO)
    left = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid]
    if not (pid := os.fork()):
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(60)
    os.waitpid(pid, 0)
    return {"reward": 1.0, "left": left}


def words(base_url, key, row):
    said(base_url, key, GO)
    return "much"


def sends(base_url, key, row):
    """A good call, then one with the row's fields; what came of it."""
    said(base_url, key, GO)
    status, answer = post(base_url, key, {"model": "m", "messages": GO, **row["fields"]})
    return {"reward": 1.0, "status": status, "message": answer.get("error", {}).get("message", "")}


def sends_much(base_url, key, row):
    said(base_url, key, GO)
    try:
        return {"reward": 1.0, "status": post(base_url, key, b" " * (9 << 20))[0]}
    except OSError as error:  # it hangs up on the body
        return {"reward": 1.0, "status": str(error)}


def sends_nonsense(base_url, key, row):
    said(base_url, key, GO)
    calls = [(key, b"{"), (key, b'{"messages": 3}'), ("", {"messages": GO})]
    return {"reward": 1.0, "statuses": [post(base_url, one, body)[0] for one, body in calls]}


def borrows_a_key(base_url, key, row):
    said(base_url, key, GO)
    place = Path(row["place"])
    (place / key).touch()
    until = time.monotonic() + 5
    while len(found := [path.name for path in place.iterdir()]) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    other = next(name for name in found if name != key)
    status, answer = post(base_url, other, {"model": "m", "messages": GO})
    return {"reward": 1.0, "status": status, "message": answer["error"]["message"]}


def another_way(base_url, key, row):
    """Goes on from its first answer twice, asks the first question again, opens a conversation of its own, rewrites one."""
    first = said(base_url, key, GO)
    more = [*GO, first, {"role": "user", "content": "and"}]
    second = said(base_url, key, more)
    said(base_url, key, [*GO, first, {"role": "user", "content": "or"}])
    said(base_url, key, GO)
    said(base_url, key, [{"role": "system", "content": "You judge."}, *GO])
    said(base_url, key, [*GO, {"role": "assistant", "content": "in short"}, {"role": "user", "content": "on"}])
    said(base_url, key, [*more, second, {"role": "user", "content": "end"}])
    return 1.0


def at_the_same_time(base_url, key, row):
    from concurrent.futures import ThreadPoolExecutor

    first = said(base_url, key, GO)
    asked = [[*GO, first, {"role": "user", "content": text}] for text in ("a", "b", "c")]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda messages: said(base_url, key, messages), asked))
    return 1.0


def hangs_up(base_url, key, row):
    """Asks, hangs up before the answer, and asks the same again."""
    import socket
    from urllib.parse import urlsplit

    first = said(base_url, key, GO)
    parts = urlsplit(base_url)
    body = json.dumps({"model": "m", "messages": [*GO, first, {"role": "user", "content": "wait"}]}).encode()
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.3)
    time.sleep(0.2)
    said(base_url, key, [*GO, first, {"role": "user", "content": "on"}])
    return 1.0


def uses_tools(base_url, key, row):
    tools = [
        {
            "type": "function",
            "function": {
                "name": "calc",
                "description": "Work out.",
                "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
            },
        }
    ]
    messages = [{"role": "user", "content": "6*7"}]
    message = said(base_url, key, messages, tools=tools)
    (call,) = message["tool_calls"]
    given = json.loads(call["function"]["arguments"])
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": str(eval(given["expression"]))}]
    last = said(base_url, key, messages, tools=tools)
    return {"reward": float(last["content"] == "42"), "content": message["content"], "given": given}


def even(completions, environments, **_):
    """A reward function over the transcript; programs' results are seen as `environments`."""
    return [float(sum(len(m["content"]) for m in said) % 2) for said in completions]


def streams(base_url, key, row):
    """Reads a stream piece by piece, as many as the row says; after the first, the engine may go on."""
    found, before = [], False
    for piece in pieces(base_url, key, {"messages": GO, "stream": True}):
        before |= not Path(row["read"]).exists()
        Path(row["read"]).touch()
        found.append(piece)
        if len(found) == row.get("most"):
            break
    return {"reward": 1.0, "pieces": found, "before": before}


def pieces(base_url, key, body):
    """The texts of a stream as they come."""
    head = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", data=json.dumps(body).encode(), headers=head)
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {") and (piece := json.loads(line[6:])["choices"][0]["delta"].get("content")):
                yield piece
