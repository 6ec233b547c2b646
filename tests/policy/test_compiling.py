"""`policy.compile`: the same numbers from compiled layers, and the model otherwise as it was."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from rolecall.cli import main
from rolecall.config.parts import PolicyOptions, TrainerOptions
from rolecall.config.training import SFTOptions
from rolecall.policy.device import compile_layers
from rolecall.policy.heads import Critic
from rolecall.policy.load import load
from rolecall.policy.model import PolicyModel


@pytest.fixture
def traced(monkeypatch):
    """Layers are traced but not translated, which takes minutes."""
    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: plain(self, backend="eager", **how))
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_give_the_same_numbers_and_gradients(traced):
    policy = load("tiny")
    module = PolicyModel(policy.model, critic=Critic.from_policy(policy))
    names = list(module.state_dict())
    ids = torch.randint(0, 200, (3, 9), generator=torch.Generator().manual_seed(0))
    ask = partial(module, ids, torch.ones_like(ids, dtype=torch.bool), temperature=1.0)

    def found() -> list[torch.Tensor]:
        module.zero_grad()
        out = ask()
        (out.logprobs.sum() + out.values.sum()).backward()
        return [out.logprobs.detach(), out.values.detach(), policy.model.get_input_embeddings().weight.grad]

    before = found()
    assert compile_layers(module) == 8
    assert not module._trunk().is_flat
    for new, old in zip(found(), before, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-4)
    assert list(module.state_dict()) == names
    layer = policy.model.get_decoder().layers[0]
    assert layer._compiled_call_impl is not None
    assert copy.deepcopy(layer)._compiled_call_impl is None  # an engine's copy, and a saved model, are plain


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_command_trains_compiled_layers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sft", "--rows", "addition", "--steps", "2", "--batch", "4", "--policy.compile", "--out", "run"]) == 0


def test_it_is_not_for_sharded_models():
    with pytest.raises(ValueError, match=r"leave out train\.shard fsdp2"):
        SFTOptions(policy=PolicyOptions(compile=True), train=TrainerOptions(shard="fsdp2"))
