"""The memory of a plan: counted as the models themselves count."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rolecall.config.memory import TINY, activation_bytes, adapter_parameters, config_of, memory_line, shape_of
from rolecall.config.merge import resolve
from rolecall.config.rl import RLOptions
from rolecall.config.training import DPOOptions, SFTOptions
from rolecall.policy.flat import FlatTrunk
from rolecall.policy.load import load
from rolecall.policy.lora import add_adapter

SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(tied):
    config = SMOLLM2 | {"tie_word_embeddings": tied, "head_dim": 32}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    assert shape_of(config).parameters == sum(p.numel() for p in model.parameters())


def test_the_built_in_model_and_its_adapter():
    policy = load("tiny")
    shape = shape_of(TINY)
    assert shape.parameters == sum(p.numel() for p in policy.model.parameters())
    with_adapter = add_adapter(policy, rank=4, alpha=8)
    assert adapter_parameters(shape, 4) == sum(p.numel() for p in with_adapter.model.parameters() if p.requires_grad)


@pytest.mark.parametrize("working", [torch.float32, torch.bfloat16])
def test_activations_are_what_the_flat_pass_keeps(working, monkeypatch):
    monkeypatch.setenv("ROLECALL_KERNELS", "1")
    torch.manual_seed(0)
    config = {**TINY, "num_key_value_heads": 2, "intermediate_size": 256}
    model = Qwen2ForCausalLM(Qwen2Config(**config))
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    ids = torch.randint(0, 200, (8, 128))
    held: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = FlatTrunk(model)(ids, torch.ones_like(ids, dtype=torch.bool), dtype=working)
    shape = shape_of(config)
    expected = ids.numel() * shape.layers * activation_bytes(shape, working.itemsize)
    assert out.requires_grad
    assert sum(held.values()) == pytest.approx(expected, rel=0.15)


def lines(options) -> str:
    return next(line for line in options.plan().splitlines() if line.startswith("memory"))


def of(kind, model, **settings):
    return resolve(kind, [("test", {"model": str(model), **settings})]).options


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return tmp_path


def test_a_plan_lists_the_parts(directory):
    plain = lines(of(SFTOptions, directory))
    assert plain.startswith("memory of each process, about: weights 0.5 GB, gradients 0.5 GB, optimiser 1.1 GB, act")
    assert "reference" not in plain
    assert "reference 0.5 GB" in lines(of(DPOOptions, directory))
    critic = lines(of(RLOptions, directory, algorithm={"name": "ppo", "critic": "separate", "kl_coef": 0.1}))
    assert "weights 1.1 GB, gradients 1.1 GB, optimiser 2.2 GB, reference 0.5 GB" in critic
    assert critic.endswith("plus 0.5 GB of the sampler's weights")


def test_parts_are_divided_among_processes_only_when_sharded(directory, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "weights 0.5 GB, gradients 0.5 GB, optimiser 1.1 GB" in lines(of(SFTOptions, directory))
    sharded = lines(of(SFTOptions, directory, train={"shard": "fsdp2"}))
    assert "weights 0.1 GB, gradients 0.1 GB, optimiser 0.3 GB, gathered layers 0.3 GB" in sharded
    adapter = lines(of(SFTOptions, directory, train={"shard": "fsdp2"}, policy={"lora_rank": 8}))
    assert "gathered layers 0.1 GB" in adapter, "two layers of 14 MB; 113 MB of embedding, without a gradient"


def test_a_reward_model_is_a_part_too_and_whole_if_it_scores_beside_training(directory, monkeypatch):
    assert "reward model 0.5 GB" in lines(of(RLOptions, "tiny", reward=[str(directory)]))
    assert "reward model" not in lines(of(RLOptions, "tiny", reward=["exact"]))
    monkeypatch.setenv("WORLD_SIZE", "4")
    how = {"reward": [str(directory)], "train": {"shard": "fsdp2"}}
    assert "reward model 0.1 GB" in lines(of(RLOptions, "tiny", **how))
    assert "reward model 0.5 GB" in lines(of(RLOptions, "tiny", **how, ahead=1))


def test_what_makes_it_less(directory):
    adapter = lines(of(SFTOptions, directory, policy={"lora_rank": 8, "quantize": "int4"}))
    assert "gradients 10 MB, optimiser 20 MB" in adapter
    recomputed = lines(of(SFTOptions, directory, policy={"gradient_checkpointing": True}))
    assert "activations of 8,192 tokens 0.8 GB" in recomputed
    assert "activations of 8,192 tokens 4.0 GB" in lines(of(SFTOptions, directory, policy={"mixed_precision": "bf16"}))


def test_a_model_that_is_not_here_or_is_of_another_family(tmp_path):
    assert "16 bytes per parameter" in memory_line(of(SFTOptions, "somebody/something"))
    assert shape_of({**SMOLLM2, "num_local_experts": 8}) is None
    assert shape_of({"model_type": "gpt2", "n_embd": 768}) is None


def test_a_downloaded_model_is_found_in_the_hub_s_cache(tmp_path, monkeypatch):
    place = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(SMOLLM2))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert config_of("some/model") == SMOLLM2
