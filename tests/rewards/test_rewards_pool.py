"""The pool against functions that hang, crash, eat memory and lie. Every process here is real."""

import fcntl
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rolecall.rewards import RewardError, RewardPool, Sample, WrongCount

HERE = Path(__file__).parent
STYLES = ["batch", "single", "coroutine", "compute_score"]


def source(name):
    return f"{HERE / 'misbehaving.py'}:{name}"


def answers(*texts, **columns):
    return [
        Sample(prompt="q", completion=text, row=dict(columns), prompt_index=i // 4, sample_index=i % 4)
        for i, text in enumerate(texts)
    ]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pid, seconds):
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


@pytest.mark.parametrize("style", STYLES)
def test_scores_come_back_in_order_whatever_the_style(style):
    with RewardPool(source(style)) as pool:
        scored = pool.score(answers(*map(str, range(40))))
    assert [s.total for s in scored] == [float(i) for i in range(40)]
    assert all(s.failure is None for s in scored)


@pytest.fixture(scope="module")
def pools():
    """One pool for each style, to be used again and again: each test also shows that the last one did no harm."""
    options = {"deadline_s": 20, "memory_mb": 200}
    with RewardPool(source("batch"), **options) as batch, RewardPool(source("single"), **options) as single:
        yield {"batch": batch, "single": single}


@pytest.mark.parametrize("style", ["batch", "single"])
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("exit", "the process ended with exit code 7"),
        ("segfault", "the process was ended by signal 11 (SIGSEGV)"),
        ("bomb", "it asked for more than memory_mb=200: MemoryError"),
        ("raise", "ValueError: no good (line"),
        ("quit", "SystemExit: 3"),
        ("recurse", "RecursionError"),
        ("nan", "it returned nan, which is not finite"),
        ("-inf", "it returned -inf, which is not finite"),
        ("text", "it returned '1.0' (a str), which is not a number"),
        *((f"forge {body}", "") for body in ("count", "types", "huge", "deep", "binary", "list")),
    ],
)
def test_only_the_guilty_sample_fails(pools, style, bad, why):
    pool = pools[style]
    scored = pool.score(answers("ok", "2", bad, "none", "5"))
    assert [s.total for s in scored] == [1.0, 2.0, None, None, 5.0]
    assert f"reward `{style}` failed on prompt 0 sample 2: " in scored[2].failure
    assert why in scored[2].failure
    assert [s.failure for i, s in enumerate(scored) if i != 2] == [None] * 4
    assert pool.take_metrics() == {f"rewards/{style}/failed": 1.0}


@pytest.mark.parametrize("style", ["batch", "single"])
def test_a_hang_is_killed_at_the_deadline(style):
    """One ignores SIGTERM, the other holds the interpreter's lock in C code."""
    with RewardPool(source(style), deadline_s=0.8) as pool:
        scored = pool.score(answers("ok", "hang", "2", "backtrack", "5"))
    assert [s.total for s in scored] == [1.0, None, 2.0, None, 5.0]
    for index in (1, 3):
        expected = f"reward `{style}` failed on prompt 0 sample {index}: no answer within 0.8 s; it was killed"
        assert scored[index].failure == expected


def test_several_guilty_samples_are_all_found():
    texts = ["ok", "exit", "1", "raise", "segfault", "2", "nan", "exit"]
    with RewardPool(source("batch")) as pool:
        scored = pool.score(answers(*texts))
    assert [s.total for s in scored] == [1.0, None, 1.0, None, None, 2.0, None, None]
    assert [s.failure is not None for s in scored] == [s.total is None for s in scored]


def test_the_rest_is_scored_together_again():
    with RewardPool(source("mean_removed")) as pool:
        scored = pool.score(answers("1", "exit", "3", "8"))
    assert [s.total for s in scored] == [-3.0, None, -1.0, 4.0]


def test_a_function_that_always_hangs_is_given_up_in_bounded_time():
    with RewardPool(source("batch"), deadline_s=0.1, workers=4) as pool:
        start = time.monotonic()
        scored = pool.score(answers(*["hang"] * 400))
        assert time.monotonic() - start < 10
    assert all(s.total is None and s.failure for s in scored)
    assert "not tried" in scored[-1].failure


@pytest.mark.parametrize("style", ["batch", "single"])
def test_a_crash_is_tried_once_more(style, tmp_path):
    with RewardPool(source(style)) as pool:
        scored = pool.score(answers(f"once {tmp_path / 'marker'}"))
    assert [(s.total, s.failure) for s in scored] == [(1.0, None)]


def test_a_failed_part_leaves_the_sample_without_a_total_and_none_is_not_zero():
    functions = {"rules": lambda completions, **_: [None, None, 0.5], "other": source("batch")}
    with RewardPool(functions, weights=[2.0, 10.0]) as pool:
        none, failed, both = pool.score(answers("none", "raise", "1"))
    assert (none.total, none.failure, none.scores) == (None, None, {"rules": None, "other": None})
    assert failed.total is None
    assert "reward `other` failed" in failed.failure
    assert (both.total, both.scores) == (11.0, {"rules": 0.5, "other": 1.0})


@pytest.mark.parametrize(("name", "got"), [("one_too_few", 2)])
def test_a_wrong_number_of_rewards_is_an_error_at_once(name, got):
    with RewardPool(source(name)) as pool:
        with pytest.raises(WrongCount, match=f"reward `{name}` returned {got} rewards for 3 answers") as caught:
            pool.score(answers("1", "2", "3"))
        assert (caught.value.name, caught.value.expected, caught.value.got) == (name, 3, got)
        assert caught.value.exit_code == 1, "the run was under way: not a wrong call"


def test_no_list_at_all_is_an_error_at_once():
    with RewardPool(source("nothing")) as pool, pytest.raises(RewardError, match="returned a NoneType; it must return"):
        pool.score(answers("1"))


def test_a_sample_nobody_spoke_of_has_failed():
    with RewardPool(source("single"), workers=1) as pool:
        (scored,) = pool.score(answers("forge done"))
        assert scored.total is None
        assert "its worker process never answered" in scored.failure


def test_a_long_wait_is_named(caplog):
    with RewardPool(source("single"), say_after_s=0.1) as pool, caplog.at_level(logging.WARNING, "rolecall.rewards"):
        pool.score(answers("1", "2", "3", "4", "5", "sleep 0.3"))
    assert any("reward `single` has been waiting 0 s on prompt 1 sample 1" in m for m in caplog.messages)


def test_failures_are_named_in_the_log_and_then_counted(caplog):
    with RewardPool(source("single")) as pool, caplog.at_level(logging.WARNING, "rolecall.rewards"):
        pool.score(answers(*["raise"] * 9))
    assert sum("failed on prompt" in m for m in caplog.messages) == 5
    assert "reward `single` failed on 4 more samples" in caplog.messages


def test_a_reward_that_applies_nowhere_is_named(caplog):
    with RewardPool("exact") as pool, caplog.at_level(logging.WARNING, "rolecall.rewards"):
        pool.score(answers("1", "2", solutoin="2"))
    assert "reward `exact` gave None for all of 2 samples: is its answer column there?" in caplog.messages


def test_closing_leaves_no_process_and_no_zombie():
    with RewardPool(source("batch"), workers=3, deadline_s=0.3) as pool:
        first = pool.pids
        pool.score(answers("hang"))
        pids = {*first, *pool.pids}
        assert len(pids) > 3
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    with pytest.raises(RewardError, match="closed"):
        pool.score(answers("1"))


def test_a_kill_takes_the_functions_own_children_along(tmp_path):
    with RewardPool(source("single")) as pool:
        assert pool.score(answers(f"fork {tmp_path / 'held'}"))[0].failure
        with (tmp_path / "held").open() as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which its child would still hold


def test_workers_end_with_the_trainer_even_in_c_code(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(
        textwrap.dedent(f"""
        from rolecall.rewards import RewardPool, Sample
        pool = RewardPool({source("batch")!r})
        print(*pool.pids, flush=True)
        pool.score([Sample(prompt="q", completion="backtrack")])
        """)
    )
    trainer = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    time.sleep(0.3)
    assert all(alive(pid) for pid in pids)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    assert all(gone_within(pid, 2) for pid in pids)


def test_the_pool_outlives_the_thread_that_made_it():
    made = []
    thread = threading.Thread(target=lambda: made.append(RewardPool(source("batch"))))
    thread.start()
    thread.join()
    time.sleep(0.1)
    with made[0] as pool:
        assert pool.score(answers("2"))[0].total == 2.0


def test_workers_killed_from_outside_are_replaced():
    with RewardPool(source("batch"), workers=4) as pool:
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        assert pool.score(answers("2"))[0].total == 2.0


def test_a_script_without_a_main_guard_runs_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        print("started")
        from rolecall.rewards import RewardPool, Sample
        wanted = "7"
        def right(completions, **kwargs):
            return [float(c == wanted) for c in completions]
        samples = [Sample(prompt="q", completion=c) for c in "67"]
        with RewardPool([right, lambda completion: len(completion)]) as pool:
            print([s.total for s in pool.score(samples)])
        """)
    )
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert out.stdout == "started\n[1.0, 2.0]\n"
    assert out.stderr == ""


def test_nothing_here_imports_torch_or_a_reward_module():
    check = (
        "import sys, rolecall.rewards as r, rolecall.tasks; r.RewardPool('math').close();"
        "print([m for m in ('torch', 'sympy', 'math_verify', 'reasoning_gym') if m in sys.modules])"
    )
    pytest.importorskip("math_verify")
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_a_thousand_cheap_answers_take_less_than_a_second():
    samples = [
        Sample(prompt="p" * 200, completion=str(i), completion_ids=range(200), row={"answer": "7"}) for i in range(1000)
    ]
    with RewardPool(["exact", source("batch")]) as pool:
        start = time.monotonic()
        scored = pool.score(samples)
        assert time.monotonic() - start < 1
    assert sum(s.scores["exact"] or 0 for s in scored) == 1


def test_workers_that_are_ready_at_the_same_moment_are_all_heard(monkeypatch):
    def all_at_once(channels, timeout):
        talking = [channel for channel in channels if isinstance(channel, socket.socket)]
        end = time.monotonic() + 60
        while len(select.select(talking, [], [], 0)[0]) < len(talking) and time.monotonic() < end:
            time.sleep(0.01)
        return talking

    with monkeypatch.context() as patch:
        patch.setattr("rolecall.workers.pool.wait", all_at_once)
        pool = RewardPool(source("batch"), workers=2)
    with pool:
        end = time.monotonic() + 60
        while not all(worker.ready for worker in pool.workers):
            pool._hear(None, 1.0)
            assert time.monotonic() < end, "one that is never ready ends the run later"
