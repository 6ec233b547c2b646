"""The flat trunk: transformers' numbers and gradients, from fewer tokens."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rolecall.policy import flat, flat_ops
from rolecall.policy.flat import FlatTrunk, layout_of, unfit
from rolecall.policy.model import PolicyModel
from rolecall.policy.packing import micro_batches, right_padded, rounded_up
from rolecall.policy.reading import Trunk

pytestmark = pytest.mark.usefixtures("fast_paths")
SIZES = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SPANS = [(9, 15), (9, 20), (10, 12), (9, 11), (6, 14), (5, 9), (3, 20), (0, 0)]
"""The wanted tokens of each row: rows 0-3 share nine tokens, rows 4 and 5 five; row 7 wants none."""


def llama(dtype=torch.float32, kind="llama"):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)) if kind == "llama" else Qwen2ForCausalLM(Qwen2Config(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 50, (8, 20), generator=torch.Generator().manual_seed(1))
    ids[1:4, :9] = ids[0, :9]
    ids[5, :5] = ids[4, :5]
    needed = torch.zeros(8, 20, dtype=torch.bool)
    for row, (start, stop) in enumerate(SPANS):
        needed[row, max(0, start - 1) : max(0, stop - 1)] = True
    return ids, needed


def gradients(model, hidden):
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).to(hidden.dtype)
    model.zero_grad()
    (hidden * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kernels", ["1", "0"], ids=["compiled", "torch"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("weights", "working", "band"),
    [
        (torch.float64, torch.float64, 1e-7),  # transformers norms in fp32 even then
        (torch.float32, torch.float32, 1e-5),
        (torch.float32, torch.bfloat16, 7e-2),
    ],
)
def test_hidden_states_and_gradients_are_those_of_transformers(kernels, kind, weights, working, band, monkeypatch):
    monkeypatch.setenv("ROLECALL_KERNELS", kernels)
    model, (ids, needed) = llama(weights, kind), sample()
    own = model.get_decoder()(input_ids=ids).last_hidden_state[needed]
    expected = gradients(model, own)
    flat = FlatTrunk(model)(ids, needed, dtype=working)
    found = gradients(model, flat.to(weights))
    assert (flat - own).norm() <= band * own.norm()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= band * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("frozen", ["q_proj.weight", "v_proj", "bias", "up_proj", "norm", "o_proj.weight"])
def test_a_frozen_part_gets_no_gradient_and_the_others_theirs(frozen):
    model, (ids, needed) = llama(kind="qwen2"), sample()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    expected = gradients(model, model.get_decoder()(input_ids=ids).last_hidden_state[needed])
    found = gradients(model, FlatTrunk(model)(ids, needed, dtype=torch.float32))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_pieces_and_torch_pieces_agree(dtype, monkeypatch):
    made = torch.Generator().manual_seed(0)

    def outcome():
        x = torch.randn(130, 24, generator=made.manual_seed(0), requires_grad=True)
        weight = torch.randn(24, generator=made, requires_grad=True)
        matrices = [torch.randn(s, generator=made, requires_grad=True) for s in ((40, 24), (40, 24), (24, 40))]
        cos, sin = torch.rand(130, 3, generator=made), torch.rand(130, 3, generator=made)
        normed = flat_ops.Norm.apply(x, weight, 1e-5, dtype)
        turned = flat_ops.Rotate.apply(normed.clone(), cos, sin, 3)
        total, again = flat_ops.AddNorm.apply(x, flat_ops.GatedMlp.apply(turned, *matrices), weight, 1e-5)
        made_of_both = total * torch.randn(130, 24, generator=made) + again.float() * torch.randn(
            130, 24, generator=made
        )
        made_of_both.sum().backward()
        return [total.detach(), again, x.grad, weight.grad, *(m.grad for m in matrices)]

    compiled = outcome()
    monkeypatch.setenv("ROLECALL_KERNELS", "0")
    band = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(compiled, outcome(), strict=True):
        assert (one - other).norm() <= band * other.norm()


def test_shared_tokens_are_laid_out_once():
    ids, needed = sample()
    layout = layout_of(ids, needed)
    ends = [max(0, stop - 1) for _, stop in SPANS]
    assert len(layout.source) == sum(ends) - 3 * 9 - 5
    assert torch.equal(ids.flatten()[layout.source][layout.place[needed]], ids[needed])
    assert torch.equal(layout.positions[layout.place[needed]], needed.nonzero()[:, 1])


@given(rows=st.integers(1, 2**22))
def test_products_in_bf16_have_few_sizes_and_little_filling(rows):
    assert rounded_up(rows, torch.float32) == rows
    more = rounded_up(rows, torch.bfloat16)
    assert rows <= more < max(rows + 64, rows * 33 / 32 + 1)
    assert rounded_up(more, torch.bfloat16) == more
    assert more % 64 == 0


@pytest.mark.parametrize("kernels", ["1", "0"])
def test_filled_up_tokens_change_nothing(kernels, monkeypatch):
    """In bf16 the flat list is filled up; the same list in fp32, filled up too, gives the same states and gradients."""
    monkeypatch.setenv("ROLECALL_KERNELS", kernels)
    ids, needed = sample()
    whole = layout_of(ids, needed, torch.bfloat16)
    assert len(whole.source) % 64 == 0
    assert len(whole.source) > len(layout_of(ids, needed).source)
    model = llama()

    def outcome():
        hidden = FlatTrunk(model)(ids, needed, dtype=torch.float32)
        return hidden.detach(), gradients(model, hidden)

    plain, plain_gradients = outcome()
    monkeypatch.setattr(flat, "rounded_up", lambda rows, dtype: rounded_up(rows, torch.bfloat16))
    filled, filled_gradients = outcome()
    torch.testing.assert_close(filled, plain, rtol=1e-4, atol=1e-5)
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(filled_gradients[name], gradient, rtol=1e-4, atol=1e-5)


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=7),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_row_can_be_read_back_whatever_it_shares(rows, data):
    time = max(map(len, rows))
    ids = torch.tensor([row + [0] * (time - len(row)) for row in rows])
    needed = torch.zeros(len(rows), time, dtype=torch.bool)
    for i, row in enumerate(rows):
        needed[i, data.draw(st.integers(0, len(row) - 1))] = True
    layout = layout_of(ids, needed)
    for i in range(len(rows)):
        end = int(needed[i].nonzero().max()) + 1
        flat = layout.place[i, :end]
        assert torch.equal(ids.flatten()[layout.source][flat], ids[i, :end])
        assert torch.equal(layout.positions[flat], torch.arange(end))
        assert (layout.place[i, end:] == -1).all()
    found = layout.segments.rectangles
    assert sorted(found.put.tolist()) == sorted(set(found.put.tolist())), "every token has a place of its own"
    assert torch.equal(found.take[found.put], torch.arange(len(layout.source)))


@given(st.integers(0, 2**20))
@settings(max_examples=10, deadline=None)
def test_rows_do_not_see_each_other(seed):
    """What a row gives does not change when the others are left out, or when tokens behind it change."""
    model, (ids, needed) = llama(torch.float64), sample()
    trunk = FlatTrunk(model)
    with torch.no_grad():
        together = trunk(ids, needed, dtype=torch.float64)
        row = seed % 7
        alone = trunk(ids[row : row + 1], needed[row : row + 1], dtype=torch.float64)
        mine = needed.nonzero()[:, 0] == row
        torch.testing.assert_close(together[mine], alone, rtol=0, atol=1e-12)
        other = ids.clone()
        last = int(needed[row].nonzero().max())
        other[row, last + 1 :] = seed % 50
        torch.testing.assert_close(trunk(other, needed, dtype=torch.float64), together, rtol=0, atol=1e-12)


def test_a_model_that_computes_something_else_is_found_out_at_first_use(caplog):
    model, (ids, needed) = llama(), sample()
    trunk = Trunk(model)
    assert trunk.is_flat
    whole = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: 1.5 * whole(x)
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="rolecall"):
        found = trunk(ids, needed)
        torch.testing.assert_close(found, model.get_decoder()(input_ids=ids).last_hidden_state[needed])
    assert not trunk.is_flat
    assert "going on with the model's own" in caplog.text


def test_once_compared_it_runs_alone(monkeypatch):
    model, (ids, needed) = llama(), sample()
    trunk = Trunk(model)
    before = trunk(ids, needed)
    monkeypatch.setattr(model.model.layers[0], "forward", lambda *_, **__: pytest.fail("computed twice"))
    assert torch.equal(trunk(ids, needed), before)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m, env: env.setenv("ROLECALL_FLAT", "0"), "ROLECALL_FLAT"),
        (lambda m, env: m.to(torch.bfloat16), "not in fp32"),
        (lambda m, env: m.to(torch.float64), "not in fp32"),
        (lambda m, env: m.gradient_checkpointing_enable(), "gradient checkpointing"),
    ],
)
def test_what_it_is_not_used_for(change, why, monkeypatch):
    model = llama()
    change(model, monkeypatch)
    assert why in unfit(model)


def test_a_policy_gives_the_same_with_and_without_it(monkeypatch):
    model, (ids, needed) = llama(), sample()
    assert unfit(model) is None
    wanted = torch.nn.functional.pad(needed[:, :-1], (1, 0))
    found = PolicyModel(model)(ids, wanted, temperature=0.7)
    monkeypatch.setenv("ROLECALL_FLAT", "0")
    expected = PolicyModel(model)(ids, wanted, temperature=0.7)
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("some", [True, False])
def test_a_loss_handed_in_is_summed_over_the_rows_that_want_something(some):
    """And where none does, it is 0 and every parameter still gets a gradient of zeros."""
    model, (ids, needed) = llama(), sample()
    wanted = torch.nn.functional.pad(needed[:, :-1], (1, 0)) & some
    plain = PolicyModel(model)(ids, wanted, temperature=0.7)
    worth = torch.arange(1.0, 9.0)[:, None]

    def loss(outputs, rows):
        return (worth[rows] * outputs.logprobs + outputs.entropy).sum()

    total, outputs = PolicyModel(model)(ids, wanted, temperature=0.7, loss=loss)
    torch.testing.assert_close(total, (worth * plain.logprobs + plain.entropy).sum())
    torch.testing.assert_close(outputs.logprobs, plain.logprobs)
    model.zero_grad()
    total.backward()
    assert all(p.grad is not None and bool(p.grad.any()) == some for p in model.parameters())


def test_rows_are_padded_with_zeros_behind():
    ids, lengths = right_padded([[5], [6, 7, 8], [9, 1]])
    assert ids.tolist() == [[5, 0, 0], [6, 7, 8], [9, 1, 0]]
    assert lengths.tolist() == [1, 3, 2]


def test_micro_batches_keep_groups_together():
    lengths, groups = torch.tensor([3, 9, 4, 5, 9, 2]), torch.tensor([7, 8, 7, 9, 9, 8])
    parts = micro_batches(lengths, token_budget=100, groups=groups)
    assert groups[parts[0]].tolist() in ([8, 8, 9, 9, 7, 7], [9, 9, 8, 8, 7, 7])
    cut = micro_batches(lengths, token_budget=18, groups=groups)
    assert sorted(torch.cat(cut).tolist()) == [0, 1, 2, 3, 4, 5]
    assert all(len(part) * int(lengths[part].max()) <= 18 for part in cut)
