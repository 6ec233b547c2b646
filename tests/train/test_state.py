"""Nested state goes to disk and comes back exactly, without pickle."""

import json
import math
import signal
import struct
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.train.state import first_non_finite, read_state, write_state


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


def same(a: object, b: object) -> bool:
    """Equal in type, order of keys and every bit; 1, 1.0 and True are three different things."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        raw_a, raw_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_a, raw_b)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bits(a) == bits(b) if isinstance(a, float) else a == b


def round_trip(directory, state):
    write_state(directory, "trainer", state)
    return read_state(directory, "trainer")


def test_the_comparison_sees_each_kind_of_difference():
    for a, b in [
        (1, 1.0),
        (1, True),
        ((1,), [1]),
        (0.0, -0.0),
        ({1: 2}, {"1": 2}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.zeros(1), torch.zeros(())),
        (torch.zeros(1), -torch.zeros(1)),
        (torch.zeros(1), torch.zeros(1, dtype=torch.float64)),
    ]:
        assert not same(a, b)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers() | st.sampled_from(["$tensor", "$", "state", "__metadata__", "a/b", "#2"])
trees = st.recursive(
    scalars | st.builds(torch.tensor, st.lists(st.floats(width=32), max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@given(state=trees)
def test_any_tree_comes_back_exactly(tmp_path_factory, state):
    assert same(round_trip(tmp_path_factory.mktemp("state"), state), state)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back(tmp_path, dtype):
    raw = torch.arange(48, dtype=torch.uint8)
    full = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    state = {"flat": full, "zero-d": full[0], "empty": full[:0], "square": full[:4].reshape(2, 2)}
    assert same(round_trip(tmp_path, state), state)


def test_an_adamw_that_is_read_back_steps_bit_for_bit_like_the_one_that_went_on(tmp_path):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).to(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer, i):
        model(torch.full((2, 3), float(i), dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    for i in range(3):
        step(model, optimizer, i)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    read = round_trip(tmp_path, state)
    assert same(read, state)
    assert list(read["optimizer"]["state"]) == [0, 1, 2, 3]
    assert read["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)

    other, other_optimizer = make()
    other.load_state_dict(read["model"])
    other_optimizer.load_state_dict(read["optimizer"])
    for i in range(3, 6):
        step(model, optimizer, i)
        step(other, other_optimizer, i)
    assert same(other.state_dict(), model.state_dict())


def test_shared_and_strided_tensors(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    state = {"whole": base, "tied": base.view(3, 4), "turned": base.t(), "row": base[1], "step": base[:, ::2]}
    state["spread"] = torch.ones(1).expand(3)
    read = round_trip(tmp_path, state)
    assert same(read, state)
    assert read["tied"] is read["whole"], "a tied tensor stays tied"
    read["row"].zero_()
    assert read["whole"][1].sum() == 22, "a view comes back as a tensor of its own"


def test_equal_states_give_equal_bytes(tmp_path):
    state = {"b": torch.ones(3), "a": {1: torch.zeros(2, dtype=torch.int64)}, "lr": 0.1}
    for name in ("first", "second"):
        write_state(tmp_path, name, state)
    for ending in ("safetensors", "json"):
        assert (tmp_path / f"first.{ending}").read_bytes() == (tmp_path / f"second.{ending}").read_bytes()


def test_non_finite_floats_are_strings_in_strict_json_and_keep_their_bits(tmp_path):
    odd_nan = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    state = {"best": -math.inf, "worst": math.inf, "nan": math.nan, "odd": odd_nan, "tiny": 5e-324, "zero": -0.0}
    assert same(round_trip(tmp_path, state), state)

    def refuse(text):
        raise AssertionError(text)

    json.loads((tmp_path / "trainer.json").read_text(), parse_constant=refuse)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"a": {"b": {1, 2}}}, "a/b is a builtins.set"),
        ({"a": [object()]}, "a/0 is a builtins.object"),
        ({"size": torch.zeros(2).shape}, "size is a torch.Size"),
        (namedtuple("Pair", "x")(1), "the top is a .*Pair"),
        ({"mean": np.float64(1.0)}, r"mean is a numpy\.float64"),
        ({"rows": type("Rows", (list,), {})()}, "rows is a .*Rows"),
        ({"by": defaultdict(int)}, r"by is a collections\.defaultdict"),
        ({"code": signal.SIGTERM}, r"code is a signal\.Signals"),
        ({"w": torch.eye(2).to_sparse()}, "w is sparse"),
        ({"w": torch.empty(2, device="meta")}, "w is sparse, quantized or without data"),
        ({"w": torch.zeros(1, dtype=torch.complex128)}, "complex128"),
        ({torch.zeros(1): 1}, "tensor as a key"),
    ],
)
def test_what_cannot_be_saved_exactly_is_refused_by_name(tmp_path, state, sentence):
    with pytest.raises(TypeError, match=sentence):
        write_state(tmp_path, "trainer", state)


def test_a_pair_that_does_not_match_is_refused(tmp_path):
    write_state(tmp_path, "one", {"a": torch.zeros(1)})
    write_state(tmp_path, "two", {"a": torch.zeros(1), "b": torch.zeros(1)})
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    texts = one.read_text(), two.read_text()
    one.write_text(texts[1])
    two.write_text(texts[0])
    with pytest.raises(ValueError, match="does not describe"):
        read_state(tmp_path, "one")
    with pytest.raises(ValueError, match=r"holds 'b', which two\.json does not mention"):
        read_state(tmp_path, "two")
    for text in ('{"state": NaN}', '{"state": {"$code": "x"}}', "[]", "{", '{"state": ' + "[" * 100_000):
        one.write_text(text)
        with pytest.raises(ValueError, match="does not describe"):
            read_state(tmp_path, "one")


def test_tensors_do_not_depend_on_the_file_once_read(tmp_path):
    write_state(tmp_path, "trainer", {"w": torch.ones(1 << 16)})
    state = read_state(tmp_path, "trainer")
    with (tmp_path / "trainer.safetensors").open("r+b") as file:
        file.truncate(16)
    assert state["w"].sum() == 1 << 16


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_the_first_tensor_that_is_not_finite_is_named(bad, dtype):
    good = torch.ones(3, dtype=dtype)
    spoilt = torch.tensor([1.0, bad, 1.0]).to(dtype)
    state = {"count": torch.tensor(3), "best": -math.inf, "state": {0: {"exp_avg": good}, 1: {"exp_avg": good}}}
    assert first_non_finite(state) is None
    state["state"][1]["exp_avg"] = spoilt
    state["later"] = [spoilt]
    assert first_non_finite(state) == "state/1/exp_avg"
