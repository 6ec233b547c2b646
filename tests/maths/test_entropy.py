"""The controller of the entropy bonus."""

import pytest

from rolecall.maths.entropy import EntropyTarget, FixedEntropy


def test_a_fixed_coefficient_stays():
    assert FixedEntropy(coef=0.3).update(9.0) == FixedEntropy(coef=0.3)


@pytest.mark.parametrize(("entropy", "expected"), [(2.0, 0.05), (1.0, 0.15), (2.25, 0.025), (3.0, 0.0), (-9.0, 0.2)])
def test_it_moves_by_the_distance_to_its_target_within_its_limits(entropy, expected):
    """coef 0.05, target 2, rate 0.1: on target it stays, 1 nat below it grows by 0.1, and it ends at 0 and 0.2."""
    held = EntropyTarget(coef=0.05, target=2.0, rate=0.1, limit=0.2).update(entropy)
    assert held.coef == pytest.approx(expected)
    assert (held.target, held.rate, held.limit) == (2.0, 0.1, 0.2)


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"rate": -1.0}, {"coef": -0.1}, {"coef": 0.3}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="rate must be positive and coef within 0 and limit"):
        EntropyTarget(**{"coef": 0.1, "target": 1.0, "rate": 0.1, "limit": 0.2, **wrong})
