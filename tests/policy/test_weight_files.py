"""A model that is larger than a file may be: several files with an index, as transformers writes them, sharded or not."""

import json
from contextlib import ExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, MixtralConfig, MixtralForCausalLM

from rolecall.policy import lora, weight_files
from rolecall.policy.heads import RewardModel
from rolecall.policy.load import load, save
from rolecall.policy.model import PolicyModel
from rolecall.policy.sharding import mesh_of, shard

LIMIT = 1_000_000
"""Bytes; the built-in model has four times as many."""


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(weight_files, "FILE_BYTES", LIMIT)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def sharded(module, stack):
    shard(module, mesh_of(torch.device("cpu"), stack))
    return module


def test_a_model_larger_than_a_file_has_several_and_from_pretrained_reads_them(small_files, tmp_path):
    policy = load("tiny")
    save(policy, tmp_path)
    files = sorted(tmp_path.glob("model-0000*-of-0000*.safetensors"))
    assert len(files) > 3
    assert all(path.stat().st_size < LIMIT + 10_000 for path in files)
    assert not (tmp_path / "model.safetensors").exists()
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), policy.model.parameters(), strict=True))


@pytest.mark.parametrize("rank", [None, 4])
def test_a_model_in_parts_is_written_in_the_same_files_and_never_gathered_whole(
    small_files, tmp_path, monkeypatch, rank
):
    policy, most = load("tiny"), []
    if rank is not None:
        policy = lora.add_adapter(policy, rank=rank)
        torch.nn.init.normal_(next(p for name, p in policy.model.named_parameters() if "lora_B" in name))
    (lora.export if rank else save)(policy, tmp_path / "whole")
    gathered = weight_files.gathered

    def watched(weights, *, keep):
        found = gathered(weights, keep=keep)
        most.append(sum(w.nbytes for w in found.values()))
        return found

    monkeypatch.setattr(weight_files, "gathered", watched)
    with ExitStack() as stack:
        sharded(PolicyModel(policy.model), stack)
        lora.export_parts(policy, tmp_path / "parts")
        lora.export_parts(policy, None)
    assert max(most) <= LIMIT
    assert len(most) == 2 * len(list((tmp_path / "parts").glob("*.safetensors")))
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_reward_model_is_split_in_the_same_way(small_files, tmp_path):
    model = RewardModel.from_policy(load("tiny"), std=0.1)
    model.save(tmp_path / "whole")
    index = json.loads((tmp_path / "whole/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_parameters"] == sum(p.numel() for p in model.parameters())
    ids, lengths = torch.arange(5, 17).view(2, 6), torch.tensor([6, 4])
    scores = model(ids, lengths)
    assert torch.equal(RewardModel.load(tmp_path / "whole")(ids, lengths), scores)
    there = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole", num_labels=1)
    assert torch.equal(there.score.weight, model.head.weight)
    with ExitStack() as stack:
        sharded(model, stack).save(tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_family_whose_tensors_are_converted_when_saved_is_written_as_transformers_does(tmp_path):
    small = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    model = MixtralForCausalLM(MixtralConfig(**small))
    assert weight_files.files_hold(weight_files.outline_of(model)) is None
    model.save_pretrained(tmp_path / "whole")
    MixtralForCausalLM.from_pretrained(tmp_path / "whole")
    policy = load("tiny")
    policy = type(policy)(**{name: getattr(policy, name) for name in policy.__slots__} | {"model": model})
    with ExitStack() as stack:
        sharded(PolicyModel(model), stack)
        lora.export_parts(policy, tmp_path / "parts")
    name = "model.safetensors"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
