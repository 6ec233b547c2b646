"""The vLLM dialect against what vLLM 0.32.0 answered on the built-in model: every body must be the recorded one."""

import asyncio
import copy
import json
from array import array
from math import exp
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from rolecall.errors import UserError
from rolecall.policy.load import load
from rolecall.policy.lora import add_adapter
from rolecall.remote.adapter import adapter_alone
from rolecall.remote.dialect import Published, ServerLostError, ServerRefusedError
from rolecall.remote.vllm import VllmDialect, seed_of
from rolecall.types import Finish, Request, Sampling

RECORDED = json.loads((Path(__file__).parent / "vllm-0.32.0.json").read_text())
PLAIN = Request(prompt_ids=(72, 105), sampling=Sampling(max_new_tokens=3), n=2, seed=3, step=2, prompt=1)


class Replay:
    """Answers as the recorded server did, and refuses everything else. `change` alters what it says on a path."""

    def __init__(self, change=None):
        self.change, self.asked = change or {}, []

    async def __call__(self, method, path, body=None, *, query=None, seconds=None, read=True):
        body = None if body is None else {k: v for k, v in body.items() if k != "request_id"}
        self.asked.append(path)
        if path in self.change:
            said = self.change[path]
            if isinstance(said, Exception):
                raise said
            if not callable(said):
                return said
        for known, where, asked, given, said in RECORDED:
            if (known, where, asked, given) == (method, path, query, body):
                said = copy.deepcopy(said)
                if path in self.change:
                    self.change[path](said)
                return said
        raise AssertionError(f"{method} {path} {query} {body} was not recorded")


def run(work):
    return asyncio.run(work)


def about(**change):
    return run(VllmDialect().about(Replay({f"/{path}": said for path, said in change.items()})))


def answers(request, call=None, seconds=None):
    return run(VllmDialect().generate(call or Replay(), [request], seconds=seconds))


def test_it_is_recognised_by_who_owns_the_model():
    assert run(VllmDialect().recognises(Replay()))
    assert not run(VllmDialect().recognises(Replay({"/v1/models": {"data": [{"owned_by": "rolecall"}]}})))
    assert not run(VllmDialect().recognises(Replay({"/v1/models": ServerRefusedError(404, "no")})))


def test_what_it_says_of_itself():
    from rolecall.jobs.models import fingerprint

    found = about()
    assert (found.software, found.engine, found.dtype) == ("vllm 0.32.0", "vllm", "float32")
    assert (found.context_length, found.vocabulary, found.policy_version) == (512, 259, 15)
    assert found.tokenizer == fingerprint(load("tiny"))
    assert about(weight_info={"weight_version": "default"}).policy_version is None


def test_another_version_is_warned_about_and_used(caplog):
    assert about(version={"version": "0.40.1"}).software == "vllm 0.40.1"
    assert "vLLM 0.40.1 is outside the tested range (0.32 up to before 0.33)" in caplog.text


@pytest.mark.parametrize(
    ("path", "said", "part"),
    [
        ("server_info", ServerRefusedError(404, "no"), "it has no /server_info"),
        ("is_paused", ServerRefusedError(404, "no"), "it has no /is_paused"),
        ("inference/v1/generate", ServerRefusedError(404, "no"), "it has no /inference/v1/generate"),
        ("collective_rpc", ServerLostError("500: no attribute"), "without rolecall's worker extension"),
        (
            "server_info",
            {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}},
            "its log-probs are raw_logprobs",
        ),
    ],
)
def test_a_server_that_cannot_be_used_says_what_to_do(path, said, part):
    with pytest.raises(UserError, match="rolecall serve MODEL --vllm") as error:
        about(**{path: said})
    assert part in str(error.value)


def test_a_cpu_server_that_splits_prompts_is_refused():
    def splits(said):
        said["vllm_config"]["scheduler_config"]["enable_chunked_prefill"] = True

    with pytest.raises(UserError, match="--no-enable-chunked-prefill"):
        about(server_info=splits)


def test_one_that_a_killed_run_left_paused_goes_on():
    call = Replay({"/is_paused": {"is_paused": True}, "/resume": {}})
    run(VllmDialect().about(call))
    assert call.asked.index("/resume") < call.asked.index("/inference/v1/generate")


def test_answers_carry_their_tokens_log_probs_and_version():
    first, second = answers(PLAIN)
    assert first.ids == (30, 64, 25)
    assert first.behaviour_logprobs[0] == pytest.approx(-5.907416, abs=1e-6)
    assert (first.sample, second.sample, first.policy_version, first.finish) == (0, 1, 15, Finish.LENGTH)


def test_the_tokens_that_could_be_drawn_are_recorded():
    sampling = Sampling(max_new_tokens=2, temperature=0.7, top_k=3, top_p=0.8)
    (found,) = answers(Request(prompt_ids=(72, 105), sampling=sampling, seed=3, prompt=4))
    for token, support in zip(found.ids, found.supports, strict=True):
        ids = list(array("i", support))
        assert ids == sorted(ids)
        assert token in ids
        assert 1 <= len(ids) <= 3
    assert exp(found.behaviour_logprobs[0]) > 1 / 5


def test_greedy_answers_are_drawn_once():
    sampling = Sampling(max_new_tokens=2, temperature=0, stop_ids=(105,))
    found = answers(Request(prompt_ids=(72, 105), sampling=sampling, n=2, prompt=5))
    assert [(c.ids, c.finish, c.sample) for c in found] == [((105,), Finish.STOP, 0), ((105,), Finish.STOP, 1)]


def test_a_stop_string_ends_an_answer_and_stays_in_it():
    strings = ("a", "e", "i", "o", "t", "n", "s", "r", "1", "2", "3", "b", "c", "d")
    sampling = Sampling(max_new_tokens=9, stop_strings=strings)
    (found,) = answers(Request(prompt_ids=(72, 105), sampling=sampling, seed=5, prompt=6))
    assert found.finish is Finish.STOP_STRING
    assert bytes(found.ids[-1:]).decode() == "e"


def test_weights_without_a_version_are_nobodys():
    def restarted(said):
        said["choices"][0]["weight_versions"] = [{"version": "default", "start": 0, "end": 3}]

    first, _ = answers(PLAIN, Replay({"/inference/v1/generate": restarted}))
    assert first.policy_version == -1


def test_an_answer_of_several_versions_is_refused():
    def mixed(said):
        spans = [{"version": "14", "start": 0, "end": 1}, {"version": "15", "start": 1, "end": 3}]
        said["choices"][1]["weight_versions"] = spans

    with pytest.raises(ValueError, match=r"versions \[14, 15\] of the weights in one answer"):
        answers(PLAIN, Replay({"/inference/v1/generate": mixed}))


def test_log_probs_of_other_tokens_are_refused():
    def shifted(said):
        said["choices"][0]["token_ids"][0] += 1

    with pytest.raises(ValueError, match="log-probs of other tokens"):
        answers(PLAIN, Replay({"/inference/v1/generate": shifted}))


def test_a_deadline_ends_an_answer_as_it_is():
    class Slow(Replay):
        async def __call__(self, method, path, body=None, **how):
            if path == "/inference/v1/abort_requests":
                assert body == {"request_ids": [f"generate-tokens-{self.name}"]}
                self.aborted.set()
                return None
            self.name, self.aborted = body["request_id"], asyncio.Event()
            await self.aborted.wait()
            said = await super().__call__(method, path, body, **how)
            for choice in said["choices"]:
                choice["finish_reason"] = "abort"
            return said

    assert [c.finish for c in answers(PLAIN, Slow(), seconds=0.01)] == [Finish.TIMEOUT] * 2


def test_scores_end_with_those_that_go_through_the_prefix_cache():
    (found,) = run(VllmDialect().score(Replay(), [(72, 105, 33, 10)]))
    assert len(found) == 3
    assert found == pytest.approx([-6.069314, -5.700818, -5.402006], abs=1e-5)

    def stale(said):
        if said.get("prompt_logprobs") is None:
            for at in said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                at["logprob"] -= 1

    (other,) = run(VllmDialect().score(Replay({"/inference/v1/generate": stale}), [(72, 105, 33, 10)]))
    assert other == pytest.approx([x - 1 for x in found])


def test_weights_are_loaded_while_nothing_is_in_flight(tmp_path):
    done = {f"/{path}": {} for path in ("pause", "collective_rpc", "update_weight_version", "resume")}
    call = Replay(done)
    published = Published(directory=tmp_path, file=tmp_path / "w", version=4, hash="h", shared=True)
    assert run(VllmDialect().load(call, published)) is None
    assert call.asked == list(done)


def test_an_adapter_beside_others_has_a_name_that_requests_give(tmp_path):
    policy = add_adapter(load("tiny"), rank=4, alpha=8.0)
    save_file(adapter_alone(policy), tmp_path / "w")
    base = Published(directory=tmp_path, file=tmp_path / "b", version=0, hash="h", shared=True, keep=True)
    names, asked = [], []

    async def call(method, path, body=None, **how):
        asked.append((path, body))
        if path == "/v1/load_lora_adapter":
            names.append(body["lora_name"])
        if path == "/inference/v1/generate":
            if body["model"] not in names[-1:]:
                raise ServerRefusedError(404, "no such model")
            said = await Replay()("POST", path, {k: v for k, v in body.items() if k != "model"})
            return {**said, "model": body["model"]}
        return {"results": ["h"]}

    one = VllmDialect().beside(1)
    for version in (4, 5):
        place = tmp_path / str(version)
        place.mkdir()
        published = Published(directory=place, file=tmp_path / "w", version=version, hash="a", shared=True, base=base)
        run(one.load(call, published))
        assert [c.policy_version for c in run(one.generate(call, [PLAIN], seconds=None))] == [version] * PLAIN.n
    assert len(set(names)) == 2
    assert ("/v1/unload_lora_adapter", {"lora_name": names[0]}) in asked
    saved = load_file(tmp_path / "5" / "peft" / "adapter_model.safetensors")
    expected = get_peft_model_state_dict(policy.model, save_embedding_layers=False)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], 2.0 * t if "lora_B" in name else t) for name, t in expected.items())
    names.append("another's")
    with pytest.raises(ServerLostError, match="it does not have the adapter of version 5"):
        run(one.generate(call, [PLAIN], seconds=None))


def test_weights_that_a_server_cannot_see_are_a_sentence(tmp_path):
    published = Published(directory=tmp_path, file=tmp_path / "w", version=4, hash="h", shared=False)
    with pytest.raises(UserError, match=r"engine\.weights_directory"):
        run(VllmDialect().load(Replay(), published))


@pytest.mark.parametrize(
    ("sampling", "part"),
    [
        (Sampling(), None),
        (Sampling(temperature=0, top_p=0.9), None),
        (Sampling(top_k=20, top_p=0.9, min_p=0.1), None),
        (Sampling(top_p=0.9), "sampling.top_k"),
        (Sampling(top_k=5000), "sampling.top_k"),
        (Sampling(top_k=20, logprobs="full"), "sampling.logprobs drawn"),
        (Sampling(temperature=0.001), "0.001 is neither"),
    ],
)
def test_what_it_cannot_record_exactly_is_refused(sampling, part):
    why = VllmDialect().unable(sampling)
    assert (why is None) if part is None else (part in why)


def test_seeds_are_those_of_the_answer_however_it_is_asked_for():
    def seed(sample=0, **other):
        request = {"prompt_ids": (1, 2), "sampling": Sampling(), "seed": 1, "step": 2, "prompt": 3} | other
        return seed_of(Request(**request, first_sample=sample))

    assert seed(sample=4) == seed() + 4
    others = [seed(seed=2), seed(step=1), seed(prompt=4), seed(prompt_ids=(1, 2, 3))]
    assert len({seed(), *others}) == 5
    assert all(0 <= s < 2**63 for s in others)
