import json
import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from rolecall.policy import load as load_module
from rolecall.policy.load import LoadError, load, save, stop_ids
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
