"""A pool of workers answers as one engine does, whatever becomes of its workers."""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.policy.load import load
from rolecall.policy.lora import add_adapter, merged
from rolecall.recipes.rl import engine_weights
from rolecall.remote.adapter import adapter_alone, base_weights
from rolecall.rollout.engine import weights_hash
from rolecall.rollout.open import open_engine
from rolecall.rollout.pool import EnginePool
from rolecall.rollout.published import Adapter
from rolecall.serving.inside_vllm.rolecall_weights import merged as merge_adapter
from rolecall.types import Request, Sampling

HOW = {"name": "native", "dtype": None, "max_rows": 256}


@pytest.fixture(scope="module")
def tiny():
    return load("tiny")


def requests(count=6, *, step=0, **sampling):
    settings = Sampling(**{"max_new_tokens": 60, "stop_ids": ()} | sampling)
    return [
        Request(prompt_ids=tuple(range(65, 70 + i)), sampling=settings, n=4, prompt=i, seed=5, step=step)
        for i in range(count)
    ]


def alone(engine, asked):
    """What one engine says to each prompt by itself: a worker's unit."""
    return [c for request in asked for c in engine.generate([request])]


def pool_of(tiny, *, module="rolecall.rollout.worker", measured=None, adapter=None, **options):
    def add(name, value):
        if measured is not None:
            measured[name] = measured.get(name, 0.0) + value

    settings = EngineOptions(**{"workers": 2, "worker_silence": 8.0} | options)
    return EnginePool(tiny, settings, how=HOW, reads={}, add=add, adapter=adapter, module=module)


@pytest.fixture(scope="module")
def measured():
    return {}


@pytest.fixture(scope="module")
def pool(tiny, measured):
    with pool_of(tiny, measured=measured) as made:
        yield made


def sampling_process(pool, place):
    """The process that runs a worker's engine: the innermost, below its keeper."""
    pid = pool.pids[place]
    while True:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            return pid
        pid = int(children[0])


def test_the_pool_answers_as_one_engine_does_bit_for_bit(tiny, pool):
    asked = requests(top_k=20, logprobs="drawn")
    assert pool.generate(asked) == alone(open_engine(tiny, **HOW), asked)
    assert pool.generate(asked[:1]) == pool.generate(asked)[:4]


def test_new_weights_reach_every_worker(tiny, pool):
    other = {name: p * 1.5 for name, p in tiny.model.named_parameters()}
    engine = open_engine(tiny, **HOW)
    for version, weights in ((3, other), (4, dict(tiny.model.named_parameters()))):
        pool.load(weights, version)
        engine.load(weights, version)
        assert pool.hash() == engine.hash() == weights_hash(weights, torch.float32)
        assert pool.generate(requests()) == alone(engine, requests())
    with pytest.raises(ValueError, match="the weights to load do not fit"):
        pool.load({}, 5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_killed_or_stopped_worker_was_asked_is_answered_by_another(tiny, pool, measured, number):
    """Killed when its first answers have come; stopped before it is asked, so that it takes its prompts and is silent."""
    asked = requests(max_new_tokens=400)
    engine = open_engine(tiny, **HOW)
    engine.load(dict(tiny.model.named_parameters()), pool.version)
    lost, found = measured.get("workers/lost", 0), []
    if number == signal.SIGSTOP:
        os.kill(sampling_process(pool, 0), number)
    for completion in pool.stream(asked):
        if not found and number == signal.SIGKILL:
            os.kill(sampling_process(pool, 1), number)
        found.append(completion)
    found.sort(key=lambda c: (c.prompt, c.sample))
    assert found == alone(engine, asked)
    assert measured["workers/lost"] > lost
    assert "workers/differing" not in measured


@pytest.fixture
def trained():
    """The built-in model with an adapter that has been trained."""
    loaded = add_adapter(load("tiny"), rank=4, seed=3)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in loaded.model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return loaded


def adapter_of(loaded, merge=merge_adapter):
    return Adapter(base=base_weights(loaded), now=partial(adapter_alone, loaded), merge=merge)


def test_of_an_adapter_only_its_tensors_are_published_and_answers_are_those_of_merged_weights(trained):
    engine = open_engine(merged(trained), **HOW)
    first, later = engine_weights(trained), None
    with pool_of(merged(trained), adapter=adapter_of(trained), workers=1) as pool:
        ahead = pool.side()
        ahead.expect(1, None)
        with torch.no_grad():
            next(p for name, p in trained.model.named_parameters() if "lora_B" in name).mul_(2.0)
        later = engine_weights(trained)
        pool.load(later, 2)
        ahead.load(first, 1)  # the trainer has gone on: it is the adapter of then that is published
        for held, weights, version in ((ahead, first, 1), (pool.side(), later, 2)):
            held.load(weights, version)
            engine.load(weights, version)
            assert held.hash() == engine.hash()
            assert held.generate(requests(2)) == alone(engine, requests(2))
        sizes = {path.name: path.stat().st_size for path in pool._directory.glob("*.safetensors")}
    assert sizes.keys() == {"base.safetensors", "a000001.safetensors", "a000002.safetensors"}
    assert sizes["a000001.safetensors"] < sizes["base.safetensors"] / 3


def test_workers_that_merge_to_other_bits_get_whole_weights(trained, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import pool_workers

    monkeypatch.setenv("POOL_TRAINER", str(os.getpid()))
    engine, measured = open_engine(merged(trained), **HOW), {}
    adapter = adapter_of(trained, merge=pool_workers.merge_otherwise)
    with pool_of(merged(trained), adapter=adapter, measured=measured, workers=2) as pool:
        assert pool.generate(requests(3)) == alone(engine, requests(3))
        pool.load(engine_weights(trained), 1)
        engine.load(engine_weights(trained), 1)
        assert pool.generate(requests(3)) == alone(engine, requests(3))
    assert caplog.text.count("workers get whole weights") == 1
    assert 1 <= measured["workers/lost"] <= 2


def test_prompts_that_no_engine_takes_are_refused_before_they_are_sent(pool):
    with pytest.raises(ValueError, match="prompt 0 is requested twice"):
        pool.generate([*requests(1), *requests(1)])


def test_answers_of_other_weights_are_refused_and_asked_again(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("POOL_MARK", str(tmp_path / "lied"))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    measured = {}
    with pool_of(tiny, module="pool_workers", measured=measured, workers=1) as pool:
        assert pool.generate(requests(2)) == alone(open_engine(tiny, **HOW), requests(2))
    assert measured["workers/stale"] == 1


def test_a_pool_whose_workers_all_die_gives_up_as_retryable_after_pauses(tiny, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    begun = time.monotonic()
    with pytest.raises(
        UserError, match=r"rollout workers were lost 5 times in a row, the last one because .*code 9"
    ) as e:
        pool_of(tiny, module="pool_dead", workers=1)
    assert e.value.exit_code == 75
    assert time.monotonic() - begun > 0.2 + 0.4 + 0.8


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory by that name")
def test_what_a_killed_trainer_left_in_shared_memory_is_removed(tiny, pool):
    dead = Path("/dev/shm/rolecall-99999999-left")
    dead.mkdir(exist_ok=True)
    with pytest.raises(UserError):
        pool_of(tiny, module="no_such_module_anywhere", workers=1)
    assert not dead.exists()
