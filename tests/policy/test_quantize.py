"""Bases of 8 and 4 bits: what samples and what is saved is exactly what trained."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import rolecall
from rolecall.policy import lora, quantize
from rolecall.policy.load import load
from rolecall.policy.quantize import RoundedLinear, quantized

IDS = torch.tensor([[*b"hello world"]])
ERRORS = {"int8": (1e-4, 0.02), "int4": (1e-2, 0.3)}
"""How far the logits of the built-in model may move (at least, at most)."""


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def held(model):
    """Bytes of what the model holds in its layers."""
    return sum(tensor.nbytes for tensor in model.model.layers.state_dict().values())


@pytest.mark.parametrize("bits", ERRORS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounded_layers_are_smaller_and_nearly_the_same(bits, dtype):
    before = load("tiny", dtype=dtype)
    plain, size = logits(before.model), held(before.model)
    made = quantized(before, bits).model
    least, most = ERRORS[bits]
    assert least < float((logits(made).float() - plain.float()).abs().max()) < most
    assert held(made) < size / {"float32": 3.5, "bfloat16": 1.8}[dtype]


@pytest.mark.parametrize("bits", ERRORS)
def test_only_the_adapter_trains_and_merging_keeps_every_value(bits):
    policy = lora.add_adapter(quantized(load("tiny"), bits), rank=4)
    policy.model(IDS).logits.square().sum().backward()
    trained = {name for name, p in policy.model.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    plain = lora.merged(policy)
    assert not [m for m in plain.model.modules() if isinstance(m, RoundedLinear)]
    torch.testing.assert_close(logits(plain.model), logits(policy.model), atol=1e-5, rtol=0)
    assert [m for m in policy.model.modules() if isinstance(m, RoundedLinear)], "the trained one stays rounded"


@pytest.mark.parametrize("bits", ERRORS)
def test_the_base_of_an_adapter_is_written_in_plain_weights_of_the_same_values(bits, tmp_path):
    rounded = quantized(load("tiny"), bits)
    expected = logits(rounded.model)
    lora.export_base(lora.add_adapter(rounded, rank=4), tmp_path)
    written = load(tmp_path).model
    assert {type(m) for m in written.modules() if isinstance(m, torch.nn.Linear)} == {torch.nn.Linear}
    torch.testing.assert_close(logits(written), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bits", ERRORS)
def test_a_run_on_a_rounded_base_trains_and_resumes_exactly(bits, tmp_path):
    how = {
        "rows": "sorting:length=2",
        "prompts": 2,
        "samples": 2,
        "sampling": {"max_new_tokens": 4},
        "policy": {"lora_rank": 2, "quantize": bits},
        "optim": {"lr": 1e-2},
        "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01},
        "save": {"every": 1},
        "quiet": True,
    }
    whole = rolecall.rl(out=tmp_path / "whole", steps=2, **how)
    rolecall.rl(out=tmp_path / "part", steps=1, **how)
    part = rolecall.rl(out=tmp_path / "part", resume=True, extend=1, quiet=True)
    files = [(run.model / "model.safetensors").read_bytes() for run in (whole, part)]
    assert files[0] == files[1]
    assert abs(whole.metrics[0]["kl"]) < 1e-6
    assert whole.metrics[-1]["sampling/sampling_logp_difference/mean"] < 1e-4
    assert rolecall.generate(model=whole, prompts=["sort 21="], sampling={"max_new_tokens": 2})


@pytest.mark.parametrize("bits", ERRORS)
def test_the_gradient_is_that_of_the_unpacked_weight(bits):
    torch.manual_seed(0)
    layer = torch.nn.Linear(70, 3, bias=True)  # no multiple of a block
    rounded = RoundedLinear(layer, bits)
    plain = torch.nn.Linear(70, 3)
    plain.weight.data, plain.bias.data = rounded.weight.clone(), layer.bias.data
    assert 0 < float((plain.weight - layer.weight).detach().abs().max()) < {"int8": 0.001, "int4": 0.02}[bits]
    inputs = [torch.randn(2, 5, 70, generator=torch.Generator().manual_seed(0), requires_grad=True) for _ in range(2)]
    for x, made in zip(inputs, (rounded, plain), strict=True):
        made(x).square().sum().backward()
    torch.testing.assert_close(rounded(inputs[0]), plain(inputs[1]))
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


def test_known_codes():
    """Row maxima and block maxima are kept exactly; zeros stay zeros."""
    layer = torch.nn.Linear(64, 2, bias=False)
    layer.weight.data.zero_()
    layer.weight.data[0, :3] = torch.tensor([2.0, -1.0, 0.5])
    int8, int4 = (RoundedLinear(layer, bits).weight for bits in ERRORS)
    torch.testing.assert_close(int8[0, :3], torch.tensor([127, -64, 32]) * 2 / 127)  # -63.5 and 31.75, rounded
    torch.testing.assert_close(int4[0, :3], 2 * torch.tensor([1.0, -0.5250730514526367, 0.24611230194568634]))
    assert not int8[1].any()
    assert not int4[:, 3:].any()


# -- bitsandbytes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def anew():
    """Each test looks for the package itself."""
    quantize._bitsandbytes.cache_clear()
    yield
    quantize._bitsandbytes.cache_clear()


def of_four_bits():
    torch.manual_seed(0)
    return RoundedLinear(torch.nn.Linear(70, 5), "int4")


@pytest.mark.filterwarnings("ignore")  # its imports warn
def test_bitsandbytes_unpacks_to_the_same_values_and_gradients(anew, monkeypatch):
    pytest.importorskip("bitsandbytes")
    assert quantize._bitsandbytes() is not None
    layer, x = of_four_bits(), torch.randn(3, 70, requires_grad=True)
    with_it = layer.weight, torch.autograd.grad(layer(x).square().sum(), x)[0]
    monkeypatch.setenv("ROLECALL_KERNELS", "0")
    assert torch.equal(with_it[0], layer.weight)
    assert torch.equal(with_it[1], torch.autograd.grad(layer(x).square().sum(), x)[0])


@pytest.mark.parametrize("error", [0.0, 1e-6, None])
def test_an_unpacking_that_differs_from_ours_or_fails_is_not_used(anew, monkeypatch, error):
    """A stand-in for the package that is right, a little off, or of another version."""

    def dequantize_4bit(codes, state):
        if error is None:
            raise TypeError("unexpected keyword")
        return quantize._unpack(codes.view(-1, 32), state.absmax[:, None]) + error

    module = ModuleType("bitsandbytes.functional")
    module.QuantState, module.dequantize_4bit = SimpleNamespace, dequantize_4bit
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", module)
    plain = of_four_bits().weight
    assert (quantize._bitsandbytes() is not None) == (error == 0.0)
    quantize._bitsandbytes.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    assert quantize._bitsandbytes() is None
    assert torch.equal(of_four_bits().weight, plain)
