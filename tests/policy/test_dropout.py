"""What is dropped of an adapter's inputs, and when."""

import dataclasses

import pytest
import torch

from rolecall.policy import lora
from rolecall.policy.dropout import KeyedDropout, dropping
from rolecall.policy.load import load
from rolecall.policy.model import PolicyModel

IDS = torch.tensor([[*b"hello world"], [*b"other words"]])
HERE = (3, 0, 1, 0)


def adapted(rate, *, checkpointing=False):
    """An adapter that changes the model, as after some training."""
    made = lora.add_adapter(load("tiny", gradient_checkpointing=checkpointing), rank=4, dropout=rate, seed=7)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return made.model


def loaded(model):
    return dataclasses.replace(load("tiny"), model=model)


def layers(model):
    return [module for module in model.modules() if isinstance(module, KeyedDropout)]


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_share_is_dropped_and_the_rest_scaled_up(rate):
    layer, x = KeyedDropout(rate, seed=0, number=0), torch.full((200, 500), 3.0)
    with dropping(layer, HERE):
        out = layer(x)
    dropped = (out == 0).double().mean()
    assert abs(dropped - rate) < 5 * (rate * (1 - rate) / x.numel()) ** 0.5
    torch.testing.assert_close(out[out != 0], torch.full((int((out != 0).sum()),), 3 / (1 - rate)))
    assert layer(x) is x


def test_the_mean_output_is_that_without_dropout():
    model = adapted(0.3)
    (layer, *_), inputs = layers(model), torch.ones(1, 64, dtype=torch.float64)
    drawn = []
    for step in range(4000):
        with dropping(layer, (step, 0, 0, 0)):
            drawn.append(layer(inputs))
    error = (torch.cat(drawn).mean(0) - 1).abs().max()
    assert error < 5 * (0.3 / 0.7 / 4000) ** 0.5  # the variance of one element is rate / (1 - rate)


def test_only_inside_and_only_the_adapter():
    model, plain = adapted(0.5), adapted(0.0)
    before = logits(plain)
    assert torch.equal(logits(model), before)
    model.train()  # the mode is of no concern
    assert torch.equal(logits(model), before)
    with dropping(model, HERE):
        assert not torch.allclose(logits(model), before, atol=1e-3)
        with lora.reference(model) as below, lora.reference(plain) as same:
            assert torch.equal(logits(below), logits(same))
    assert torch.equal(logits(model), before)
    assert torch.equal(logits(lora.merged(loaded(model)).model), logits(lora.merged(loaded(plain)).model))
    assert not layers(plain)
    dropouts = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert not any(dropouts), "the base model's own stays off"


def test_the_same_place_drops_the_same_whatever_the_global_state():
    model, found = adapted(0.5), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        with dropping(model, HERE):
            found.append(logits(model))
        assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(*found)
    for other in range(4):
        with dropping(model, tuple(x + (i == other) for i, x in enumerate(HERE))):
            assert not torch.equal(logits(model), found[0]), f"part {other} of the place says nothing"


def test_every_layer_drops_its_own():
    first, second, *_ = layers(adapted(0.5))
    x = torch.ones(50, 50)
    with dropping(first, HERE), dropping(second, HERE):
        assert not torch.equal(first(x), second(x))


def test_recomputed_activations_drop_the_same():
    gradients = []
    for checkpointing in (False, True):
        model = adapted(0.5, checkpointing=checkpointing)
        with dropping(model, HERE):
            model(IDS).logits.logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(*gradients, strict=True))


def test_the_flat_pass_leaves_adapters_to_the_model():
    assert not PolicyModel(adapted(0.5))._trunk().is_flat


def test_a_step_that_is_not_named_is_an_error():
    with pytest.raises(ValueError, match="say which step this is"), dropping(adapted(0.5), None):
        pass
    with dropping(adapted(0.0), None):
        pass


def test_the_saved_adapter_tells_its_rate(tmp_path):
    lora.save_adapter(loaded(adapted(0.25)), tmp_path, base="tiny")
    again = lora.load_adapter(load("tiny"), tmp_path)
    assert again.model.peft_config["default"].lora_dropout == 0.25
    assert not layers(again.model)
    lora.set_dropout(again.model, 0.25, seed=7)
    with dropping(again.model, HERE), dropping(model := adapted(0.25), HERE):
        assert torch.equal(logits(again.model), logits(model))
