"""Agents written with the `openai` package, each the guessing game: with a client, an async one, a stream, and tools."""

import json

import openai


def _number(text):
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _reply(row, text):
    number = _number(text)
    return "a number" if number is None else "higher" if number < row["secret"] else "lower"


def run(base_url, key, row):
    return globals()[row["do"]](base_url, key, row)


def sync(base_url, key, row):
    client, messages = openai.OpenAI(base_url=base_url, api_key=key), list(row["prompt"])
    assert [model.id for model in client.models.list()] == ["tiny"]
    for _ in range(3):
        answer = client.chat.completions.create(model="gpt-any", messages=messages, logprobs=True, max_tokens=9)
        choice = answer.choices[0]
        assert len(choice.logprobs.content) == answer.usage.completion_tokens
        if _number(choice.message.content) == row["secret"]:
            return {"reward": 1.0, "finish": choice.finish_reason}
        messages += [choice.message, {"role": "user", "content": _reply(row, choice.message.content)}]
    return 0.0


async def asynchronous(base_url, key, row):
    messages = list(row["prompt"])
    async with openai.AsyncOpenAI() as client:  # address and key from the environment
        for _ in range(3):
            answer = await client.chat.completions.create(model="gpt-any", messages=messages)
            text = answer.choices[0].message.content
            if text == str(row["secret"]):
                return 1.0
            messages += [answer.choices[0].message, {"role": "user", "content": _reply(row, text)}]
    return 0.0


def stream(base_url, key, row):
    client, messages = openai.OpenAI(base_url=base_url, api_key=key), list(row["prompt"])
    for _ in range(3):
        chunks = list(
            client.chat.completions.create(
                model="gpt-any", messages=messages, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert chunks[-1].usage.completion_tokens == len(text) + 1
        if text == str(row["secret"]):
            return {"reward": 1.0, "chunks": len(chunks), "finish": chunks[-2].choices[0].finish_reason}
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": _reply(row, text)}]
    return 0.0


def streamed_tools(base_url, key, row):
    client = openai.OpenAI(base_url=base_url, api_key=key)
    with client.chat.completions.stream(
        model="gpt-any", messages=[{"role": "user", "content": "6*7"}], tools=row["tools"]
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    call = message.tool_calls[0]
    return {"reward": float(json.loads(call.function.arguments) == {"expression": "6*7"}), "name": call.function.name}


def text(base_url, key, row):
    client = openai.OpenAI(base_url=base_url, api_key=key)
    whole = client.completions.create(model="gpt-any", prompt="once", max_tokens=4, stop="z")
    parts = client.completions.create(model="gpt-any", prompt="upon", stream=True)
    return {"reward": 1.0, "whole": whole.choices[0].text, "parts": "".join(part.choices[0].text for part in parts)}


def refused(base_url, key, row):
    client = openai.OpenAI(base_url=base_url, api_key=key)
    try:
        client.chat.completions.create(model="gpt-any", messages=[{"role": "user", "content": "x"}], temperature=0.2)
    except openai.BadRequestError as error:
        return {"reward": 0.0, "message": error.message}
    return 0.0
