"""A real vLLM server for tests, started as a user would: `rolecall serve MODEL --vllm`."""

import os
import signal
import subprocess
import sys
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

    def __init__(self, url, **engine):
        self.engine = EngineOptions(servers=(url,), **engine)
        self.sampling = Sampling(max_new_tokens=16)
        self.policy = type("Policy", (), {"mixed_precision": "no"})


@contextmanager
def engine_on(url, policy, **engine):
    """An engine over the server, with the policy's weights."""
    found = sampler(policy, Options(url, **engine))
    try:
        yield found
    finally:
        found.close()
