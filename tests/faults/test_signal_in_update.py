"""SIGTERM in the middle of an optimiser step: the step is whole or not there, never half."""

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
from resume_driver import differing, forked, train

from rolecall.train.step import Updater

HOW = {"steps": 3, "optim.token_budget": 20}


def waited(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert waited(forked(lambda: train("ppo", run, **HOW))) == 0
    return run


@pytest.mark.parametrize("call", [1, 3, 7])
def test_a_signal_between_micro_batches_ends_the_run_after_the_step(tmp_path, whole, call):
    broken = tmp_path / "broken"

    def interrupted() -> int:
        calls, descend = 0, Updater.descend

        def counted(self, parts, backward, *args, **options):
            def signalled(rows):
                nonlocal calls
                calls += 1
                if calls == call:
                    os.kill(os.getpid(), signal.SIGTERM)
                backward(rows)

            return descend(self, parts, signalled, *args, **options)

        Updater.descend = counted
        code = train("ppo", broken, **HOW)
        assert calls > call, "the step went on"
        return code

    assert waited(forked(interrupted)) == 143
    assert waited(forked(lambda: train("ppo", broken, resume=True, **HOW))) == 0
    assert differing(whole, broken) == []
