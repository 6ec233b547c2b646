"""`rolecall serve` as a process: what it says, who is let in, and that its answers are the engine's."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from rolecall.policy.load import load
from rolecall.rollout.open import open_engine
from rolecall.types import Request, Sampling

KEY = "a-key"


@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen(
        [sys.executable, "-m", "rolecall", "serve", "tiny", "--port", "0"],
        env={**os.environ, "ROLECALL_SERVER_KEY": KEY},
        stdout=subprocess.PIPE,
        text=True,
    )
    first = process.stdout.readline()
    url = first.split(" on ")[1].strip()
    assert process.stdout.readline() == f"train with: rolecall rl --model tiny --engine.servers {url}\n"
    yield first
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    process.stdout.close()


def ask(server, path, body=None, *, key=KEY, host=None):
    """(status, answer) of a request to the server that said this line."""
    url = server.split(" on ")[1].strip()
    headers = {"Authorization": f"Bearer {key}"} | ({"Host": host} if host else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data=data, headers=headers)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_it_says_where_it_is(server):
    assert server.startswith("serving tiny (native, float32) on http://127.0.0.1:")


def test_answers_are_those_of_the_engine(server):
    ids = (5, 6, 7)
    body = {
        "token_ids": ids,
        "sampling_params": {"n": 2, "max_tokens": 6, "temperature": 0.7, "logprobs": 0},
        "rolecall": {"seed": 3, "step": 2, "prompt": 4},
    }
    _, answer = ask(server, "/inference/v1/generate", body)
    engine = open_engine(load("tiny"), name="native")
    sampling = Sampling(temperature=0.7, max_new_tokens=6, stop_ids=tuple(engine.stop_ids))
    expected = engine.generate([Request(prompt_ids=ids, sampling=sampling, n=2, seed=3, step=2, prompt=4)])
    for choice, completion in zip(answer["choices"], expected, strict=True):
        assert tuple(choice["token_ids"]) == completion.ids
        assert [x["logprob"] for x in choice["logprobs"]["content"]] == list(completion.behaviour_logprobs)
        assert choice["rolecall"]["finish"] == completion.finish


@pytest.mark.parametrize(
    ("path", "how", "status", "part"),
    [
        ("/version", {"key": "another"}, 401, "key is missing or wrong"),
        ("/version", {"host": "evil.example"}, 403, "Host header"),
        ("/nowhere", {}, 404, "there is no /nowhere"),
        ("/inference/v1/generate", {}, 405, "takes POST"),
        ("/inference/v1/generate", {"body": {"token_ids": []}}, 400, "token_ids"),
        ("/inference/v1/generate", {"body": {"token_ids": [1], "beams": 4}}, 400, "beams is not a field"),
        ("/inference/v1/generate", {"body": {"token_ids": [10**6]}}, 400, "vocabulary"),
    ],
)
def test_what_is_refused(server, path, how, status, part):
    code, answer = ask(server, path, **how)
    assert code == status
    assert part in answer["error"]["message"]


def test_an_openai_client_is_answered(server):
    status, answer = ask(server, "/v1/completions", {"model": "tiny", "prompt": "1+1=", "max_tokens": 3, "seed": 1})
    assert status == 200
    assert 1 <= answer["usage"]["completion_tokens"] <= 3


def test_a_port_that_is_taken_is_a_sentence(server):
    port = server.strip().rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "rolecall", "serve", "tiny", "--port", port], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"port {port} is taken by another program" in done.stderr
