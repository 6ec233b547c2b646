import json
import shutil
import socket

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PhimoeConfig,
    RwkvConfig,
    RwkvForCausalLM,
    WhisperConfig,
)
from transformers.utils import logging as transformers_logging

from rolecall.policy import load as load_module
from rolecall.policy.heads import RewardModel
from rolecall.policy.load import LoadError, from_objects, load, save, stop_ids
from rolecall.policy.pretrained import without_dropout
from rolecall.policy.tiny import PAD_ID, TURN_END_ID, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model(seed=7).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def directory(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(name, match, **options):
    with pytest.raises(LoadError, match=match) as caught:
        load(name, **options)
    assert "\n" not in str(caught.value)


def test_tiny_is_built_in():
    loaded = load("tiny")
    assert loaded.stop_ids == (TURN_END_ID,)
    assert loaded.context_length == 1024
    assert loaded.name == "tiny"
    assert loaded.has_chat_template
    assert loaded.model.dtype == torch.float32
    assert torch.equal(loaded.model.lm_head.weight, tiny_model().lm_head.weight)


def test_a_directory(directory):
    loaded = load(directory)
    assert torch.equal(loaded.model.lm_head.weight, tiny_model(seed=7).lm_head.weight)
    assert loaded.tokenizer("hé").input_ids == list("hé".encode())
    assert loaded.name == str(directory)


def test_saving_and_loading_changes_nothing(tmp_path):
    loaded = load("tiny")
    save(loaded, tmp_path / "out")
    again = load(tmp_path / "out")
    assert all(torch.equal(t, again.model.state_dict()[name]) for name, t in loaded.model.state_dict().items())
    assert (again.stop_ids, again.context_length) == (loaded.stop_ids, loaded.context_length)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True
    assert loaded.model.config.use_cache is False


@pytest.mark.parametrize("source", ["tiny", "directory"])
def test_bfloat16(source, directory):
    loaded = load("tiny" if source == "tiny" else directory, dtype="bfloat16")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


def test_bfloat16_is_the_same_model_from_memory_and_from_disk(tmp_path):
    save(load("tiny"), tmp_path)
    ids = torch.tensor([list(b"positions are turned by float32 angles")])
    built, read = load("tiny", dtype="bfloat16").model, load(tmp_path, dtype="bfloat16").model
    assert torch.equal(built(ids).logits, read(ids).logits)
    assert built.model.rotary_emb.inv_freq.dtype == torch.float32


def test_unknown_dtype():
    refused("tiny", "unknown dtype 'float16'", dtype="float16")


def test_no_dropout_and_no_cache(tmp_path):
    config = GPT2Config(
        vocab_size=259, n_positions=64, n_embd=16, n_layer=2, n_head=2, eos_token_id=258, bos_token_id=258
    )
    assert config.attn_pdrop > 0
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load(tmp_path)
    loaded.model.train()
    ids = torch.tensor([[1, 2, 3]])
    output = loaded.model(ids)
    assert torch.equal(output.logits, loaded.model(ids).logits)
    assert output.past_key_values is None
    assert loaded.context_length == 64


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (GPT2Config(resid_pdrop=0.2, summary_first_dropout=0.3), {}),
        (LlamaConfig(attention_dropout=0.2), {}),
        (WhisperConfig(dropout=0.1, attention_dropout=0.2, encoder_layerdrop=0.3, decoder_layerdrop=0.4), {}),
        (MixtralConfig(router_jitter_noise=0.2), {}),
        (PhimoeConfig(attention_dropout=0.2, router_jitter_noise=0.2), {"router_jitter_noise": 0.2}),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_every_rate_of_dropout_is_zero(config, kept):
    """PhiMoE's jitter is the threshold of its router, noise or not."""
    noisy = {key for key in vars(config) if any(word in key for word in ("drop", "jitter"))}
    held = {key: value for key, value in vars(config).items() if key not in noisy}
    assert without_dropout(config) is config
    assert {key: getattr(config, key) for key in noisy} == dict.fromkeys(noisy, 0.0) | kept
    assert {key: value for key, value in vars(config).items() if key not in noisy} == held


SMALL = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2}
CAUSAL = {
    "bert": lambda: BertLMHeadModel(
        BertConfig(**SMALL, num_attention_heads=2, intermediate_size=32, max_position_embeddings=64, is_decoder=False)
    ),
    "rwkv": lambda: RwkvForCausalLM(RwkvConfig(**SMALL, attention_hidden_size=16, rescale_every=1)),
}


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_family_of_other_uses_is_a_causal_model_of_constant_weights(kind, tmp_path):
    torch.manual_seed(0)
    CAUSAL[kind]().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = load(tmp_path).model.eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.tensor([[1, 2, 3, 4]])
    whole, part = model(ids).logits, model(ids[:, :2]).logits
    torch.testing.assert_close(whole[:, :2], part)
    assert not torch.equal(whole[0, 0], whole[0, 1])
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("verbosity", [transformers_logging.WARNING, transformers_logging.INFO])
def test_reading_leaves_what_transformers_prints_as_it_was(directory, verbosity, tmp_path):
    RewardModel.from_policy(load(directory)).save(tmp_path / "rm")
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    try:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
        RewardModel.load(tmp_path / "rm")
        assert transformers_logging.get_verbosity() == verbosity
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity(before[0])
        if not before[1]:
            transformers_logging.disable_progress_bar()


def test_a_model_object_is_copied_without_its_dropout_and_its_gradients():
    given = tiny_model()
    given.config.attention_dropout = 0.5
    for layer in given.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ids = torch.tensor([list(b"abc")])
    expected = given.eval()(ids).logits
    expected.sum().backward()
    made = from_objects(given, tiny_tokenizer(), name="given", gradient_checkpointing=True).model
    assert all(parameter.grad is None for parameter in made.parameters())
    assert made.config.attention_dropout == 0.0
    made.train()
    torch.testing.assert_close(made(ids).logits, expected, rtol=0, atol=0)
    assert given.config.attention_dropout == 0.5
    assert given.lm_head.weight.grad is not None


def test_stop_ids_are_a_union(directory):
    edit(directory / "generation_config.json", eos_token_id=[10, TURN_END_ID, PAD_ID])
    assert load(directory).stop_ids == (TURN_END_ID, 10, PAD_ID)
    edit(directory / "generation_config.json", eos_token_id=10)
    assert load(directory).stop_ids == (TURN_END_ID, 10)


def test_stop_ids_without_a_tokenizer_eos():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    tokenizer.eos_token = None
    assert stop_ids(model, tokenizer) == (TURN_END_ID,)
    model.generation_config.eos_token_id = None
    assert stop_ids(model, tokenizer) == ()


def test_pad_equal_to_eos_keeps_the_stop_tokens_gradient(directory):
    edit(directory / "config.json", pad_token_id=TURN_END_ID)
    edit(directory / "tokenizer_config.json", pad_token="<|im_end|>")
    loaded = load(directory)
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id == TURN_END_ID
    trunk = loaded.model.model
    trunk(torch.tensor([[TURN_END_ID, 65, 66]])).last_hidden_state.pow(2).sum().backward()
    assert trunk.embed_tokens.weight.grad[TURN_END_ID].abs().sum() > 0


def test_a_tokenizer_without_pad_token(directory):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert load(directory).tokenizer.pad_token_id is None


def test_a_base_model_without_template(directory):
    (directory / "chat_template.jinja").unlink()
    assert not load(directory).has_chat_template


def test_gradient_checkpointing_changes_no_number():
    ids = torch.tensor([list(b"abc")])
    gradients = []
    for checkpointing in (False, True):
        model = load("tiny", gradient_checkpointing=checkpointing).model
        assert model.is_gradient_checkpointing == checkpointing
        model(ids).logits.logsumexp(-1).sum().backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(directory, value):
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 4] = value
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    refused(directory, r"'model\.layers\.2\.mlp\.up_proj\.weight' holds NaN or inf")


def test_a_tensor_that_is_not_there_is_named_not_invented(directory):
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    refused(directory, r"'model\.layers\.1\.mlp\.up_proj\.weight' is not in its files")


def test_a_tensor_of_the_wrong_shape(directory):
    edit(directory / "config.json", intermediate_size=440)
    refused(directory, "cannot be read")


def test_a_tokenizer_larger_than_the_head(directory):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(directory)
    refused(directory, "ids up to 259 but the head only 259 rows")


def test_missing_config(directory):
    (directory / "config.json").unlink()
    refused(directory, r"config\.json is missing")


def test_damaged_config(directory):
    (directory / "config.json").write_text("{")
    refused(directory, "cannot be read")


def test_truncated_weights(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])
    refused(directory, r"model\.safetensors is missing, cut short or damaged")


def test_missing_shard(directory):
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(directory, r"model-00002-of-00002\.safetensors is missing")


def test_damaged_index(directory):
    (directory / "model.safetensors.index.json").write_text("[]")
    refused(directory, r"index\.json is damaged")


def test_pickle_is_never_read(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(directory, r"pytorch_model\.bin: Pickle is never read")


def test_no_weights_at_all(directory):
    (directory / "model.safetensors").unlink()
    refused(directory, "no safetensors weights")


def test_missing_tokenizer(directory):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    refused(directory, "its tokenizer cannot be read")


def test_an_adapter_directory_is_recognised(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, "LoRA adapter")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c"])
def test_a_path_that_is_not_there(name):
    refused(name, "no such directory")


@pytest.mark.parametrize("name", ["nobody/no-such-model", "tinyy", "", "white space", "a--b/../c"])
def test_an_unknown_hub_id(name):
    refused(name, "tiny")


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch):
    def nowhere(host, port):
        raise socket.gaierror(-2, f"{host} is unknown here")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    monkeypatch.setattr(load_module, "getproxies", dict)
    monkeypatch.setattr(load_module.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(load_module, "read_pretrained", lambda *args, **kwargs: pytest.fail("tried all the same"))
    refused("somebody/some-model", "is unknown here")


def test_gguf_that_is_not_there(tmp_path):
    refused(tmp_path / "model.gguf", "no such file")


def test_gguf_that_is_none_leaves_nothing_in_the_cache(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    refused(tmp_path / "model.gguf", "cannot be read as GGUF", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn": "attn",
    "mlp": "ffn",
    "_proj": "",
    "attn.": "attn_",
    "ffn.": "ffn_",
}


def write_gguf(path, model, tokenizer):
    """A Llama and a byte-level tokenizer as llama.cpp writes them, with the two halves of a head interleaved."""
    config, writer = model.config, GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokenizer.convert_ids_to_tokens(range(259)), "<|endoftext|>"])
    writer.add_token_scores([0.0] * 260)
    writer.add_token_types([1] * 256 + [3] * 4)
    writer.add_eos_token_id(TURN_END_ID)
    writer.add_chat_template(tokenizer.chat_template)
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if "q_proj" in name or "k_proj" in name:
            weight = weight.view(-1, 2, config.head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_the_model_it_was_made_from(tmp_path):
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**SMALL | {"vocab_size": 260}, **sizes, intermediate_size=32, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    write_gguf(tmp_path / "model.gguf", model, tiny_tokenizer())
    loaded = load(tmp_path / "model.gguf", cache_dir=tmp_path / "cache")
    ids = torch.tensor([list(b"hello")])
    torch.testing.assert_close(loaded.model(ids).logits, model.eval()(ids).logits)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert (loaded.stop_ids, loaded.context_length) == ((TURN_END_ID,), 64)
    assert loaded.tokenizer("hé<|im_end|>").input_ids == [*"hé".encode(), TURN_END_ID]
    assert loaded.tokenizer.chat_template == tiny_tokenizer().chat_template
    for path in (tmp_path / "cache").rglob("*.json"):
        assert str(tmp_path) not in path.read_text(), path.name


def test_gguf_is_converted_once_per_content(tmp_path, monkeypatch):
    conversions = []

    def read(path):
        conversions.append(path.name)
        return tiny_model(seed=len(conversions)), tiny_tokenizer()

    monkeypatch.setattr(load_module, "read_gguf", read)
    monkeypatch.setenv("ROLECALL_CACHE", str(tmp_path / "cache"))
    for name, content in [("a.gguf", b"A"), ("same.gguf", b"A"), ("b.gguf", b"B")]:
        (tmp_path / name).write_bytes(content)
        load(tmp_path / name)
    assert conversions == ["a.gguf", "b.gguf"]
    assert len(list((tmp_path / "cache" / "gguf").iterdir())) == 2
