"""A real chat model on a real vLLM server in bfloat16, trained in float32."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from vllm_server import engine_on, vllm

import rolecall
from rolecall.policy.load import load
from rolecall.types import Request, Sampling
from smollm2 import smollm2_path

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def url():
    with vllm(smollm2_path(), "--dtype", "bfloat16") as found:
        yield found


def off(url):
    """|difference| of each sampled token's log-prob to the trainer's, which computes in float32."""
    policy = load(smollm2_path())

    def chat(text):
        said = [{"role": "user", "content": text}]
        return policy.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]

    prompts = [tuple(policy.tokenizer("The capital of France is a city that")["input_ids"])]
    prompts += [tuple(chat(text)) for text in ("Say hello.", "Name a colour.", "What is 17 times 3?")]
    sampling = Sampling(max_new_tokens=24, stop_ids=())
    with engine_on(url, policy) as engine:
        found = engine.generate(
            [Request(prompt_ids=ids, sampling=sampling, n=4, seed=1, prompt=i) for i, ids in enumerate(prompts)]
        )
    differences = []
    for completion in found:
        prompt = prompts[completion.prompt]
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*prompt, *completion.ids]])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        differences += (own - torch.tensor(completion.behaviour_logprobs)).abs().tolist()
    return differences


def test_log_probs_are_the_trainers_to_bfloat16(url, record_property):
    differences = off(url)
    mean = math.fsum(differences) / len(differences)
    record_property("off, mean and max", (mean, max(differences)))
    assert 0 < mean < 0.05


def test_log_probs_are_the_trainers_in_float32(record_property):
    with vllm(smollm2_path(), "--dtype", "float32") as address:
        differences = off(address)
    mean = math.fsum(differences) / len(differences)
    record_property("off, mean and max", (mean, max(differences)))
    assert mean < 1e-5


def test_a_few_steps_of_grpo(url, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Say hello."}\n{"prompt": "Name a colour."}\n')
    run = rolecall.rl(
        preset="grpo",
        model=str(smollm2_path()),
        rows=str(rows),
        reward=f"{Path(__file__).parents[1] / 'remote' / 'light_rewards.py'}:vowels",
        steps=2,
        prompts=2,
        samples=4,
        sampling={"max_new_tokens": 8},
        optim={"lr": 1e-5},
        engine={"servers": [url]},
        quiet=True,
        out=str(tmp_path / "run"),
    )
    assert len(run.metrics) == 2
    for line in run.metrics:
        assert 0 < line["sampling/probe_difference"] < 0.05
        assert 0 < line["sampling/sampling_logp_difference/mean"] < 0.15  # of 64 tokens; the band of bfloat16
        assert 0 < line["sampling/weight_ess"] <= 1
