"""SIGTERM and Ctrl-C: a flag, a save, an exit code; real processes, real signals."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rolecall.train.exit_codes import ExitCode
from rolecall.train.signals import StopSignals

RUN = """
import os, sys, time
from rolecall.train.signals import StopSignals
mode = sys.argv[1]
with StopSignals() as stop:
    child = os.fork() if mode == "fork" else -1
    if child == 0:  # says so itself: Python forgets a signal that comes before a fork is done
        print("ready", os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    if child == -1:
        print("ready", child, flush=True)
    while not stop.stop_requested:
        time.sleep(0.005)
    with stop.saving():
        print("saving", flush=True)
        if mode == "slow":
            sys.stdin.readline()
    print("saved", flush=True)
sys.exit(stop.exit_code)
"""


@pytest.fixture
def run():
    started = []

    def start(mode: str = "") -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", RUN, mode], text=True, **pipes)
        started.append(process)
        process.child = int(process.stdout.readline().split()[1])
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("which", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_saves_and_exits_with_its_code(run, which, code):
    process = run()
    process.send_signal(which)
    out, err = process.communicate(timeout=20)
    assert out == "saving\nsaved\n"
    assert err == f"rolecall: {which.name}: finishing the step, then saving\n", "one short line, no traceback"
    assert process.returncode == code


def test_the_second_signal_is_ignored_while_saving_and_says_so(run):
    process = run("slow")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "rolecall: SIGTERM: finishing the step, then saving\n"
    assert process.stderr.readline().startswith("rolecall: SIGINT: ignored, still saving; once more stops at once")
    out, _ = process.communicate("\n", timeout=20)
    assert out == "saved\n"
    assert process.returncode == 143, "the first signal decides"


def test_the_third_signal_exits_at_once(run):
    process = run("slow")
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        process.stderr.readline()
    assert process.wait(timeout=20) == ExitCode.ERROR
    assert "saved" not in process.stdout.read()


def test_a_forked_worker_dies_of_the_signal_as_usual(run):
    process = run("fork")
    os.kill(process.child, signal.SIGTERM)
    for _ in range(400):
        with open(f"/proc/{process.child}/stat") as stat:  # noqa: PTH123
            if ") Z" in stat.read():
                break
        time.sleep(0.01)
    else:
        os.kill(process.child, signal.SIGKILL)
        raise AssertionError("the worker did not die")
    assert process.poll() is None, "and the run continues"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130, "until it is asked itself"


def test_the_handlers_before_are_put_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals() as stop:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        assert not stop.stop_requested
        assert stop.exit_code == 0
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_outside_the_main_thread_it_says_that_it_can_do_nothing(caplog):
    def work() -> None:
        with StopSignals() as stop:
            assert not stop.stop_requested

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "not in the main thread" in caplog.text


def test_the_exit_codes():
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 74, 75, 130, 143]
