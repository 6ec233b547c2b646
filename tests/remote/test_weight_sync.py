"""How weights get to servers: by a broadcast, and adapters alone. The weights that come out are those of a run without servers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from served import KEY, Options, app_of, engine_on, requests, serving

import rolecall
from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.jobs.models import sampler
from rolecall.policy.load import load
from rolecall.policy.lora import add_adapter, merged, merged_weights
from rolecall.policy.model import PolicyModel
from rolecall.policy.quantize import quantized
from rolecall.remote.adapter import adapter_alone, base_weights, can_be_merged
from rolecall.remote.probe import scored
from rolecall.rollout.engine import weights_hash
from rolecall.rollout.open import open_engine
from rolecall.serving.app import App
from rolecall.serving.inside_vllm import rolecall_weights

REWARD = f"{Path(__file__).parent / 'light_rewards.py'}:vowels"
SHORT = {
    "model": "tiny",
    "reward": REWARD,
    "steps": 2,
    "prompts": 4,
    "samples": 4,
    "sampling": {"max_new_tokens": 12},
    "optim": {"lr": 1e-2},
    "quiet": True,
}


@pytest.fixture(scope="module")
def process():
    """A server in a process of its own; the last test to use it kills it."""
    words = [sys.executable, "-m", "rolecall", "serve", "tiny", "--port", "0"]
    environment = {**os.environ, "ROLECALL_SERVER_KEY": KEY, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as started:
        yield started, started.stdout.readline().split(" on ")[1].strip()
        started.kill()


@pytest.fixture(scope="module")
def two(process):
    """The addresses of two servers."""
    with serving(app_of()) as url:
        yield url, process[1]


def weights(run):
    return (Path(run.path) / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("more", [{}, {"policy": {"lora_rank": 4}, "algorithm": {"kl_coef": 0.1}}])
def test_weights_that_are_broadcast_train_as_those_of_an_engine_here(two, tmp_path, more):
    here = rolecall.rl(out=str(tmp_path / "here"), **SHORT, **more)
    there = rolecall.rl(out=str(tmp_path / "there"), engine={"servers": two, "sync": "broadcast"}, **SHORT, **more)
    assert weights(here) == weights(there)
    assert [line.get("kl") for line in there.metrics] == [line.get("kl") for line in here.metrics]


def test_nothing_is_written_when_weights_are_broadcast(two):
    with engine_on(*two, sync="broadcast") as (there, alone):
        assert not list(there._directory.iterdir())
        assert there.generate(requests()) == alone.generate(requests())
        assert there.hash() == alone.hash()


def test_a_broadcast_that_always_breaks_off_ends_the_run_with_a_sentence(two, monkeypatch):
    """As where something between the machines cuts connections."""
    send = rolecall_weights.send
    monkeypatch.setattr("rolecall.remote.broadcast.send", lambda where, listening, tensors: send(where, listening, {}))
    with pytest.raises(UserError, match=r"weights cannot be broadcast to it: .* or set engine\.sync directory"):
        sampler(load("tiny"), Options(two[0], sync="broadcast"))


@pytest.mark.parametrize("how", [pytest.param(signal.SIGSTOP, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_server_that_is_lost_in_the_middle_of_a_broadcast_is_left_behind(process, two, monkeypatch, caplog, how):
    """The others get the weights, and the answers are those of an undisturbed run."""
    server, _ = process
    send = rolecall_weights.send

    class Interrupted(dict):
        """Tensors; the server is gone when the second is to be sent."""

        def values(self):
            first, *rest = super().values()
            yield first
            server.send_signal(how)
            yield from rest

    with engine_on(*two, sync="broadcast", worker_silence=6.0) as (there, alone):
        both = lambda where, *rest: send(where, rest[0], Interrupted(rest[1]) if where["size"] == 3 else rest[1])
        monkeypatch.setattr("rolecall.remote.broadcast.send", both)
        loaded = load("tiny")
        moved(loaded)
        there._scorer = lambda *asked: scored(PolicyModel(loaded.model), *asked, temperature=1.0, token_budget=8192)
        for one in (there, alone):
            one.load(dict(loaded.model.named_parameters()), 4)
        assert "the broadcast to all broke off, it gets the weights alone" in caplog.text
        assert [s.ready for s in there.fleet.servers] == [True, False]
        assert there.generate(requests(step=1)) == alone.generate(requests(step=1))
    server.send_signal(signal.SIGCONT)


# -- adapters ----------------------------------------------------------------------------------------------------------


def moved(policy, by=0.05):
    """The policy with what trains changed, in place."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return policy


def with_adapter(**settings):
    """A policy with an adapter that changes something."""
    return moved(add_adapter(load("tiny"), rank=4, alpha=3.0, **settings))


@pytest.mark.parametrize("settings", [{}, {"rs": True}, {"target_modules": ["q_proj", "down_proj"]}])
def test_an_adapter_is_merged_into_the_same_bits_as_by_peft(settings):
    policy = with_adapter(**settings)
    found = rolecall_weights.merged(base_weights(policy), adapter_alone(policy))
    expected = dict(merged(policy).model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert can_be_merged(policy)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_layers_that_are_merged_in_another_way_are_noticed():
    assert not can_be_merged(with_adapter(target_modules=["embed_tokens"]))
    assert not can_be_merged(with_adapter(target_modules=["embed_tokens", "q_proj"]))
    assert not can_be_merged(moved(add_adapter(quantized(load("tiny"), "int8"), rank=4)))


class Noting(App):
    """Notes the names of the tensors that it is given, and to which they are an adapter."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.given = []

    async def _update_weights(self, request):
        found = await super()._update_weights(request)
        self.given.append(found["hash"])
        return found


@pytest.mark.parametrize("way", ["directory", "broadcast", "upload"])
def test_only_the_adapter_is_sent_and_answers_are_those_of_merged_weights(way, monkeypatch):
    """The server computes in another dtype: it merges in the trainer's."""
    app, policy = app_of(kind=Noting, dtype=torch.bfloat16), with_adapter()
    with serving(app) as url:
        engine = sampler(policy, Options(url, sync="broadcast" if way == "broadcast" else "directory"))
        try:
            engine.fleet.servers[0]._sees = way != "upload"
            moved(policy)
            engine.load(merged_weights(policy), 1)
            assert app.given[-1] == weights_hash(adapter_alone(policy), torch.float32)
            alone = open_engine(merged(policy), name="native", dtype=torch.bfloat16)
            alone.version = 1
            assert engine.generate(requests()) == alone.generate(requests())
            assert engine.hash() == app.engine.hash() == alone.hash()
            # whole weights at first, those to keep, the adapter twice, and the new one
            assert len(app.given) == 5
            app._kept.clear()  # as after a restart
            engine.load(merged_weights(moved(policy)), 2)
            assert app.given[-2] == weights_hash(base_weights(policy), torch.float32)
            assert len(app.given) == 7
        finally:
            engine.close()


def test_versions_that_the_trainer_has_left_behind_are_sent_as_adapters_too():
    app, policy = app_of(kind=Noting), with_adapter()
    with serving(app) as url:
        engine = sampler(policy, Options(url))
        try:
            engine.expect(1, None)
            old, alone = merged_weights(policy), adapter_alone(policy)
            moved(policy)
            engine.load(old, 1)
            assert app.given[-1] == weights_hash(alone, torch.float32)
            engine.expect(0, old)  # from a checkpoint, which has no adapter of its own: whole
            engine.load(old, 0)
            assert app.given[-1] == weights_hash(old, torch.float32) == app.engine.hash()
        finally:
            engine.close()


class Deaf(App):
    """Confirms adapters, and goes on with what it keeps."""

    async def _on_engine(self, function, *, idle):
        if idle and self._kept:
            (weights,) = self._kept.values()
            return await super()._on_engine(lambda: self.engine.load(weights, 0), idle=True)
        return await super()._on_engine(function, idle=idle)


def test_an_adapter_that_is_confirmed_and_not_loaded_is_noticed_before_the_first_step():
    """A new one changes nothing yet, so it is tried with noise first."""
    policy = add_adapter(load("tiny"), rank=4)
    with (
        serving(app_of(kind=Deaf)) as url,
        pytest.raises(UserError, match="version 0 did not arrive, though it was loaded twice"),
    ):
        sampler(policy, Options(url))
    assert not any(bool(p.any()) for name, p in policy.model.named_parameters() if "lora_B" in name)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match=r"engine\.sync is for servers"):
        EngineOptions(sync="broadcast")
    with pytest.raises(ValueError, match="give one of the two"):
        EngineOptions(servers=("http://a",), sync="broadcast", weights_directory="/shared")
