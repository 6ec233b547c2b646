from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolecall.policy.tiny import TURN_END_ID, TURN_START_ID, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_about_a_million_parameters():
    assert 0.8e6 < sum(p.numel() for p in tiny_model().parameters()) < 1.2e6


def test_same_seed_same_weights_whatever_the_global_random_state():
    torch.manual_seed(1)
    first = weights(tiny_model(seed=3))
    torch.manual_seed(2)
    assert equal(first, weights(tiny_model(seed=3)))
    assert not equal(first, weights(tiny_model(seed=4)))


def test_building_leaves_the_global_random_state_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tiny_model()
    assert torch.equal(before, torch.get_rng_state())


def test_matrices_are_drawn_smaller_where_they_write_to_the_residual_stream():
    for name, weight in weights(tiny_model()).items():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones(128)), name
        else:
            size = 0.02 / 8**0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert abs(float(weight.std()) / size - 1) < 0.02, name
            assert abs(float(weight.mean())) < 0.02 * size, name


def test_a_fresh_model_is_almost_uniform():
    ids = torch.tensor([list(b"The quick brown fox")])
    logprobs = tiny_model()(ids).logits.log_softmax(-1)
    assert (logprobs.exp() * -logprobs).sum(-1).min() > 5.4  # ln 259 = 5.56


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_gives_back_any_text(text):
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_ids_are_the_bytes_themselves(text):
    if "<|" not in text:
        assert bytes(TOKENIZER(text).input_ids) == text.encode()


def test_every_byte_has_its_token():
    text = "".join(map(chr, range(0x3000))) + "\U0001f600\U0010ffff"
    assert bytes(TOKENIZER(text).input_ids) == text.encode()
    assert TOKENIZER.decode(list(text.encode())) == text


def test_special_tokens_come_back_too_and_can_be_left_out():
    ids = TOKENIZER("<|im_start|>hé<|im_end|>").input_ids
    assert ids == [TURN_START_ID, *"hé".encode(), TURN_END_ID]
    assert TOKENIZER.decode(ids) == "<|im_start|>hé<|im_end|>"
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "hé"


def test_chat_template_is_append_only():
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    texts = [TOKENIZER.apply_chat_template(messages[:k], tokenize=False) for k in range(1, 5)]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))
    asked = TOKENIZER.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert texts[2].startswith(asked)


def test_saved_and_read_by_the_auto_classes(tmp_path):
    model = tiny_model(seed=1)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    assert equal(weights(model), weights(AutoModelForCausalLM.from_pretrained(tmp_path)))
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "one  two , ñ 's\r\n<|im_end|>\n"
    assert again(text).input_ids == TOKENIZER(text).input_ids
    assert again.decode(again(text).input_ids) == text
    assert again.chat_template == TOKENIZER.chat_template
    assert again.eos_token_id == TURN_END_ID


@pytest.mark.parametrize("row", [256, 258])
def test_every_embedding_row_learns(row):
    model = tiny_model()
    model.model(torch.tensor([[row, 65]])).last_hidden_state.pow(2).sum().backward()
    assert model.model.embed_tokens.weight.grad[row].abs().sum() > 0
