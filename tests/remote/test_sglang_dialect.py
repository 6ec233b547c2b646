"""The SGLang dialect against a conversation written from SGLang's documentation (sglang-0.5.json), and end to end against a server
that answers in these shapes with the numbers of our own engine. No real SGLang was ever asked."""

import asyncio
import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from served import KEY, Options, app_of, engine_on, listening, requests, serving
from sglang_server import SglangApp

import rolecall
from rolecall.config.parts import EngineOptions
from rolecall.errors import UserError
from rolecall.experience.updates import read_updates
from rolecall.jobs.models import sampler
from rolecall.policy.load import load
from rolecall.remote.dialect import Published, ServerRefusedError
from rolecall.remote.sglang import SglangDialect
from rolecall.types import Finish, Request, Sampling

RECORDED = json.loads((Path(__file__).parent / "sglang-0.5.json").read_text())
REWARD = f"{Path(__file__).parent / 'light_rewards.py'}:vowels"
PLAIN = Request(prompt_ids=(72, 105), sampling=Sampling(max_new_tokens=3), n=2, seed=3, step=2, prompt=1)
WORDS = ("a", "e", "i", "o", "t", "n", "s", "r", "1", "2", "3", "b", "c", "d")


class Replay:
    """Answers what was written down, and refuses everything else. `change` alters what is said on a path."""

    def __init__(self, change=None):
        self.change, self.asked = change or {}, []

    async def __call__(self, method, path, body=None, *, query=None, seconds=None, read=True):
        self.asked.append(path)
        change = self.change.get(path)
        if isinstance(change, Exception):
            raise change
        if (method, path) == ("GET", "/update_weights_from_disk"):
            raise ServerRefusedError(405, "Method Not Allowed")
        if isinstance(change, dict):
            return change
        body = None if body is None else {k: v for k, v in body.items() if k != "rid"}
        (said,) = [copy.deepcopy(said) for *asked, said in RECORDED if asked == [method, path, query, body]]
        if change is not None:
            change(said)
        return said


def run(work):
    return asyncio.run(work)


def about(**change):
    return run(SglangDialect().about(Replay({f"/{path}": said for path, said in change.items()})))


def answers(request, change=None):
    return run(SglangDialect().generate(Replay(change and {"/generate": change}), [request], seconds=None))


def test_it_is_recognised_by_who_owns_the_model():
    assert run(SglangDialect().recognises(Replay()))
    assert not run(SglangDialect().recognises(Replay({"/v1/models": {"data": [{"owned_by": "vllm"}]}})))
    assert not run(SglangDialect().recognises(Replay({"/v1/models": ServerRefusedError(404, "no")})))


def test_what_it_says_of_itself_and_that_it_is_untested(caplog):
    found = about()
    assert (found.software, found.engine, found.dtype) == ("sglang 0.5.9", "sglang", "float32")
    assert (found.context_length, found.vocabulary, found.policy_version) == (1024, None, 15)
    assert "has not been run against a real server of this kind; it is probed and used" in caplog.text
    assert "seeds" not in caplog.text


def test_one_that_draws_without_seeds_is_warned_about(caplog):
    about(server_info=lambda said: said.update(enable_deterministic_inference=False))
    assert "so a run cannot be repeated: start it with --enable-deterministic-inference" in caplog.text


@pytest.mark.parametrize(
    "path",
    ["server_info", "model_info", "generate", "pause_generation", "continue_generation", "update_weights_from_disk"],
)
def test_an_endpoint_that_is_missing_is_named_with_what_works_without(path):
    with pytest.raises(UserError, match=f"it has no /{path}, .* as it is, `rolecall eval --model URL/v1` works"):
        about(**{path: ServerRefusedError(404, "Not Found")})


def test_a_dtype_that_says_nothing_is_refused():
    with pytest.raises(UserError, match="it says that it computes in auto; start it with --dtype bfloat16"):
        about(server_info=lambda said: said.update(dtype="auto"))


def test_answers_carry_their_tokens_log_probs_and_version():
    first, second = answers(PLAIN)
    assert first.ids == (193, 85, 210)
    assert first.behaviour_logprobs[0] == pytest.approx(-5.851314, abs=1e-6)
    assert (first.sample, second.sample, first.policy_version, first.finish) == (0, 1, 15, Finish.LENGTH)


def test_an_answer_ends_with_its_stop_token_or_the_tokens_of_its_stop_string():
    stops = Sampling(max_new_tokens=40, stop_ids=tuple(range(100, 259)))
    (found,) = answers(Request(prompt_ids=(72, 105), sampling=stops, seed=5, prompt=7))
    assert (found.ids, found.finish) == ((225,), Finish.STOP)
    strings = Sampling(max_new_tokens=9, stop_strings=WORDS)
    (found,) = answers(Request(prompt_ids=(72, 105), sampling=strings, seed=5, prompt=6))
    assert (found.ids[-1], found.finish) == (257, Finish.STOP_STRING)


def test_a_stop_that_nobody_asked_for_is_a_sentence():
    """SGLang has no way to stop at given tokens only: its model's own end an answer too."""

    def ended(said):
        said[0]["meta_info"]["finish_reason"] = {"type": "stop", "matched": 256}

    sampling = Sampling(max_new_tokens=2, temperature=0, stop_ids=(33,))
    with pytest.raises(UserError, match=r"ends answers at token 256, .* though sampling.stop_ids do not have it"):
        answers(Request(prompt_ids=(72, 105), sampling=sampling, prompt=5), ended)


def test_weights_without_a_version_are_nobodys():
    def restarted(said):
        said[0]["meta_info"]["weight_version"] = "default"

    assert [c.policy_version for c in answers(PLAIN, restarted)] == [-1, 15]


def test_log_probs_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match="log-probs of other tokens"):
        answers(PLAIN, lambda said: said[0]["output_ids"].reverse())


def test_a_deadline_ends_answers_as_they_are():
    class Slow(Replay):
        async def __call__(self, method, path, body=None, **how):
            if path == "/abort_request":
                self.rids.remove(body["rid"])
                if not self.rids:
                    self.aborted.set()
                return None
            self.rids, self.aborted = set(body["rid"]), asyncio.Event()
            await self.aborted.wait()
            said = await super().__call__(method, path, body, **how)
            for answer in said:
                answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
            return said

    found = run(SglangDialect().generate(Slow(), [PLAIN], seconds=0.01))
    assert [c.finish for c in found] == [Finish.TIMEOUT] * 2


def test_scores_end_with_those_that_go_through_the_prefix_cache():
    ids = tuple(range(60, 75))
    (found,) = run(SglangDialect().score(Replay(), [ids]))
    assert len(found) == 14

    def stale(said):
        if len(said["meta_info"]["input_token_logprobs"]) < len(ids):
            for at in said["meta_info"]["input_token_logprobs"][1:]:
                at[0] -= 1

    (other,) = run(SglangDialect().score(Replay({"/generate": stale}), [ids]))
    assert other == pytest.approx([x - (i >= 6) for i, x in enumerate(found)])


def test_weights_that_a_server_cannot_see_or_take_are_a_sentence(tmp_path):
    published = Published(directory=tmp_path, file=tmp_path / "w", version=4, hash="h", shared=False)
    with pytest.raises(UserError, match=r"engine\.weights_directory"):
        run(SglangDialect().load(Replay(), published))
    call = Replay({"/update_weights_from_disk": {"success": False, "message": "Failed to update weights"}})
    with pytest.raises(ServerRefusedError, match="Failed to update weights"):
        run(SglangDialect().load(call, replace(published, shared=True)))


@pytest.mark.parametrize(
    ("sampling", "part"),
    [
        (Sampling(), None),
        (Sampling(temperature=0, top_p=0.9), None),
        (Sampling(top_p=0.9, logprobs="full"), None),
        (Sampling(top_k=20), "leave out top_k=20, or set sampling.logprobs full"),
        (Sampling(top_p=0.9, min_p=0.1), "leave out top_p=0.9, min_p=0.1"),
    ],
)
def test_cuts_whose_log_probs_it_does_not_give_are_refused(sampling, part):
    why = SglangDialect().unable(sampling)
    assert (why is None) if part is None else (part in why)


def test_its_name_is_for_servers():
    with pytest.raises(ValueError, match=r"engine.name sglang is for servers"):
        EngineOptions(name="sglang")


def shape(said):
    """What a thing is made of, whatever its numbers and texts are."""
    if isinstance(said, dict):
        return {name: shape(value) for name, value in said.items()}
    if isinstance(said, list):
        return [shape(value) for value in said]
    return "number" if isinstance(said, int | float) else type(said).__name__


# -- a server that answers so ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url():
    app = app_of(kind=SglangApp)
    app.weight_version = "15"
    with serving(app) as address:
        yield address


def test_the_server_of_these_tests_answers_as_written_down(url):
    import httpx

    for method, path, query, body, said in RECORDED:
        more = {"rid": [str(i) for i in range(2)][: len(said)]} if isinstance(said, list) else {}
        head = {"Authorization": f"Bearer {KEY}"}
        sent = None if body is None else body | more
        found = httpx.request(method, url + path, params=query, json=sent, headers=head).json()
        assert shape(found) == shape(said), path


def test_it_samples_from_the_weights_that_train_and_repeats_itself(url):
    with engine_on(url) as (engine, _):
        found = engine.generate(requests(3, temperature=0.7))
        assert found == engine.generate(requests(3, temperature=0.7))
        assert {c.policy_version for c in found} == {3}
        assert engine.metrics()["sampling/probe_difference"] < 1e-5
        with pytest.raises(UserError, match="a server of the kind sglang gives log-probs at the temperature"):
            engine.generate(requests(1, top_k=5))


def test_a_run_on_it_is_weighed_and_recorded(url, tmp_path):
    """Its kernels are its own, so the ratio to the trainer weighs every answer, unless that is turned off."""
    how = {"model": "tiny", "reward": REWARD, "steps": 2, "prompts": 2, "samples": 4, "quiet": True}
    how |= {"sampling": {"max_new_tokens": 8}, "optim": {"lr": 1e-3}, "engine": {"servers": [url]}}
    one = rolecall.rl(out=str(tmp_path / "one"), **how)
    for line in one.metrics:
        assert line["sampling/weight"] == pytest.approx(1.0, abs=1e-3)
        assert line["sampling/sampling_logp_difference/mean"] < 1e-4
        assert line["sampling/probe_difference"] < 1e-5
    recorded = read_updates(sorted((one.path / "updates").iterdir())[-1])
    assert all(row.weights is not None and len(row.weights) == len(row.verdicts) for row in recorded)


class Raw(SglangApp):
    """As if started with SGLANG_RETURN_ORIGINAL_LOGPROB: draws as told, and gives the log-probs of temperature 1."""

    async def _drawn(self, request):
        (found,) = await super()._drawn(request)
        scores = await self._scores(request.prompt_ids + found.ids)
        return [replace(found, behaviour_logprobs=tuple(scores[len(scores) - len(found.ids) :]))]


class Skipped(SglangApp):
    """Confirms weights and keeps those that it has."""

    async def _take(self, weights, version):
        self.engine.version = version


class Paused(SglangApp):
    """Left paused by a run that was killed."""

    def __init__(self, *given, **how):
        super().__init__(*given, **how)
        self.service.pause(abort=True).result()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Raw, r"does not draw at temperature 0.5, .* the log-probs that it gives for its tokens are .* from those of"),
        (Skipped, "version 0 did not arrive, though it was loaded twice"),
    ],
)
def test_a_server_that_does_otherwise_is_noticed_before_the_first_step(kind, sentence):
    loaded = load("tiny")
    with torch.no_grad():  # the built-in model is all but uniform, whatever the temperature
        for parameter in loaded.model.parameters():
            parameter.mul_(2.0)
    with serving(app_of(kind=kind)) as address:
        options = Options(address)
        options.sampling = replace(options.sampling, temperature=0.5)
        with pytest.raises(UserError, match=sentence):
            sampler(loaded, options)


def test_one_that_a_killed_run_left_paused_goes_on():
    with serving(app_of(kind=Paused)) as address:
        sampler(load("tiny"), Options(address)).close()


def test_one_that_speaks_nonsense_is_a_sentence():
    class Broken(SglangApp):
        async def _prompt(self, ids, start):
            return [{"logprob": 1.0}]

    with serving(app_of(kind=Broken)) as address, pytest.raises(UserError, match="its answer cannot be read"):
        sampler(load("tiny"), Options(address, server_patience=0.2))


def test_nothing_of_another_kind_is_taken_for_it():
    """A server that answers nothing but an empty page to everything."""

    async def start():
        async def page(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()

        return await asyncio.start_server(page, "127.0.0.1", 0)

    with listening(start) as address, pytest.raises(UserError, match=r"known here \(rolecall or vllm or sglang\)"):
        sampler(load("tiny"), Options(address))
