"""Any causal model of transformers trains, or is refused with a sentence; none is silently wrong."""

import logging

import pytest
import torch
from family_models import FAMILIES, check_family, our_logprobs, own_logprobs, rows_of, save_tiny, tiny_of

from rolecall.errors import UserError
from rolecall.policy.load import load, make_trainable
from rolecall.policy.model import PolicyModel

QUICK = [
    "bloom",
    "falcon",
    "gemma2",
    "gpt2",
    "gpt_oss",
    "llama4_text",
    "mamba",
    "mamba2",
    "opt",
    "phi",
    "phimoe",
    "qwen2_moe",
    "rwkv",
    "bert",
    "cohere",
    "granite",
]
REFUSED = {
    "cpmant": "not causal",
    "gemma4_unified_assistant": "token ids fails",
    "prophetnet": "one state per token",
    "reformer": "token ids fails",
    "xlnet": "not causal",
}
NOT_BUILT = {
    "gemma3n": "its pictures need the package timm",
    "gemma4_assistant": "it drafts for another model and has no default configuration",
    "musicgen": "it writes sound from its decoder's configuration, not its own",
    "musicgen_melody": "it writes sound from its decoder's configuration, not its own",
}

pytestmark = pytest.mark.filterwarnings("ignore")  # families warn of themselves


@pytest.mark.parametrize("family", QUICK)
def test_a_family_takes_a_step(family, tmp_path):
    check_family(family, tmp_path, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in NOT_BUILT and f not in REFUSED])
def test_every_family_takes_two_steps(family, tmp_path):
    check_family(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_trained_is_refused(family, tmp_path):
    with pytest.raises(UserError, match=REFUSED[family]):
        check_family(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", NOT_BUILT)
def test_what_cannot_be_built_is_known(family):
    with pytest.raises(Exception):  # noqa: B017, PT011  it names no type
        tiny_of(family)


def test_the_attention_that_was_chosen_is_said_where_it_is_not_sdpa(tmp_path, caplog):
    save_tiny("gpt_oss", tmp_path)
    with caplog.at_level(logging.INFO, logger="rolecall"):
        assert load(tmp_path).model.config._attn_implementation == "eager"
    assert "attention is eager" in caplog.text
    with pytest.raises(UserError, match="scaled_dot_product_attention"):
        load(tmp_path, attention="sdpa")
    save_tiny("llama", tmp_path / "llama")
    assert load(tmp_path / "llama").model.config._attn_implementation == "sdpa"
    assert load(tmp_path / "llama", attention="eager").model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["granite", "hyperclovax", "cohere", "gemma2"])
def test_scales_and_caps_of_logits_are_the_models_own(family):
    """Granite divides by the very setting that HyperCLOVA X multiplies by."""
    model = tiny_of(family).eval()
    row = rows_of((17,))[0]
    make_trainable(model)
    expected = own_logprobs(model, row)
    torch.testing.assert_close(our_logprobs(PolicyModel(model), [row])[0].double(), expected, atol=2e-4, rtol=1e-4)


def test_positions_that_roberta_cannot_use_are_not_context(tmp_path):
    own = save_tiny("roberta", tmp_path)
    policy = load(tmp_path)
    assert policy.context_length == 126  # of 128 rows, those up to the pad id 1 are no positions
    row = 5 + torch.arange(126)
    expected = own_logprobs(own, row)
    torch.testing.assert_close(
        our_logprobs(PolicyModel(policy.model), [row])[0].double(), expected, atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize("family", ["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"])
def test_sparse_attention_is_not_used_beyond_the_tokens_it_keeps(family, tmp_path):
    """With more tokens than it keeps, padding changes which it keeps, and so the scores."""
    save_tiny(family, tmp_path)
    policy = load(tmp_path)
    assert policy.context_length == policy.model.config.index_topk == 64


def test_logits_that_are_changed_in_an_unknown_way_are_refused():
    model = tiny_of("llama")
    model.register_forward_hook(lambda _m, _a, output: output.__setitem__("logits", output.logits**3) or output)
    with pytest.raises(UserError, match="changes its logits"):
        PolicyModel(model)


def test_a_head_that_is_more_than_a_matrix_is_refused():
    model = tiny_of("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(UserError, match="plain matrix"):
        PolicyModel(model)


def test_attention_that_looks_ahead_is_refused():
    model = tiny_of("bert")
    model.config.is_decoder = False
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
        if hasattr(module, "is_decoder"):
            module.is_decoder = False
    with pytest.raises(UserError, match="not causal"):
        PolicyModel(model)
