"""What is had when nothing is said, and that the compiled functions are those that run where they can."""

import shutil

import pytest
import torch

from rolecall.policy import compiled, lora
from rolecall.policy.heads import RewardModel
from rolecall.policy.load import from_objects, load
from rolecall.policy.model import PolicyModel
from rolecall.rewards.model import RewardModelReward, RewardSettings, write_settings
from rolecall.rollout.open import open_engine


def test_models_are_read_in_full_precision_and_keep_their_activations(tmp_path):
    policy = load("tiny")
    assert not policy.model.is_gradient_checkpointing
    assert from_objects(policy.model, policy.tokenizer, name="it").model.dtype is torch.float32
    RewardModel.from_policy(policy).save(tmp_path)
    write_settings(tmp_path, RewardSettings())
    assert not RewardModel.load(tmp_path).trunk.is_gradient_checkpointing
    assert RewardModelReward.load(tmp_path).model.trunk.dtype is torch.float32
    assert (tmp_path / "reward_model.json").read_text().count("\n") > 2, "for people to read"


def test_an_adapter_scales_by_twice_its_rank():
    config = lora.add_adapter(load("tiny")).model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (16, 32)


def test_a_new_engine_has_the_first_weights():
    assert open_engine(load("tiny")).version == 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.usefixtures("fast_paths")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_there_is_a_compiler_every_part_of_an_update_is_compiled(dtype, monkeypatch):
    called, whole = set(), compiled.Kernels.call

    def call(self, name, *given):
        called.add(name)
        return whole(self, name, *given)

    monkeypatch.setattr(compiled.Kernels, "call", call)
    module = PolicyModel(load("tiny").model)
    ids = torch.randint(1, 200, (4, 12), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        module(ids, torch.ones_like(ids, dtype=torch.bool), temperature=1.0).logprobs.sum().backward()
    assert called >= {"norm", "norm_back", "attend", "attend_back", "gate", "gate_back", "score"}
