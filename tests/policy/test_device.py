"""Where a run is: the accelerator that torch finds, the CPU, or one sentence."""

import logging

import pytest
import torch

from rolecall.config.training import SFTOptions
from rolecall.errors import UserError
from rolecall.policy.device import open_device, set_tf32


def found(monkeypatch, device: str | None, count: int = 2) -> list[int]:
    """Has torch find an accelerator; the numbers that are made current."""
    chosen: list[int] = []
    there = None if device is None else torch.device(device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: there)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


def test_auto_is_the_cpu_where_there_is_nothing_else(monkeypatch, caplog):
    found(monkeypatch, None)
    with caplog.at_level(logging.INFO):
        assert open_device("auto") == "cpu"
    assert not caplog.records


def test_auto_is_the_accelerator_and_says_so(monkeypatch, caplog):
    found(monkeypatch, "xpu")
    with caplog.at_level(logging.INFO):
        assert open_device("auto") == "xpu"
    assert "training on xpu" in caplog.text


def test_auto_is_not_an_accelerator_without_float64(monkeypatch, caplog):
    found(monkeypatch, "mps")
    with caplog.at_level(logging.INFO):
        assert open_device("auto") == "cpu"
    assert "training on the CPU: mps has no float64" in caplog.text


def test_tf32_is_for_cuda_and_off_again_in_the_next_run():
    with pytest.raises(UserError, match=r"policy\.tf32 is for NVIDIA GPUs, and this run is on cpu"):
        set_tf32(torch.device("cpu"), on=True)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        set_tf32(torch.device("cuda"), on=True)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        set_tf32(torch.device("cuda"), on=False)
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_a_numbered_device_becomes_the_current_one(monkeypatch):
    chosen = found(monkeypatch, "cuda")
    assert open_device("cuda:1") == "cuda:1"
    assert chosen == [1]
    assert open_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("there", "asked", "why"),
    [
        (None, "cuda", "torch finds no GPU"),
        ("mps", "cuda", "torch finds mps only"),
        ("cuda", "cuda:2", "torch finds 2 of them"),
        ("mps", "mps", "it has no float64"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(monkeypatch, there, asked, why):
    found(monkeypatch, there)
    with pytest.raises(UserError, match=why):
        open_device(asked)


def test_one_numbered_device_for_several_processes(monkeypatch):
    found(monkeypatch, "cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="give --device cuda"):
        open_device("cuda:0")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "mps:x", ""])
def test_a_name_that_is_no_device(name):
    with pytest.raises(ValueError, match="device must be auto"):
        SFTOptions(device=name)
