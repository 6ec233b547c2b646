"""A real vLLM server that holds versions of an adapter side by side: `--enable-lora`."""

import json
import threading
import urllib.request
from contextlib import ExitStack

import pytest
from test_vllm_sync import ASKED, RUN, moved
from vllm_server import KEY, Options, engine_on, post, vllm

import rolecall
from rolecall.errors import UserError
from rolecall.jobs.models import samplers
from rolecall.policy.load import load
from rolecall.policy.lora import add_adapter, merged, merged_weights
from rolecall.remote.vllm_adapters import VllmAdapterDialect
from rolecall.train.timing import Timer

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def url():
    flags = "--enforce-eager --enable-lora --max-loras 2 --max-lora-rank 8"
    with vllm("tiny", f"--vllm-args={flags}") as address:
        yield address


def sides_of(policy, url, stack, lanes=3):
    """Engines for as many versions as fit, of those asked for."""
    return samplers(
        policy,
        Options(url, worker_silence=120.0, server_patience=60.0),
        lanes,
        timer=Timer(),
        updater=None,
        stack=stack,
    )


def adapters(url):
    """The names of those that the server holds."""
    asked = urllib.request.Request(url + "/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked) as answer:
        return [model["id"] for model in json.load(answer)["data"] if model["id"].startswith("rolecall-")]


def with_adapter():
    return moved(add_adapter(load("tiny"), rank=4, alpha=3.0))


def test_two_versions_are_answered_at_the_same_time_each_by_its_own_adapter(url):
    policy, found, expected = with_adapter(), [None, None], []
    with ExitStack() as stack:
        sides = sides_of(policy, url, stack)
        assert len(sides) == 2
        for version, side in enumerate(sides, 1):
            side.load(merged_weights(moved(policy, seed=version)), version)
            expected.append(merged(policy))

        def ask(number):
            found[number] = sides[number].generate(ASKED)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(side.metrics()["sampling/probe_difference"] < 1e-5 for side in sides)
        assert sorted(name.rsplit("-", 1)[0] for name in adapters(url)) == ["rolecall-0-1", "rolecall-1-2"]
        # a version goes when another takes its place, and all go with the run
        sides[0].load(merged_weights(moved(policy, seed=3)), 3)
        assert sorted(name.rsplit("-", 1)[0] for name in adapters(url)) == ["rolecall-0-3", "rolecall-1-2"]
    assert not adapters(url)
    for version, whole in enumerate(expected, 1):
        with engine_on(url, whole) as engine:
            engine.load(dict(whole.model.named_parameters()), version)
            again = engine.generate(ASKED)
        assert [c.ids for c in found[version - 1]] == [c.ids for c in again]
        assert [c.policy_version for c in found[version - 1]] == [version] * len(again)
        pairs = zip(found[version - 1], again, strict=True)
        gaps = [
            abs(a - b)
            for one, other in pairs
            for a, b in zip(one.behaviour_logprobs, other.behaviour_logprobs, strict=True)
        ]
        assert max(gaps) < 1e-4
    assert [c.ids for c in found[0]] != [c.ids for c in found[1]]


def test_a_server_that_lost_an_adapter_gets_it_again(url, caplog):
    with ExitStack() as stack:
        policy = with_adapter()
        sides = sides_of(policy, url, stack, lanes=2)
        expected = sides[1].generate(ASKED)
        (name,) = (name for name in adapters(url) if name.startswith("rolecall-1-"))
        post(url, "/v1/unload_lora_adapter", {"lora_name": name})
        assert sides[1].generate(ASKED) == expected
    assert "it does not have the adapter of version 0" in caplog.text


def test_an_adapter_that_never_arrives_is_noticed_before_the_first_step(url, monkeypatch):

    def deaf(self, call):
        """As if the name were ignored, and the version confirmed."""

        async def plain(method, path, body=None, **how):
            said = await call(method, path, body, **how)
            for choice in said["choices"] if path == "/inference/v1/generate" else ():
                choice["weight_versions"] = [{"start": 0, "end": 1, "version": str(max(0, self._version))}]
            return said

        return plain

    monkeypatch.setattr(VllmAdapterDialect, "_named", deaf)
    with pytest.raises(UserError, match="did not arrive, though it was loaded twice"), ExitStack() as stack:
        sides_of(add_adapter(load("tiny"), rank=4), url, stack)


def test_a_rank_that_the_server_does_not_take_is_refused_with_a_sentence(url):
    with pytest.raises(
        UserError, match=r"takes adapters up to rank 8, but policy\.lora_rank is 16: .* --max-lora-rank"
    ):
        sides_of(add_adapter(load("tiny"), rank=16), url, ExitStack())


def test_steps_ahead_are_sampled_side_by_side_also_after_a_resume(url, tmp_path):
    """The checkpoint holds the adapters of versions that are still to sample."""
    how = {
        **RUN,
        "policy": {"lora_rank": 4},
        "ahead": 2,
        "engine": {"servers": [url], "worker_silence": 120, "server_patience": 60},
    }
    rolecall.rl(preset="grpo", out=str(tmp_path / "run"), save={"every": 3}, **how)
    run = rolecall.rl(out=str(tmp_path / "run"), resume=True, extend=3, quiet=True)
    assert [line["async/staleness"] for line in run.metrics] == [0, 1, 2, 2, 2, 2]
    assert all(line["sampling/probe_difference"] < 1e-5 for line in run.metrics)
    assert not adapters(url)
