"""The cost model against numbers worked out by hand."""

import pytest

from rolecall.jobs.plan import _shape
from rolecall.planning.cost import (
    LIKELY,
    Batch,
    Reached,
    Shape,
    Step,
    balanced,
    decode_seconds,
    generate_seconds,
    largest_budget,
    replica_gpus,
    slots,
    step,
    sync_seconds,
    train_seconds,
    trainer_memory,
)
from rolecall.planning.hardware import DEVICES, Device

SMALL = Shape(width=10, layers=2, heads=2, key_heads=1, head_size=5, feed_forward=20, vocabulary=100, tied=False)
ALL = Reached(products=1.0, bandwidth=1.0)
# A layer: queries and output 2 x 10 x 10, keys and values 2 x 10 x 5, feed-forward 3 x 10 x 20, norms 2 x 10 = 920.
# In all: 2 x 100 x 10 + 2 x 920 + 10 = 3850.
UNIT = Device(flops=3850.0 * 2, memory=1e6, bandwidth=3850.0 * 2, source="none")


def batch(**more):
    return Batch(
        **{"answers": 4, "prompt": 3.0, "answer": 5.0, "longest": 7.0, "recompute": False, "scoring": 0} | more
    )


def test_parameters_are_counted():
    assert (SMALL.layer, SMALL.parameters) == (920, 3850)
    assert SMALL.cache_per_token == 2 * 2 * 2 * 5  # keys and values, 2 bytes, 2 layers, 1 head of 5


def test_the_built_in_model_has_as_many_parameters_as_the_formula_says():
    from rolecall.policy.load import load

    assert _shape("tiny").parameters == sum(p.numel() for p in load("tiny").model.parameters())


def test_a_known_model_has_its_known_size():
    """Llama 3.1 8B: 8,030,261,248 parameters."""
    config = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    assert Shape.of(config).parameters == 8_030_261_248


def test_training_takes_six_operations_a_parameter_and_token_and_eight_with_recomputation():
    """32 tokens x (3 forwards of 2 P + attention); attention of a token of 8: 4 x 2 layers x 10 x 8 / 2 = 320."""
    forward = 2 * 3850 + 320
    assert train_seconds(SMALL, batch(), UNIT, gpus=1, reached=ALL) == pytest.approx(32 * 3 * forward / 7700)
    how = {"gpus": 2, "reached": Reached(products=0.5, bandwidth=1.0)}
    more = batch(recompute=True, epochs=2, scoring=2)
    assert train_seconds(SMALL, more, UNIT, **how) == pytest.approx(32 * (4 * 2 + 2) * forward / 7700)


def test_decoding_reads_weights_and_cache_or_is_bound_by_its_products():
    """2 P bytes of weights and 3 answers x 6 tokens x 40 bytes, at 2 P bytes a second."""
    slow = Device(flops=1e12, memory=1e6, bandwidth=7700.0, source="none")
    read = decode_seconds(SMALL, slow, growing=3, context=6, gpus=1, reached=ALL)
    assert read == pytest.approx((7700 + 3 * 6 * 40) / 7700)
    quick = Device(flops=7700.0, memory=1e6, bandwidth=1e12, source="none")
    assert decode_seconds(SMALL, quick, growing=3, context=0, gpus=1, reached=ALL) == pytest.approx(3)


def test_room_for_answers_is_what_the_weights_leave():
    """0.9 x 9,000 bytes less 2 P = 400: one answer of 10 tokens x 40 bytes; and with half the memory it takes two."""
    device = Device(flops=1.0, memory=9000.0, bandwidth=1.0, source="none")
    assert slots(SMALL, device, gpus=1, context=10) == 1
    assert replica_gpus(SMALL, device, context=10) == 1
    assert replica_gpus(SMALL, device, context=11) == 2
    assert replica_gpus(SMALL, Device(flops=1.0, memory=1.0, bandwidth=1.0, source="none"), context=1) is None


def test_generation_is_of_the_crowd_and_of_the_longest_answer():
    how = {"gpus": 1, "reached": ALL}
    slow = Device(flops=1e30, memory=1e6, bandwidth=7700.0, source="none")
    crowd = decode_seconds(SMALL, slow, growing=4, context=3 + 2.5, **how)
    one = decode_seconds(SMALL, slow, growing=1, context=(3 + 1000) / 2, **how)
    assert generate_seconds(SMALL, batch(longest=1000.0), slow, **how) == pytest.approx((5 * crowd, 1000 * one))


def test_a_step_is_the_sum_in_turn_and_the_slower_side_ahead_which_shares_the_longest_answer_with_others():
    found = Step(crowd=2.0, longest=3.0, train=5.0, sync=1.0)
    assert [found.seconds(k) for k in (0, 1, 3, None)] == [9.0, 6.0, 6.0, 6.0]
    assert found.useful_ahead == 1
    tail = Step(crowd=2.0, longest=9.0, train=4.0, sync=1.0)
    assert [tail.seconds(k) for k in (0, 1, 2, 3, None)] == [14.0, 10.0, 5.5, 5.0, 5.0]
    assert tail.useful_ahead == 3
    assert sync_seconds(SMALL, network=770.0) == 10.0


def test_memory_of_a_trainer():
    """16 P / 2, 4 P / 2, two layers in float32; 100 tokens x 10 x (2 x 2 layers + 34) and three chunks of 32 MB."""
    found = trainer_memory(SMALL, batch(recompute=True, token_budget=100), gpus=2, reference=True)
    assert (found.states, found.reference, found.gathered) == (8 * 3850, 2 * 3850, 8 * 920)
    assert found.activations == 100 * 10 * (2 * 2 + 34) + 96e6
    assert found.total == found.states + found.reference + found.gathered + found.activations
    lora = trainer_memory(SMALL, batch(), gpus=1, reference=True, lora_rank=1)
    assert lora.states == 4 * 3850 + 16 * 2 * (9 * 10 + 3 * 20)
    assert lora.reference == 0


def test_more_gpus_never_take_longer_and_the_balanced_split_is_the_quickest():
    shape, h100 = _shape("tiny"), DEVICES["h100"]
    big = Shape(
        width=4096, layers=32, heads=32, key_heads=8, head_size=128, feed_forward=14336, vocabulary=128256, tied=False
    )
    work = Batch(answers=512, prompt=256.0, answer=1024.0, longest=4096.0, same_prompt=8)
    times = [train_seconds(big, work, h100, gpus=n, reached=LIKELY) for n in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    how = {"network": 12.5e9, "reached": LIKELY}
    split = balanced(big, work, h100, gpus=16, network=12.5e9)
    seconds = {n: step(big, work, h100, train=16 - n, sample=n, **how).seconds(1) for n in range(1, 16)}
    assert seconds[split] <= 1.03 * min(seconds.values())
    assert balanced(shape, work, h100, gpus=1, network=1e9) == 0
    assert largest_budget(big, work, h100, gpus=1, reference=False, lora_rank=None) is None
    assert largest_budget(big, work, h100, gpus=8, reference=False, lora_rank=None) >= 8192
