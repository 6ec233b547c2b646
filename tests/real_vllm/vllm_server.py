"""A real vLLM server for tests, started as a user would: `rolecall serve MODEL --vllm`."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

from rolecall.config.parts import EngineOptions
from rolecall.jobs.models import sampler
from rolecall.types import Sampling

KEY = "a-key"


@contextmanager
def vllm(model, *more, port=0):
    """Its address. Without compilation, which takes as long as these tests and changes no numbers that they look at."""
    words = ["serve", str(model), "--vllm", "--port", str(port), "--vllm-args=--enforce-eager", *more]
    environment = {**os.environ, "ROLECALL_SERVER_KEY": KEY, "VLLM_CPU_KVCACHE_SPACE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "rolecall", *words], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        first = process.stdout.readline()
        assert first.startswith("serving "), first
        yield first.split(" on ")[1].strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


class Options:
    """As much of a command's options as an engine is made from."""

    def __init__(self, *urls, **engine):
        self.engine = EngineOptions(servers=urls, **engine)
        self.sampling = Sampling(max_new_tokens=16)
        self.policy = type("Policy", (), {"mixed_precision": "no"})


@contextmanager
def engine_on(urls, policy, **engine):
    """An engine over the server, or over several, with the policy's weights."""
    found = sampler(policy, Options(*([urls] if isinstance(urls, str) else urls), **{"worker_silence": 120.0} | engine))
    try:
        yield found
    finally:
        found.close()


def post(url, path, body):
    request = urllib.request.Request(
        url + path,
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return answer.status
