"""Faults planted in servers that confirm everything: each is noticed at the start or at the next sync, and named."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from served import Options, app_of, requests, serving

import rolecall
from rolecall.errors import UserError
from rolecall.jobs.models import sampler
from rolecall.policy.load import load
from rolecall.rollout.engine import weights_hash
from rolecall.serving.app import _UPDATE, App, read_published
from rolecall.serving.dialect import read

REWARD = f"{Path(__file__).parent / 'light_rewards.py'}:vowels"


class Planted(App):
    """Loads something else than it is told while the fault is `armed`, and confirms the hash and version that it was told."""

    armed = False
    loads = 0

    async def _update_weights(self, request):
        told = read(_UPDATE, request.body).update_info
        weights = read_published(Path(told.directory))
        self.loads += 1
        if self.armed:
            self.take(weights, told.version)
        else:
            self.held = weights
            self.engine.load(weights, told.version)
        return {"version": told.version, "hash": weights_hash(weights, self.engine.dtype)}

    def take(self, weights, version):
        raise NotImplementedError


class Skipped(Planted):
    """Keeps the weights that it has."""

    def take(self, weights, version):
        self.engine.version = version


class StaleHead(Planted):
    """Takes all weights but the embedding, which is also the head."""

    def take(self, weights, version):
        kept = {name: tensor for name, tensor in self.held.items() if "embed" in name}
        assert kept
        self.engine.load(weights | kept, version)


class Base(Planted):
    """Takes the weights of the start, as if an adapter had never arrived."""

    def take(self, weights, version):
        self.engine.load(dict(load("tiny").model.named_parameters()), version)


class StaleCache(Planted):
    """Goes on with what it cached under the weights before."""

    def take(self, weights, version):
        kept = dict(self.engine._conversations)
        self.engine.load(weights, version)
        self.engine._conversations.update(kept)


class Hot(App):
    """Draws at another temperature than it is told, and reports the log-probs of that."""

    armed = False
    factor = 0.5

    async def _sampled(self, asked, seconds=None):
        if self.armed:
            asked = [
                replace(r, sampling=replace(r.sampling, temperature=self.factor * r.sampling.temperature))
                for r in asked
            ]
        return await super()._sampled(asked, seconds)


class SecretlyHot(Hot):
    """The same, but reports the log-probs of the temperature that it was told."""

    async def _sampled(self, asked, seconds=None):
        found = await super()._sampled(asked, seconds)
        prompts = {r.prompt: r.prompt_ids for r in asked}
        honest = []
        for c in found:
            scores = await self._scores(prompts[c.prompt] + c.ids)
            honest.append(replace(c, behaviour_logprobs=tuple(scores[len(scores) - len(c.ids) :])))
        return honest


def moved(loaded, factor=1.1):
    """The model's weights after a step, in place."""
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(factor)
    return dict(loaded.model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (Skipped, "to the last bit: the load was confirmed and not done"),
        (StaleHead, "a part of its weights is stale, such as a head that is tied to the embedding"),
        (StaleCache, "it draws with a cache of other weights"),
    ],
)
def test_a_server_that_takes_weights_wrongly_is_noticed_at_the_next_sync(kind, cause):
    """It is loaded once more, then left out; the run continues without it, and ends when it was the last."""
    app, loaded = app_of(kind=kind), load("tiny")
    with contextlib.ExitStack() as stack:
        url, other = stack.enter_context(serving(app)), stack.enter_context(serving(app_of()))
        engine = sampler(loaded, Options(url, other))
        stack.callback(engine.close)
        app.armed, loads = True, app.loads
        engine.load(moved(loaded), 1)
        assert app.loads == loads + 2
        out, healthy = engine.fleet.servers
        assert "version 1 did not arrive, though it was loaded twice" in out.out
        assert cause in out.out
        assert healthy.ready
        assert [c.policy_version for c in engine.generate(requests(2))] == [1] * 6
    app = app_of(kind=kind)
    with serving(app) as url:
        engine = sampler(loaded, Options(url))
        app.armed = True
        with pytest.raises(
            UserError, match=f"no server is left that samples from the weights that are trained: {url}: "
        ):
            engine.load(moved(loaded), 1)
        engine.close()


@pytest.mark.parametrize("kind", [Skipped, StaleHead, StaleCache, Base])
def test_a_server_that_never_takes_weights_rightly_is_noticed_before_the_first_step(kind):
    app = app_of(kind=kind)
    app.armed, app.held = True, dict(load("tiny").model.named_parameters())
    with serving(app) as url, pytest.raises(UserError, match="version 0 did not arrive, though it was loaded twice"):
        sampler(load("tiny"), Options(url))


def test_an_adapter_that_never_arrives_is_named():
    app, loaded = app_of(kind=Base), load("tiny")
    with serving(app) as url:
        engine = sampler(loaded, Options(url))
        engine.load(moved(loaded), 1)
        app.armed = True
        with pytest.raises(UserError, match="the run began with: it was restarted, or an adapter never arrived"):
            engine.load(moved(loaded), 2)
        engine.close()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Hot, "the tokens it draws have log-probs .* from those it scores them with"),
        (SecretlyHot, "does not draw at temperature 1, as it is told"),
    ],
)
def test_a_server_that_draws_at_another_temperature_is_noticed_before_the_first_step(kind, sentence):
    """The built-in model is all but uniform, whatever the temperature: here it is made to have preferences."""
    loaded = load("tiny")
    moved(loaded, 2.0)
    app = app_of(kind=kind)
    app.armed = True
    with serving(app) as url, pytest.raises(UserError, match=sentence) as raised:
        sampler(loaded, Options(url))
    assert url in str(raised.value)


class Relapsing(App):
    """Is probed with the right weights; when it is asked for answers, it has gone back to those it was started with."""

    async def _sampled(self, asked, seconds=None):
        if asked[0].step == 1:
            version = self.engine.version
            self.engine.load(dict(load("tiny").model.named_parameters()), version)
        return await super()._sampled(asked, seconds)


def test_a_server_that_goes_back_to_old_weights_ends_the_run_in_that_step(tmp_path):
    with serving(app_of(kind=Relapsing)) as url, pytest.raises(UserError, match="tripwire engine-mismatch at step 2"):
        rolecall.rl(
            model="tiny",
            reward=REWARD,
            steps=4,
            prompts=4,
            samples=4,
            sampling={"max_new_tokens": 12},
            optim={"lr": 1e-2},
            engine={"servers": [url]},
            out=str(tmp_path / "run"),
            quiet=True,
        )


def test_two_servers_of_different_versions_are_never_mixed():
    """One says that it has other weights than it was given: what it answers is refused, and it is loaded again."""
    app, measured = app_of(), {}
    with serving(app) as url, serving(app_of()) as other:
        engine = sampler(load("tiny"), Options(url, other))
        engine._tell = lambda name, value: measured.update({name: measured.get(name, 0) + value})
        expected = engine.generate(requests())
        app.engine.version = 7
        assert engine.generate(requests()) == expected
        assert measured["servers/stale"] == 1
        engine.close()
