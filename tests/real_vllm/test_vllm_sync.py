"""Two real vLLM servers with the built-in model: weights by broadcast, adapters alone, and versions that differ."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from vllm_server import engine_on, post, vllm

import rolecall
from rolecall.errors import UserError
from rolecall.policy.load import load
from rolecall.policy.lora import add_adapter, merged, merged_weights
from rolecall.remote.vllm import VllmDialect
from rolecall.types import Request, Sampling

pytestmark = pytest.mark.vllm

RUN = {
    "model": "tiny",
    "rows": "addition",
    "reward": f"{Path(__file__).parents[1] / 'remote' / 'light_rewards.py'}:vowels",
    "prompts": 4,
    "samples": 4,
    "steps": 3,
    "sampling": {"max_new_tokens": 12},
    "optim": {"lr": 1e-2},
    "quiet": True,
}
ASKED = [
    Request(prompt_ids=tuple(range(60, 64 + i)), sampling=Sampling(max_new_tokens=16, stop_ids=()), n=4, prompt=i)
    for i in range(4)
]


@pytest.fixture(scope="module")
def servers():
    """Closes one of two servers each. The last test closes the second."""
    with ExitStack() as one, ExitStack() as other:
        yield [one, other]


@pytest.fixture(scope="module")
def two(servers):
    """Both are started at once."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda stack: stack.enter_context(vllm("tiny")), servers))


def moved(policy, seed=0, by=0.1):
    """The policy with what trains changed, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return policy


def weights(policy):
    return dict(policy.model.named_parameters())


@pytest.fixture
def loads(monkeypatch):
    """What servers are given: "base", "adapter" or "whole", and by which way."""
    given, load_weights = [], VllmDialect.load

    async def noting(self, call, published):
        kind = "base" if published.keep else "whole" if published.base is None else "adapter"
        given.append((kind, "directory" if published.broadcast is None else published.broadcast["size"]))
        return await load_weights(self, call, published)

    monkeypatch.setattr(VllmDialect, "load", noting)
    return given


def test_weights_that_are_broadcast_are_those_of_a_directory(two, loads):
    policy, found = moved(load("tiny")), []
    for sync in ("directory", "broadcast"):
        with engine_on(two, policy, sync=sync) as engine:
            engine.load(weights(policy), 1)
            found.append(engine.generate(ASKED))
            assert engine.metrics()["sampling/probe_difference"] < 1e-5
            assert all(server.ready for server in engine.fleet.servers)
    assert found[0] == found[1]
    assert set(loads[-2:]) == {("whole", 3)}


def test_grpo_on_two_servers_by_broadcast(two, tmp_path):
    engine = {"servers": two, "sync": "broadcast", "worker_silence": 120}
    run = rolecall.rl(preset="grpo", out=str(tmp_path / "run"), engine=engine, **RUN)
    assert all(line["sampling/probe_difference"] < 1e-5 for line in run.metrics)
    assert run.metrics[-1]["weights_moved"] > 0


@pytest.mark.parametrize("sync", ["directory", "broadcast"])
def test_an_adapter_alone_gives_the_answers_of_merged_weights(two, loads, sync):
    policy = moved(add_adapter(load("tiny"), rank=4, alpha=8.0))
    with engine_on(two[:1], policy, sync=sync) as engine:
        moved(policy, seed=1)
        loads.clear()
        engine.load(merged_weights(policy), 1)
        assert [kind for kind, _ in loads] == ["adapter"]
        alone = engine.generate(ASKED)
        assert engine.metrics()["sampling/probe_difference"] < 1e-5
    with engine_on(two[:1], merged(policy)) as engine:
        engine.load(weights(merged(policy)), 1)
        assert engine.generate(ASKED) == alone


def test_an_adapter_is_trained_and_its_reference_is_the_model_without(two, tmp_path, loads):
    engine = {"servers": two[:1], "worker_silence": 120}
    lora = {"policy": {"lora_rank": 4}, "algorithm": {"kl_coef": 0.01}}
    run = rolecall.rl(preset="grpo", out=str(tmp_path / "run"), engine=engine, **{**RUN, **lora})
    assert all(line["sampling/probe_difference"] < 1e-5 for line in run.metrics)
    assert run.metrics[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert run.metrics[-1]["kl"] > 0
    assert [kind for kind, _ in loads[3:]] == ["adapter"] * (len(loads) - 3)


def test_an_adapter_that_never_arrives_is_noticed_before_the_first_step(two, monkeypatch):
    load_weights = VllmDialect.load

    async def deaf(self, call, published):
        if published.base is None:
            return await load_weights(self, call, published)
        await self.pause(call)
        await call("POST", "/update_weight_version", {"new_version": str(published.version)})
        await self.resume(call)
        return None

    monkeypatch.setattr(VllmDialect, "load", deaf)
    with (
        pytest.raises(UserError, match="version 0 did not arrive, though it was loaded twice"),
        engine_on(two[:1], add_adapter(load("tiny"), rank=4)),
    ):
        pass


def test_two_servers_of_different_versions_are_never_mixed(two, caplog):
    with engine_on(two, moved(load("tiny"))) as engine:
        expected = engine.generate(ASKED)
        post(two[1], "/update_weight_version", {"new_version": "7"})
        assert engine.generate(ASKED) == expected
    assert "it answered with version 7 of the weights, not 0" in caplog.text


def test_a_server_that_is_gone_does_not_hold_up_a_broadcast_to_the_other(two, servers):
    policy = load("tiny")
    with engine_on(two, policy, sync="broadcast") as engine:
        expected = engine.generate(ASKED)
        servers[1].close()
        engine.load(weights(policy), 1)
        assert [server.ready for server in engine.fleet.servers] == [True, False]
        assert [c.ids for c in engine.generate(ASKED)] == [c.ids for c in expected]
