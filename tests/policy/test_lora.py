import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolecall.policy import lora
from rolecall.policy.load import LoadError, load

IDS = torch.tensor([[*b"hello world"]])


def logprobs(model):
    with torch.no_grad():
        return model(IDS).logits.log_softmax(-1)


def trained(loaded, *, seed=0):
    """The same model after some made-up training of its adapter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return loaded


def test_only_the_adapter_trains():
    adapted = lora.add_adapter(load("tiny"), rank=4)
    names = [name for name, parameter in adapted.model.named_parameters() if parameter.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    assert any("down_proj" in name for name in names)
    assert not any("lm_head" in name for name in names)


def test_a_fresh_adapter_changes_nothing():
    before = logprobs(load("tiny").model)
    assert torch.equal(logprobs(lora.add_adapter(load("tiny")).model), before)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [({}, 32 / 16), ({"rank": 4}, 32 / 4), ({"rank": 4, "alpha": 2}, 0.5), ({"rank": 4, "alpha": 2, "rs": True}, 1.0)],
)
def test_the_adapter_adds_its_two_halves_times_its_scale(settings, scale):
    """alpha / rank, or alpha / sqrt(rank)."""
    adapted = trained(lora.add_adapter(load("tiny"), **settings))
    plain, layers = lora.merged(adapted).model, adapted.model.get_base_model().model.layers
    layer = layers[2].mlp.down_proj
    first, second = (half["default"].weight for half in (layer.lora_A, layer.lora_B))
    assert first.shape == (settings.get("rank", 16), 448)
    expected = layer.base_layer.weight + scale * second @ first
    torch.testing.assert_close(plain.model.layers[2].mlp.down_proj.weight, expected, atol=1e-6, rtol=0)


def test_same_seed_same_adapter_whatever_the_global_random_state():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = lora.add_adapter(load("tiny"), seed=5).model.state_dict()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    second = lora.add_adapter(load("tiny"), seed=5).model.state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = lora.add_adapter(load("tiny"), seed=6).model.state_dict()
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_the_reference_is_the_model_before_rl_exactly():
    before = logprobs(load("tiny").model)
    adapted = trained(lora.add_adapter(load("tiny")))
    after = logprobs(adapted.model)
    assert not torch.allclose(after, before, atol=1e-3)
    with lora.reference(adapted.model) as model:
        assert torch.equal(logprobs(model), before)
    assert torch.equal(logprobs(adapted.model), after)


def test_the_reference_keeps_what_sft_learnt():
    base = logprobs(load("tiny").model)
    sft = trained(lora.add_adapter(load("tiny")), seed=1)
    with_sft = logprobs(sft.model)
    rl = lora.add_adapter(sft, rank=2)
    before_rl = logprobs(rl.model)
    torch.testing.assert_close(before_rl, with_sft, atol=1e-5, rtol=0)
    trained(rl, seed=2)
    with lora.reference(rl.model) as model:
        assert torch.equal(logprobs(model), before_rl)
        assert not torch.allclose(logprobs(model), base, atol=1e-3)


def test_the_reference_comes_back_on_after_an_error():
    adapted = trained(lora.add_adapter(load("tiny")))
    after = logprobs(adapted.model)
    with pytest.raises(RuntimeError, match="broken"), lora.reference(adapted.model):
        raise RuntimeError("broken")
    assert torch.equal(logprobs(adapted.model), after)


def test_a_model_without_adapter_has_no_such_reference():
    with pytest.raises(ValueError, match="frozen copy"), lora.reference(load("tiny").model):
        pass


def test_merged_equals_unmerged_and_leaves_the_original_alone():
    adapted = trained(lora.add_adapter(load("tiny")))
    weights = {name: tensor.clone() for name, tensor in adapted.model.state_dict().items()}
    plain = lora.merged(adapted)
    assert not lora.has_adapter(plain)
    torch.testing.assert_close(logprobs(plain.model), logprobs(adapted.model), atol=1e-5, rtol=0)
    assert all(torch.equal(tensor, adapted.model.state_dict()[name]) for name, tensor in weights.items())
    assert all(parameter.requires_grad for parameter in plain.model.parameters())


def test_export_is_a_plain_model(tmp_path):
    adapted = trained(lora.add_adapter(load("tiny")))
    lora.export(adapted, tmp_path)
    again = load(tmp_path)
    assert torch.equal(logprobs(again.model), logprobs(lora.merged(adapted).model))
    assert again.stop_ids == adapted.stop_ids
    assert lora.has_adapter(adapted)


def test_adapter_round_trip(tmp_path):
    adapted = trained(lora.add_adapter(load("tiny"), rank=4, alpha=8))
    lora.save_adapter(adapted, tmp_path)
    again = lora.load_adapter(load("tiny"), tmp_path)
    assert torch.equal(logprobs(again.model), logprobs(adapted.model))
    assert any(parameter.requires_grad for parameter in again.model.parameters())
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"
    frozen = lora.load_adapter(load("tiny"), tmp_path, trainable=False)
    assert not any(parameter.requires_grad for parameter in frozen.model.parameters())


def test_an_adapter_on_a_merged_one_is_saved_with_its_base(tmp_path):
    rl = trained(lora.add_adapter(trained(lora.add_adapter(load("tiny")), seed=1)), seed=2)
    with pytest.raises(ValueError, match="export_base"):
        lora.save_adapter(rl, tmp_path / "adapter")
    lora.export_base(rl, tmp_path / "base")
    lora.save_adapter(rl, tmp_path / "adapter", base=str(tmp_path / "base"))
    again = lora.load_adapter(load(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(logprobs(again.model), logprobs(rl.model))


def test_dropout_of_a_saved_adapter_is_off(tmp_path):
    adapted = trained(lora.add_adapter(load("tiny")))
    lora.save_adapter(adapted, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.5}))
    again = lora.load_adapter(load("tiny"), tmp_path)
    again.model.train()
    assert torch.equal(logprobs(again.model), logprobs(adapted.model))
    lora.set_dropout(again.model, 0.0, seed=0)
    lora.save_adapter(again, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["lora_dropout"] == 0


def test_gradient_checkpointing_reaches_the_adapter():
    gradients = []
    for checkpointing in (False, True):
        adapted = trained(lora.add_adapter(load("tiny", gradient_checkpointing=checkpointing)))
        adapted.model(IDS).logits.logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in adapted.model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("act", [lora.export_base, lora.save_adapter])
def test_there_must_be_an_adapter(act, tmp_path):
    with pytest.raises(ValueError, match="carries no adapter"):
        act(load("tiny"), tmp_path)


def test_adapters_that_cannot_be_loaded(tmp_path):
    with pytest.raises(LoadError, match=r"adapter_model\.safetensors is missing"):
        lora.load_adapter(load("tiny"), tmp_path)
    adapted = lora.add_adapter(load("tiny"), rank=2)
    lora.save_adapter(adapted, tmp_path)
    with pytest.raises(LoadError, match="already carries an adapter"):
        lora.load_adapter(adapted, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 3}))
    with pytest.raises(LoadError, match="does not fit model 'tiny'") as caught:
        lora.load_adapter(load("tiny"), tmp_path)
    assert "\n" not in str(caught.value)


def test_an_adapter_that_lacks_a_tensor_is_refused(tmp_path):
    lora.save_adapter(lora.add_adapter(load("tiny"), rank=2), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    weights = load_file(path)
    del weights[min(weights)]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(LoadError, match="missing adapter keys"):
        lora.load_adapter(load("tiny"), tmp_path)


def test_without_peft_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(LoadError, match=r"pip install 'rolecall\[lora\]'"):
        lora.add_adapter(load("tiny"))
