"""The same promises on a real chat model, read from GGUF."""

import time

import pytest
import torch

from rolecall.policy.load import load, save
from smollm2 import smollm2_path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def loaded():
    return load(smollm2_path())


def test_loads_with_template_and_stop_id(loaded):
    assert loaded.stop_ids == (2,)
    assert loaded.tokenizer.decode([2]) == "<|im_end|>"
    assert loaded.has_chat_template
    assert loaded.context_length == 8192


def test_answers_sensibly(loaded):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = loaded.model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert "Paris" in loaded.tokenizer.decode(answer[0, ids.shape[1] :])


def test_the_stop_token_learns_though_it_is_the_pad_token(loaded):
    assert loaded.tokenizer.pad_token_id == 2
    embeddings = loaded.model.get_input_embeddings()
    loaded.model.model(torch.tensor([[2, 5, 6]])).last_hidden_state.pow(2).sum().backward()
    assert embeddings.weight.grad[2].abs().sum() > 0
    loaded.model.zero_grad(set_to_none=True)


def test_the_second_load_is_quick(loaded):
    start = time.perf_counter()
    again = load(smollm2_path())
    assert time.perf_counter() - start < 4
    assert torch.equal(again.model.lm_head.weight, loaded.model.lm_head.weight)


def test_can_be_saved_again(loaded, tmp_path):
    save(loaded, tmp_path)
    again = load(tmp_path)
    assert all(torch.equal(t, again.model.state_dict()[name]) for name, t in loaded.model.state_dict().items())
    assert again.stop_ids == loaded.stop_ids
