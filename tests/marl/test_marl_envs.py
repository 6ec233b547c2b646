"""Environments by name, their adapters, and processes for slow ones."""

import os
import sys
from base64 import b64encode
from dataclasses import asdict

import numpy as np
import pytest

from rolecall.errors import UserError
from rolecall.marl.envs import names, open_envs
from rolecall.marl.envs.base import EnvError
from rolecall.marl.envs.pool import PooledEnvs
from rolecall.marl.envs.worker import ARRAYS, open_worker


def said(name, **options):
    with pytest.raises(EnvError) as caught:
        open_envs(name, 1, **options)
    assert isinstance(caught.value, UserError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("climbin", "there is no environment 'climbin'; did you mean 'climbing'?"),
        ("zzz", "there is no environment 'zzz'; there are climbing, penalty:-100"),
        ("lbf:8x8-2p-2f-cop", "'cop' is not a part of one"),
        ("lbf:8x8-2f", "does not say its players"),
        ("lbf:8x9-2p-2f", "boards are square"),
        ("lbf:4x4-2p-1f", "at least 5x5"),
        ("penalty:much", "the penalty is a number"),
        ("gym:CartPole-v9999", "there is no environment"),
        ("gym:CartPol-v1", "did you mean 'CartPole-v1'?"),
        ("gym:Pendulum-v1", "Discrete"),
        ("mpe:speaker_listner", "did you mean 'mpe:speaker-listener'?"),
        ("pettingzoo:mpe.simple_spread_v3", "cannot be imported"),
        ("pettingzoo:utils", "has no parallel_env"),
        ("odd_envs:nothing", "it must give a PettingZoo parallel or a Gymnasium environment"),
        ("odd_envs:nobody", "environment 'odd_envs:nobody': odd_envs has no `nobody`"),
        ("odd_envs:continuous", "Discrete"),
        ("no/such/file.py:make", "environment 'no/such/file.py:make': there is no file"),
        *[(f"{kind}x:1", f"did you mean '{kind}'?") for kind in names.KINDS],
        *[(f"lbf:{board}", "1 to 20 players and pieces of food") for board in ("8x8-0p-1f", "8x8-1p-0f")],
        *[(f"lbf:{board}", "1 to 20 players and pieces of food") for board in ("20x20-21p-1f", "20x20-1p-21f")],
    ],
)
def test_a_wrong_name_is_one_sentence(name, sentence):
    assert sentence in said(name)


def test_the_kinds_are_those_that_the_forms_show():
    assert names.KINDS == ("climbing", "penalty", "lbf", "lbforaging", "mpe", "pettingzoo", "gym")
    assert all(f"{kind}:" in names.FORMS or f"{kind}," in names.FORMS for kind in names.KINDS)


@pytest.mark.parametrize(("board", "agents"), [("5x5-1p-1f", 1), ("20x20-20p-20f", 20)])
def test_the_smallest_and_the_fullest_board_open(board, agents):
    assert len(open_envs(f"lbf:{board}", 1).spec.agents) == agents


@pytest.mark.parametrize(("name", "team"), [("odd_envs:Parallel", "mean"), ("gym:CartPole-v1", "sum")])
def test_an_episode_begins_unfinished_and_the_end_of_a_run_closes_it(name, team, monkeypatch):
    """Agents of a parallel environment share one reward, whose mean is the team's; Gymnasium's is summed."""
    envs = open_envs(name, 1)
    assert envs.spec.team == team
    frame = envs.reset([3])
    assert not frame.terminated.any()
    assert not frame.truncated.any()
    closed = []
    inner = envs._envs[0]._env
    monkeypatch.setattr(inner, "close", lambda: closed.append(True))
    envs.close()
    assert closed == [True]


def test_what_a_worker_sends_are_the_arrays_of_its_environments():
    spec, answer = open_worker(("lbf:5x5-2p-1f", 2, 7))
    envs, sent = names.open_local("lbf:5x5-2p-1f", 2, limit=7), []
    assert spec == asdict(envs.spec)
    assert spec["limit"] == 7
    for job in (("reset", [3, 4]), ("step", np.array([[1, 2], [3, 4]]), np.array([True, True]))):
        answer(job, sent.append)
        frame = envs.reset(job[1]) if job[0] == "reset" else envs.step(*job[1:])
        arrays = [getattr(frame, name) for name in ARRAYS]
        held = [None if array is None else b64encode(array.tobytes()).decode() for array in arrays]
        assert sent.pop() == {"arrays": held, "faults": [], "done": True}


def test_a_missing_package_names_the_command(monkeypatch):
    monkeypatch.setattr(names.importlib.util, "find_spec", lambda name: None)
    for name, package in (
        ("mpe:speaker-listener", "mpe2"),
        ("lbforaging:8x8-2p-2f", "lbforaging"),
        ("gym:X", "gymnasium"),
    ):
        assert said(name) == f"{name} needs {package}, which is not installed: pip install 'rolecall[marl]'"
    assert open_envs("lbf:8x8-2p-2f-coop", 1).spec.n_actions == 6, "the built-in ones need nothing"


def test_no_environment_drags_in_another():
    """Opening a built-in one imports neither gymnasium nor torch."""
    import subprocess

    program = (
        "import sys; from rolecall.marl.envs import open_envs; open_envs('lbf:8x8-2p-2f-coop', 1); "
        "open_envs('climbing', 1); sys.exit(bool({'torch', 'gymnasium', 'pettingzoo', 'mpe2'} & set(sys.modules)))"
    )
    path = os.pathsep.join(sys.path)
    assert subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}).returncode == 0


@pytest.mark.parametrize(
    ("name", "actions", "paid"),
    [("climbing", (0, 0), 11), ("climbing", (2, 1), 6), ("penalty:-25", (2, 2), -25), ("penalty:0", (0, 2), 10)],
)
def test_matrix_games_pay_what_the_table_says(name, actions, paid):
    envs = open_envs(name, 2)
    envs.reset([0, 0])
    for t in range(25):
        frame = envs.step(np.array([actions, actions]), np.ones(2, bool))
        assert frame.reward.tolist() == [[paid, paid]] * 2
        assert frame.truncated.all() == (t == 24)
    assert not envs.reset([0, 0]).truncated.any()


def test_agents_of_different_sizes_share_one_frame():
    envs = open_envs("odd_envs:always_good", 2)
    assert (envs.spec.obs_size, envs.spec.n_actions, envs.spec.agents) == (3, 3, ("ann", "bob"))
    frame = envs.reset([3, 4])
    assert np.array_equal(frame.obs[0], np.array([[0.3, 0.3, 0.0], [0.3, 0.3, 0.3]], np.float32))
    assert frame.avail[0].tolist() == [[True, True, True], [True, True, False]]
    frame = envs.step(np.array([[2, 1], [0, 0]]), np.ones(2, bool))
    assert frame.reward.tolist() == [[2.0, 1.0], [0.0, 0.0]]


def test_mpe_and_gymnasium_run():
    for name, agents in (("mpe:speaker-listener", 2), ("gym:CartPole-v1", 1)):
        envs = open_envs(name, 2)
        first = envs.reset([5, 6]).obs.copy()
        assert np.array_equal(envs.reset([5, 6]).obs, first)
        frame = envs.step(np.zeros((2, agents), np.int64), np.ones(2, bool))
        assert not frame.faults
        assert frame.obs.shape[1] == agents
        envs.close()
    assert open_envs("mpe:simple_speaker_listener_v4", 1).spec.limit == 25
    assert open_envs("gym:CartPole-v1", 1).spec.limit == 500


def test_processes_give_what_this_process_gives():
    here, there = open_envs("odd_envs:always_good", 5), open_envs("odd_envs:always_good", 5, workers=2)
    try:
        rng = np.random.default_rng(0)
        for seeds in ([1, 2, 3, 4, 5], [9, 8, 7, 6, 5]):
            a, b = here.reset(seeds), there.reset(seeds)
            for t in range(5):
                for name in ("obs", "avail", "present", "reward", "terminated", "truncated"):
                    assert np.array_equal(getattr(a, name), getattr(b, name)), (t, name)
                actions, running = rng.integers(0, 2, (5, 2)), np.ones(5, bool)
                a, b = here.step(actions, running), there.step(actions, running)
            assert a.terminated.all()
    finally:
        there.close()


def test_a_wrong_name_in_a_process_is_the_same_sentence():
    assert "there is no environment 'climbin'" in said("climbin", workers=1)


def test_an_environment_that_hangs_or_crashes_takes_only_its_own_process_along():
    for name, why in (("odd_envs:hangs", "no answer within 4 s"), ("odd_envs:crashes", "exit code 9")):
        envs = open_envs(name, 2, workers=2, deadline=4.0)
        try:
            envs.reset([4, 5])  # the first is the bad one
            frame = envs.step(np.zeros((2, 1), np.int64), np.ones(2, bool))
            assert list(frame.faults) == [0]
            assert why in frame.faults[0]
            assert frame.reward[1, 0] == 1.0
            frame = envs.reset([5, 6])  # a new process is in its place
            assert not frame.faults
            frame = envs.step(np.zeros((2, 1), np.int64), np.ones(2, bool))
            assert not frame.faults
            assert frame.reward.tolist() == [[1.0], [1.0]]
        finally:
            envs.close()


def to_the_end(name, actions=0):
    """(terminated, truncated, steps) of an episode in which nobody ever does anything else."""
    envs = open_envs(name, 1)
    envs.reset([3])
    for t in range(1, 1000):
        frame = envs.step(np.full((1, len(envs.spec.agents)), actions, np.int64), np.ones(1, bool))
        assert not frame.faults
        if frame.terminated[0] or frame.truncated[0]:
            return bool(frame.terminated[0]), bool(frame.truncated[0]), t
    raise AssertionError("no end")


def test_rwares_own_limit_is_a_truncation():
    pytest.importorskip("rware")
    assert to_the_end("gym:rware:rware-tiny-2ag-v2") == (False, True, 500)


def test_lbforagings_own_limit_is_a_truncation():
    assert to_the_end("lbforaging:8x8-2p-2f-coop") == (False, True, 50)
    assert to_the_end("gym:lbforaging:Foraging-8x8-2p-2f-coop-v3") == (False, True, 50)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("odd_envs:own_limit", (False, True, 6)),
        ("odd_envs:ends_before_its_limit", (True, False, 4)),
        ("odd_envs:parallel_own_limit", (False, True, 5)),
        ("odd_envs:always_good", (True, False, 5)),
    ],
)
def test_a_limit_that_an_environment_keeps_itself_is_no_end(name, how):
    assert to_the_end(name) == how


@pytest.mark.parametrize("network", [True, False])
def test_environments_in_other_processes_have_the_network_they_are_given_and_memory_without_a_limit(network):
    envs = PooledEnvs("climbing", 2, limit=None, workers=1, network=network)
    try:
        assert (envs.walls.network, envs.walls.memory_mb, envs.deadline_s) == (network, None, 60.0)
        assert envs.reset([0, 1]).obs.shape[0] == 2
    finally:
        envs.close()
