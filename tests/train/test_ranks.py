"""One process and two give the same step, however rows are spread over them."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks_driver import spoil
from small_policy import PPO, gradient, loss_of, scripted_batch, small_policy, updater

DRIVER = Path(__file__).with_name("ranks_driver.py")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict:
    """What two processes make of every case."""
    out = tmp_path_factory.mktemp("ranks") / "found.pt"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"),
        *("--master_port", str(free_port()), str(DRIVER), str(out)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("case", ["uneven", "idle", "empty"])
def test_two_ranks_make_the_step_of_one(two_ranks, case):
    found = two_ranks[case]
    module = small_policy(critic="shared")
    alone = updater(module, token_budget=14, lr=0.1).step(scripted_batch(), loss_of(PPO), temperature=0.7)
    assert found["ranks"] == 2
    torch.testing.assert_close(found["gradient"], gradient(module), rtol=0, atol=1e-10)
    assert found["terms"] == pytest.approx(dict(alone.terms), abs=1e-10)
    assert found["loss"] == pytest.approx([alone.loss, -alone.loss], abs=1e-10), "both ranks log the same loss"
    assert found["moved"] == 2
    assert not found["skipped"]


@pytest.mark.parametrize("case", ["spoilt", "late"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_both(two_ranks, case):
    found = two_ranks[case]
    assert found["skipped"]
    assert found["moved"] == 0


def test_the_spoilt_loss_is_the_plain_one_where_no_advantage_is_marked():
    plain, marked = (updater(small_policy(critic="shared")) for _ in range(2))
    a = plain.step(scripted_batch(), loss_of(PPO), temperature=0.7)
    b = marked.step(scripted_batch(), spoil(loss_of(PPO)), temperature=0.7)
    assert a.loss == b.loss
