"""The built-in model on a real vLLM server in float32: what is drawn, what is said of it, and planted faults."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
import torch
from vllm_server import engine_on, post, vllm

import rolecall
from rolecall.errors import UserError
from rolecall.jobs.demo import TASK, mixed_demonstrations
from rolecall.policy.load import load, save
from rolecall.remote import vllm as dialect
from rolecall.remote.vllm import VllmDialect
from rolecall.types import Finish, Request, Sampling

pytestmark = pytest.mark.vllm

REWARD = f"{Path(__file__).parents[1] / 'remote' / 'light_rewards.py'}:vowels"
RUN = {
    "model": "tiny",
    "rows": "addition",
    "reward": REWARD,
    "prompts": 4,
    "samples": 4,
    "sampling": {"max_new_tokens": 12},
    "optim": {"lr": 1e-3},
    "quiet": True,
}


@pytest.fixture(scope="module")
def url():
    with vllm("tiny") as found:
        yield found


def changed(seed, by=0.1):
    """The built-in model with other weights, whose distributions are far from even."""
    policy = load("tiny")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return policy


def weights(policy):
    return dict(policy.model.named_parameters())


def trainer_logprobs(policy, request, completion):
    """What the model that trains says of a completion, in float64."""
    ids = torch.tensor([[*request.prompt_ids, *completion.ids]])
    with torch.no_grad():
        logits = policy.model(ids).logits[0].double() / request.sampling.scoring_temperature
    at = logits[len(request.prompt_ids) - 1 : -1]
    for i, support in enumerate(completion.supports or ()):
        allowed = torch.frombuffer(bytearray(support), dtype=torch.int32).long()
        outside = torch.ones(at.shape[1], dtype=torch.bool)
        outside[allowed] = False
        at[i, outside] = -torch.inf
    return at.log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0},
        {"temperature": 0.7, "top_k": 8},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_log_probs_are_the_trainers_to_1e_5(url, sampling):
    policy = changed(1)
    settings = Sampling(max_new_tokens=24, stop_ids=(), **sampling)
    asked = [
        Request(prompt_ids=tuple(range(60, 64 + i)), sampling=settings, n=4, prompt=i, seed=1) for i in range(0, 45, 9)
    ]
    with engine_on(url, policy) as engine:
        found = iter(engine.generate(asked))
    worst = 0.0
    for request in asked:
        for completion in (next(found) for _ in range(request.n)):
            said = torch.tensor(completion.behaviour_logprobs, dtype=torch.float64)
            worst = max(worst, float((said - trainer_logprobs(policy, request, completion)).abs().max()))
            if completion.supports is not None and settings.top_p is None:
                assert {len(s) // 4 for s in completion.supports} == {settings.top_k}
    assert worst < 1e-5


def chi_square(counts, expected):
    """The probability of a deviation at least as large; cells with fewer than 5 expected are one."""
    order = expected.argsort(descending=True)
    counts, expected = counts[order].double(), expected[order].double()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected.clamp_min(1e-9)).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0), statistic / 2))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_is_drawn_is_distributed_as_enumerated(url, temperature):
    """Two tokens in a row, against the product of all their probabilities."""
    policy, prompt, count = changed(2, by=0.2), (72, 105, 33), 6000
    sampling = Sampling(temperature=temperature, max_new_tokens=2, stop_ids=())
    asked = [Request(prompt_ids=prompt, sampling=sampling, n=count // 20, prompt=i, seed=4) for i in range(20)]
    with engine_on(url, policy) as engine:
        found = engine.generate(asked)
    size = 259
    drawn = torch.tensor([a * size + b for a, b in (c.ids for c in found)])
    counts = torch.bincount(drawn, minlength=size * size)

    def enumerated(t):
        pairs = torch.tensor([(*prompt, a) for a in range(size)])
        with torch.no_grad():
            logits = policy.model(pairs).logits.double() / t
        first = logits[0, len(prompt) - 1].softmax(-1)
        return (first[:, None] * logits[:, -1].softmax(-1)).flatten() * count

    assert chi_square(counts, enumerated(temperature)) > 1e-3
    assert chi_square(counts, enumerated(temperature + 0.1)) < 1e-6


def test_an_answer_is_the_same_alone_and_among_others_and_when_it_is_asked_again(url):
    policy = changed(3)
    sampling = Sampling(max_new_tokens=16, stop_ids=())
    asked = [Request(prompt_ids=(65 + i, 66), sampling=sampling, n=6, prompt=i, seed=2) for i in range(4)]
    with engine_on(url, policy) as engine:
        together = engine.generate(asked)
        alone = engine.generate(
            [Request(prompt_ids=(67, 66), sampling=sampling, n=1, first_sample=3, prompt=2, seed=2)]
        )
    assert [c.ids for c in alone] == [c.ids for c in together if (c.prompt, c.sample) == (2, 3)]
    assert len({c.ids for c in together}) == len(together)


def test_more_prompts_than_fit_a_batch_are_answered(url):
    """6,000 tokens of prompts at once: the CPU build would die if one of them were split over two batches."""
    sampling = Sampling(max_new_tokens=2, stop_ids=())
    asked = [
        Request(prompt_ids=tuple((i + j) % 250 for j in range(300)), sampling=sampling, prompt=i) for i in range(20)
    ]
    with engine_on(url, load("tiny")) as engine:
        assert len(engine.generate(asked)) == 20


def test_answers_end_as_requested(url):
    prompt, policy = (72, 105), load("tiny")
    with engine_on(url, policy) as engine:

        def one(**sampling):
            (found,) = engine.generate([Request(prompt_ids=prompt, sampling=Sampling(**sampling), seed=8)])
            return found

        stopped = one(max_new_tokens=200, stop_ids=tuple(range(60)))
        assert stopped.finish is Finish.STOP
        assert [i < 60 for i in stopped.ids] == [False] * (len(stopped.ids) - 1) + [True]
        worded = one(max_new_tokens=400, stop_ids=(), stop_strings=("a", "e"))
        assert worded.finish is Finish.STOP_STRING
        assert one(max_new_tokens=7, stop_ids=()).finish is Finish.LENGTH
        flight = engine.open()
        flight.add(
            Request(prompt_ids=prompt, sampling=Sampling(max_new_tokens=1000, stop_ids=()), n=2),
            deadline=time.monotonic() + 1.0,
        )
        ended = []
        while flight:
            ended += [completion for _, completion in flight.step()]
        assert [c.finish for c in ended] == [Finish.TIMEOUT] * 2


def test_grpo_learns_the_demos_task_as_with_the_native_engine(url, tmp_path):
    """`rolecall demo`'s: after SFT on demonstrations of which half sort the wrong way round."""
    sft = {"batch": 64, "optim": {"lr": 2e-3, "warmup_steps": 20, "schedule": "cosine"}, "quiet": True}
    start = rolecall.sft(model="tiny", rows=mixed_demonstrations(), steps=100, out=str(tmp_path / "sft"), **sft)

    def rewards(name, **engine):
        run = rolecall.rl(
            preset="grpo",
            model=str(start.path),
            rows=TASK,
            steps=20,
            prompts=32,
            samples=8,
            sampling={"max_new_tokens": 8},
            optim={"lr": 2e-4, "warmup_steps": 5},
            out=str(tmp_path / name),
            engine=engine,
            quiet=True,
        )
        assert run.metrics[-1].get("sampling/probe_difference", 0.0) < 1e-5
        assert max(line["sampling/sampling_logp_difference/mean"] for line in run.metrics) < 1e-5
        found = [line["reward"] for line in run.metrics]
        return sum(found[:3]) / 3, sum(found[-5:]) / 5

    (begun, ended), (_, native) = rewards("vllm", servers=[url]), rewards("native")
    assert ended > begun + 0.15
    assert abs(ended - native) < 0.1


def test_an_adapter_is_trained_and_arrives(url, tmp_path):
    lora = {"policy": {"lora_rank": 4}, "optim": {"lr": 1e-2}, "algorithm": {"kl_coef": 0.01}}
    run = rolecall.rl(preset="grpo", steps=3, out=str(tmp_path / "run"), engine={"servers": [url]}, **{**RUN, **lora})
    assert all(line["sampling/probe_difference"] < 1e-5 for line in run.metrics)
    assert run.metrics[-1]["weights_moved"] > 0


# -- faults that are planted, and must be noticed within a step --------------------------------------------------------


def stale_head(self, call, published):
    """vLLM's own reload, which answers 200."""

    async def load():
        await self.pause(call)
        kwargs = {"weights_path": str(published.directory)}
        await call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        await call("POST", "/update_weight_version", {"new_version": str(published.version)})
        await self.resume(call)

    return load()


def stale_prefixes(self, call, published):
    """Everything but the caches."""

    async def load():
        await call("POST", "/pause", query={"mode": "wait", "clear_cache": "false"})
        kwargs = {"directory": str(published.directory)}
        await call("POST", "/collective_rpc", {"method": "rolecall_load", "kwargs": kwargs})
        await call("POST", "/update_weight_version", {"new_version": str(published.version)})
        await self.resume(call)

    return load()


def skipped(self, call, published):
    """Says that it did."""

    async def load():
        await call("POST", "/update_weight_version", {"new_version": str(published.version)})
        await self.resume(call)

    return load()


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (stale_head, "a head that is tied to the embedding"),
        (stale_prefixes, "a cache was not cleared"),
        (skipped, "the load was confirmed and not done"),
    ],
)
def test_a_load_that_is_confirmed_and_wrong_is_noticed_at_once(url, monkeypatch, fault, cause):
    with engine_on(url, changed(4)) as engine:
        if fault is stale_prefixes:
            monkeypatch.setattr(VllmDialect, "pause", lambda self, call: asyncio.sleep(0))
        monkeypatch.setattr(VllmDialect, "load", fault)
        after = changed(4, by=0.1005)  # a small step, as optimisers take
        engine._scorer = scorer_of(after)
        with pytest.raises(UserError, match="no server is left that samples") as error:
            engine.load(weights(after), 1)
    assert url in str(error.value)
    assert re.search(cause, str(error.value))


def scorer_of(policy):
    """What the trainer would say after a step."""
    from rolecall.policy.model import PolicyModel
    from rolecall.remote.probe import scored

    module = PolicyModel(policy.model)
    return lambda batch, wanted: scored(module, batch, wanted, temperature=1.0, token_budget=8192)


def test_a_load_that_fails_once_is_done_again(url, monkeypatch, caplog):
    with engine_on(url, changed(5)) as engine:
        good, calls = VllmDialect.load, []

        def once(self, call, published):
            calls.append(published.version)
            return (skipped if len(calls) == 1 else good)(self, call, published)

        monkeypatch.setattr(VllmDialect, "load", once)
        after = changed(6)
        engine._scorer = scorer_of(after)
        engine.load(weights(after), 1)
        assert calls == [1, 1]
        assert "version 1 is loaded again" in caplog.text
        request = Request(prompt_ids=(80, 81), sampling=Sampling(max_new_tokens=8, stop_ids=()))
        (found,) = engine.generate([request])
        assert (
            float((torch.tensor(found.behaviour_logprobs) - trainer_logprobs(after, request, found)).abs().max()) < 1e-5
        )


def test_another_temperature_is_noticed_before_the_first_step(url, monkeypatch, tmp_path):
    body = dialect._body

    def deaf(request, name):
        made = body(request, name)
        made["sampling_params"]["temperature"] = 1.0
        return made

    monkeypatch.setattr(dialect, "_body", deaf)
    save(changed(9, by=0.2), tmp_path / "model")
    hot = {**RUN, "model": str(tmp_path / "model"), "sampling": {"max_new_tokens": 12, "temperature": 0.7}}
    with pytest.raises(UserError, match=r"does not draw at temperature 0\.7"):
        rolecall.rl(preset="grpo", steps=3, out=str(tmp_path / "run"), engine={"servers": [url]}, **hot)


def test_another_tokenizer_is_refused_at_the_start(url, tmp_path):
    policy = load("tiny")
    save(policy, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    said = json.loads(file.read_text())
    vocabulary = said["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    file.write_text(json.dumps(said))
    with pytest.raises(UserError, match="another tokenizer"), engine_on(url, load(str(tmp_path / "model"))):
        pass


def test_weights_that_somebody_else_gave_the_server_are_replaced(url, caplog):
    request = Request(prompt_ids=(80, 81), sampling=Sampling(max_new_tokens=8, stop_ids=()))
    policy = changed(7)
    with engine_on(url, policy) as engine:
        expected = engine.generate([request])
        post(url, "/update_weight_version", {"new_version": "99"})
        assert engine.generate([request]) == expected
    assert "it answered with version 99 of the weights, not 0" in caplog.text


def test_a_server_that_was_restarted_with_old_weights_gets_the_new_ones(caplog):
    policy = changed(8)
    request = Request(prompt_ids=(80, 81), sampling=Sampling(max_new_tokens=8, stop_ids=()))
    with vllm("tiny") as first:
        port = int(first.rpartition(":")[2])
        engine = engine_on(first, policy, worker_silence=30.0)
        sampling = engine.__enter__()
        expected = sampling.generate([request])
    try:
        with vllm("tiny", port=port):
            (found,) = sampling.generate([request])
            assert [found] == expected
    finally:
        engine.__exit__(None, None, None)
    assert "is lost, its requests are sent again" in caplog.text
