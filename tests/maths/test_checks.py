import pytest
import torch

from rolecall.maths.checks import check_bool, check_choice, check_mask, check_shape, keep

NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([[True, False]])


def test_right_arguments_pass():
    check_mask(MASK, x=torch.ones(1, 2), y=None)
    check_shape((1, 2), like="x", mask=MASK, y=None)
    check_bool(mask=MASK, other=None)
    check_choice("kind", "a", ("a", "b"))
    check_choice("scale", None, ("group", None))


def test_a_mask_must_be_bool():
    for mask in (MASK.long(), MASK.float(), MASK.to(torch.uint8)):
        with pytest.raises(ValueError, match=rf"mask must be a bool tensor \(True = counts\), got {mask.dtype}"):
            check_mask(mask)
        with pytest.raises(ValueError, match=rf"filled must be a bool tensor, got {mask.dtype}; use `filled.bool\(\)`"):
            check_bool(mask=MASK, filled=mask)


def test_shapes_must_be_equal_and_both_are_named():
    with pytest.raises(ValueError, match=r"^x has shape \(2, 1\) but mask has shape \(1, 2\); they must be equal$"):
        check_mask(MASK, y=torch.ones(1, 2), x=torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"x has shape \(1,\) but the batch has shape \(2,\)"):
        check_shape((2,), like="the batch", x=torch.ones(1))  # no broadcasting
    with pytest.raises(ValueError, match=r"x has shape \(\) but"):
        check_shape((2,), like="the batch", x=torch.tensor(1.0))


def test_choices_are_listed():
    with pytest.raises(ValueError, match=r"^unknown kind 'c'; choose one of 'a', 'b', None$"):
        check_choice("kind", "c", ("a", "b", None))


def test_keep_stops_rubbish_forwards_and_backwards():
    x = torch.tensor([[2.0, NAN, INF, -INF]]).requires_grad_()
    kept = keep(torch.tensor([[True, False, False, False]]), x)
    assert kept.tolist() == [[2, 0, 0, 0]]
    (gradient,) = torch.autograd.grad(kept.square().sum(), x)
    assert gradient.tolist() == [[4, 0, 0, 0]]
    assert keep(MASK, torch.tensor([[3, 4]])).dtype == torch.int64
    assert keep(MASK, torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
