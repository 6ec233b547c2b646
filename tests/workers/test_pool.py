"""What becomes of jobs whose worker goes while it is idle."""

import os
import signal

import numpy as np
import pytest

from rolecall.agents.pool import EnvPool
from rolecall.marl.envs import open_envs
from rolecall.tasks.agent_tasks import GuessingEnv


def end_workers(pool):
    for worker in pool.workers:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()


def test_a_step_whose_process_is_gone_costs_its_episodes_and_a_reset_begins_new_ones():
    envs = open_envs("climbing", 2, workers=1)
    try:
        everywhere, nothing = np.ones(2, bool), np.zeros((2, 2), np.int64)
        envs.reset([1, 2])
        end_workers(envs)
        assert envs.step(nothing, everywhere).faults == dict.fromkeys((0, 1), "its process is gone")
        end_workers(envs)
        assert envs.reset([1, 2]).faults == {}
        assert envs.step(nothing, everywhere).faults == {}
    finally:
        envs.close()


@pytest.mark.parametrize("calls", [1, 2])
def test_an_episode_whose_process_is_gone_is_played_again(calls):
    with EnvPool(lambda: GuessingEnv(tries=3), workers=1) as envs:
        envs.ask("start", {0: ({"prompt": "go", "secret": 5}, 0)})
        for _ in range(calls):
            end_workers(envs)
            (reply,) = envs.ask("step", {0: {"role": "assistant", "content": "4"}}).values()
            assert reply.messages["agent"] == [{"role": "user", "content": "higher"}]
        end_workers(envs)
        (reply,) = envs.ask("step", {0: {"role": "assistant", "content": "4"}}).values()
        assert reply.done == (calls == 2), "the tries of before are counted"
