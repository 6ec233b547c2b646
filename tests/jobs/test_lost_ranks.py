"""Two ranks of which one is killed, stopped, slow, hanging, failing or started differently: real processes, real signals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("lost_ranks_driver.py")
CASES = ("stop-1", "kill-1", "stop-0", "kill-0", "slow", "hang", "error", "different")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """How every case ended."""
    place = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(DRIVER), str(place), *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize("case", ["stop-1", "kill-1"])
def test_a_rank_that_is_gone_ends_the_job_with_75_and_the_last_complete_step_is_saved(found, case):
    ended = found[case]
    assert ended["codes"] == [75, -9]
    (name,) = ended["saved"]
    step = int(name.removeprefix("step-"))
    assert 3 <= step < 40
    assert ended["state"]["learner"] == {"taken": 3 * step, "done": step}, "nothing of the broken step"
    how = (
        "has given no sign of life for 1.5 s (rank_timeout)" if case == "stop-1" else "is gone (its connection closed)"
    )
    assert last_line(ended["told"][0]) == (
        f"rank 1 {how}: stopped after step {step}, everything is saved; the same command with --resume continues"
    )


@pytest.mark.parametrize("case", ["stop-0", "kill-0"])
def test_the_others_notice_that_rank_0_is_gone_though_it_kept_the_store(found, case):
    ended = found[case]
    assert ended["codes"] == [-9, 75]
    assert last_line(ended["told"][1]).startswith("rank 0 ")
    assert "the same command with --resume continues" in last_line(ended["told"][1])


def test_a_stopped_rank_is_noticed_within_the_timeout(found):
    assert 1 < found["stop-1"]["seconds"] < 20, "the rest is this machine being busy"


def test_a_slow_rank_is_waited_for(found):
    assert found["slow"]["codes"] == [0, 0]
    assert found["slow"]["saved"] == ["step-000006"]


def test_a_rollout_that_hangs_on_one_rank_is_dropped_on_both_at_sigterm(found):
    ended = found["hang"]
    assert ended["codes"] == [143, 143]
    assert ended["saved"] == ["step-000003"]
    assert ended["state"]["learner"] == {"taken": 9, "done": 3}


def test_a_rank_that_ends_with_an_error_says_a_word_to_the_others(found):
    ended = found["error"]
    assert ended["codes"] == [75, 1]
    assert last_line(ended["told"][1]) == "the reward cannot be read"
    assert "rank 1 ended with exit code 1 (the reward cannot be read): stopped after step 3" in ended["told"][0]


def test_ranks_with_other_settings_are_refused_before_anything_is_made(found):
    ended = found["different"]
    assert ended["codes"] == [2, 2]
    assert ended["saved"] == []
    for told in ended["told"]:
        assert last_line(told) == (
            "the processes of this job were started differently: optim.lr is 2e-05 on rank 0 and 0.5 on rank 1; "
            "seed is 0 on rank 0 and 7 on rank 1; start all of them alike"
        )


def test_what_two_ranks_began_one_goes_on_with_but_not_bit_exactly(found):
    (about,) = found["alone"]["resumed"]
    assert ["processes", 2, 1] in about["changed"]
    assert not about["bit_exact"]
    assert found["alone"]["processes"] == 1
    assert found["alone"]["told"].count("processes changed from 2 to 1: not bit-exact with the run before") == 1
