"""Versions of an adapter side by side on servers: each is answered by its own weights, and only adapters are sent."""

import asyncio
import threading
from contextlib import ExitStack

import pytest
from served import Options, app_of, requests, serving
from test_weight_sync import Noting, moved, with_adapter

from rolecall.config.parts import EngineOptions
from rolecall.config.rl import RLOptions
from rolecall.errors import UserError
from rolecall.jobs.models import samplers
from rolecall.policy.lora import merged, merged_weights
from rolecall.remote.adapter import adapter_alone
from rolecall.rollout.engine import weights_hash
from rolecall.rollout.open import open_engine
from rolecall.serving.app import _AS_SENT
from rolecall.train.timing import Timer


@pytest.fixture
def sides():
    """Makes engines for so many steps at once over the servers; they are closed in the end."""
    with ExitStack() as stack:
        yield lambda policy, options, lanes: samplers(
            policy, options, lanes, timer=Timer(), updater=None, stack=stack.enter_context(ExitStack())
        )


def here(policy, version):
    """An engine in this process with the policy as it is."""
    engine = open_engine(merged(policy), name="native")
    engine.version = version
    return engine


class Gathering(Noting):
    """Answers nothing until requests of two versions are there."""

    both = threading.Barrier(2, timeout=30)

    async def _generate_several(self, request):
        if b'"step":7,' in request.body:
            await asyncio.to_thread(self.both.wait)
        return await super()._generate_several(request)


@pytest.mark.parametrize("sync", ["directory", "broadcast"])
def test_two_versions_answer_at_the_same_time_each_by_its_own_adapter(sync):
    app, policy = app_of(kind=Gathering), with_adapter()
    with serving(app) as url, ExitStack() as stack:
        one, other = samplers(policy, Options(url, sync=sync), 2, timer=Timer(), updater=None, stack=stack)
        alone = []
        for version, side in enumerate((one, other), 1):
            side.load(merged_weights(moved(policy)), version)
            alone.append(here(policy, version))
        slot = app._slots[1]
        assert slot.given[-1] == weights_hash(adapter_alone(policy), _AS_SENT)
        assert len(slot.given) == 3  # its adapter, with noise and without, and the new one: the rest is shared
        found = [None, None]

        def ask(number):
            found[number] = (one, other)[number].generate(requests(step=7))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [engine.generate(requests(step=7)) for engine in alone]
        assert found[0] != found[1]
        # a version goes when another takes its place, and all go with the run
        one.load(merged_weights(moved(policy)), 3)
        assert one.generate(requests()) == here(policy, 3).generate(requests())
        assert (app.engine.version, slot.engine.version) == (3, 2)
        stack.close()
        assert not app._slots


def test_a_server_that_lost_a_version_gets_it_again(sides):
    app, policy = app_of(), with_adapter()
    with serving(app) as url:
        _, other = sides(policy, Options(url), 2)
        other.load(merged_weights(moved(policy)), 5)
        app._slots.pop(1).close()  # as after a restart
        app._kept.clear()
        assert other.generate(requests()) == here(policy, 5).generate(requests())


def test_a_version_that_is_confirmed_and_not_loaded_is_noticed(sides):
    class Deaf(Noting):
        async def _update_weights(self, request):
            if self._is_slot and len(self.given) >= 2:
                self.given.append("")
                self.engine.version = 1
                return {"version": 1, "hash": weights_hash(adapter_alone(policy), _AS_SENT)}
            return await super()._update_weights(request)

    policy = with_adapter()
    with serving(app_of(kind=Deaf)) as url:
        one, other = sides(policy, Options(url), 2)
        moved(policy)
        one.load(merged_weights(policy), 1)
        with pytest.raises(UserError, match="version 1 did not arrive, though it was loaded twice"):
            other.load(merged_weights(policy), 1)


def test_where_servers_hold_one_version_they_are_shared_out(sides, monkeypatch):
    policy = with_adapter()
    with serving(app_of()) as url, serving(app_of()) as old:
        monkeypatch.setattr("rolecall.serving.app._VERSIONS", 1)
        for urls in ((url, old), (url,)):
            found = sides(policy, RLOptions(engine=EngineOptions(servers=urls)), 2)
            assert [len(engine.fleet.servers) for engine in found] == [1] * len(urls)
