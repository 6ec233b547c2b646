"""The same promises on a real chat model, read from GGUF."""

import pytest
import torch

from rolecall.maths.roles import Role
from rolecall.policy import load as load_module
from rolecall.policy import lora
from rolecall.policy.load import load, save
from rolecall.policy.render import continue_conversation, prefix_preserving, render
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


def test_the_second_load_converts_nothing(loaded, monkeypatch):
    monkeypatch.setattr(load_module, "_convert_gguf", None)
    again = load(smollm2_path())
    assert torch.equal(again.model.lm_head.weight, loaded.model.lm_head.weight)


def test_can_be_saved_again(loaded, tmp_path):
    save(loaded, tmp_path)
    again = load(tmp_path)
    assert all(torch.equal(t, again.model.state_dict()[name]) for name, t in loaded.model.state_dict().items())
    assert again.stop_ids == loaded.stop_ids


CHAT = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue, or  azure:\n\nhello"},
    {"role": "user", "content": "Another?"},
]


def test_roles_of_a_conversation(loaded):
    rendered = render(loaded.tokenizer, CHAT, train="assistant", stop_ids=loaded.stop_ids)
    content = [i for i, role in zip(rendered.ids, rendered.roles, strict=True) if role == Role.CONTENT]
    assert loaded.tokenizer.decode(content) == CHAT[1]["content"]
    assert rendered.roles.count(Role.STOP) == 1
    assert list(rendered.ids) == loaded.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]


def test_a_conversation_goes_on_behind_sampled_ids(loaded):
    assert prefix_preserving(loaded.tokenizer)
    prompt = render(loaded.tokenizer, CHAT[:1])
    answer = loaded.tokenizer(CHAT[1]["content"]).input_ids
    ids, roles = (*prompt.ids, *answer, 2), (*prompt.roles, *[2] * len(answer), 3)
    after = continue_conversation(loaded.tokenizer, ids, roles, CHAT[2:], history=CHAT[:2])
    assert after.ids == render(loaded.tokenizer, CHAT).ids
    said = [i for i, role in zip(after.ids, after.roles, strict=True) if role == Role.OBSERVATION]
    assert loaded.tokenizer.decode(said) == "Another?"


def test_adapter_reference_and_merge():
    ids = torch.tensor([list(range(100, 120))])
    adapted = lora.add_adapter(load(smollm2_path()), rank=4)
    with torch.no_grad():
        before = adapted.model(ids).logits.log_softmax(-1)
        for parameter in adapted.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
        after = adapted.model(ids).logits.log_softmax(-1)
        with lora.reference(adapted.model) as model:
            assert torch.equal(model(ids).logits.log_softmax(-1), before)
        assert (after - before).abs().max() > 1e-2
        merged = lora.merged(adapted).model(ids).logits.log_softmax(-1)
    torch.testing.assert_close(merged, after, atol=2e-3, rtol=0)
