"""Environments that raise, hang, die or talk nonsense end their own episode and nothing else."""

from pathlib import Path

import agent_envs
import pytest
from agent_envs import Echo, NotText, Raising
from talking import play, talker

from rolecall.agents.pool import EnvPool, LocalEnvs
from rolecall.maths.roles import Role
from rolecall.tasks.env import EnvError, Step
from rolecall.types import Finish

FILE = Path(agent_envs.__file__)
ROWS = [{"prompt": f"go {i}", "bad": i == 1} for i in range(4)]


def pool(name, **more):
    return EnvPool(f"{FILE}:{name}", workers=1, **more)


def outcome(episodes):
    return [(e.finish, e.failure) for e in episodes]


def check_survived(episodes, reason):
    bad = episodes.pop(1)
    assert bad.finish is Finish.ABORT
    assert reason in bad.failure
    assert outcome(episodes) == [(Finish.ENVIRONMENT, None)] * 3
    assert [e.rewards for e in episodes] == [{"agent": 3.0}] * 3


def test_an_environment_that_raises_ends_its_episode_only():
    check_survived(play(Raising, talker("a"), ROWS), "RuntimeError: the sky fell")
    with pool("Raising") as envs:
        check_survived(play(envs, talker("a"), ROWS), "RuntimeError: the sky fell (line")


def test_an_aborted_episode_keeps_what_was_said_until_then():
    bad = play(Raising, talker("a"), ROWS)[1]
    (trajectory,) = bad.trajectories(group=0)["agent"]
    assert trajectory.finish is Finish.ABORT
    assert sum(role == Role.STOP for role in trajectory.roles) == 2


def test_one_that_hangs_is_killed_and_the_others_of_its_process_are_played_again():
    with pool("Hanging", deadline_s=1.0) as envs:
        before = envs.pids
        check_survived(play(envs, talker("a"), ROWS), "no answer within 1 s; it was killed")
        assert envs.pids != before


def test_one_that_takes_its_process_down_is_named_and_the_others_are_played_again():
    with pool("Dying") as envs:
        check_survived(play(envs, talker("a"), ROWS), "the process ended with exit code 7")


def test_one_that_cannot_be_played_again_is_given_up_with_the_reason():
    with pool("Fickle") as envs:
        found = outcome(play(envs, talker("a"), ROWS, max_turns=3))
    assert [finish for finish, _ in found] == [Finish.ABORT] * 4
    assert "exit code 7" in found.pop(1)[1]
    assert all("playing it again from its seed went another way" in why for _, why in found)


def test_the_same_episodes_in_this_process_and_in_workers():
    here = play(Echo, talker("a", "b"), ROWS, n=2)
    with EnvPool(Echo, workers=2) as envs:
        there = play(envs, talker("a", "b"), ROWS, n=2)
    for one, other in zip(here, there, strict=True):
        (a,), (b,) = one.trajectories(group=0)["agent"], other.trajectories(group=0)["agent"]
        assert (a.ids, a.roles, a.authors, a.finish) == (b.ids, b.roles, b.authors, b.finish)
    assert [(e.rewards, e.counts, e.view) for e in here] == [(e.rewards, e.counts, e.view) for e in there]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (None, "NotText.step returned None, not a Step"),
        ((1, 2), "NotText.step returned a tuple of 2, not a Step"),
        (("seen", 0.0, False, False, {}), "NotText.step returned a tuple of 5, as Gymnasium's environments do; return"),
        (Step(messages=[{"role": "user", "content": 7}]), "a message whose content is a int (7), not a text"),
        (Step(messages=[{"content": "hi"}]), "it needs `role` and `content`"),
        (Step(messages=3.5), "returned a float as messages"),
        (Step(messages="x", reward=float("nan")), "the reward nan, which is not finite"),
        (Step(messages="x", reward="high"), "a str ('high') as reward, which is not a number"),
        (Step(), "no messages and is not done"),
        (Step(context=[]), "a context without messages"),
        (Step(messages="x", counts={"n": "many"}), "count `n`"),
    ],
)
def test_what_is_no_reply_is_named(wrong, said):
    (episode,) = play(NotText, talker("a"), [{"wrong": wrong}])
    assert episode.finish is Finish.ABORT
    assert said in episode.failure


def test_a_reset_that_is_no_text_is_named():
    class Numbers(Echo):
        def reset(self, row, seed):
            return 7

    (reply,) = LocalEnvs(Numbers).ask("start", {0: ({}, 0)}).values()
    assert reply.reason == "Numbers.reset returned a int as messages, not a text or a list of messages"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Explodes", "cannot be made: OSError: no display"),
        ("Ecko", r"has no `Ecko`; did you mean `Echo`\?"),
        ("NoStep", "an environment needs `step`, which NoStep has not"),
        ("Deaf", r"Deaf.step cannot be called as step\(message\): too many positional arguments"),
        (
            "Gymnasiums",
            r"cannot be called as reset\(row, seed\): .*; it looks like a Gymnasium environment: register it",
        ),
    ],
)
def test_what_cannot_be_used_at_all_is_said_at_the_start(name, said):
    with pytest.raises(EnvError, match=said):
        pool(name)


def test_a_file_that_does_not_load_is_said_at_the_start(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_like_it\n")
    with pytest.raises(EnvError, match="cannot be loaded: ModuleNotFoundError"):
        EnvPool(f"{tmp_path / 'broken.py'}:Env", workers=1)


def test_environments_of_earlier_episodes_are_let_go():
    with pool("Counted") as envs:
        said = [
            [r.messages["agent"][0]["content"] for r in envs.ask("start", dict.fromkeys(range(n), ({}, 0))).values()]
            for n in (3, 1)
        ]
    assert said == [["1 held", "2 held", "3 held"], ["1 held"]]


def test_an_episode_goes_on_in_the_environment_it_began_in():
    with pool("Counted") as envs:
        envs.ask("start", {0: ({}, 0)})
        replies = [envs.ask("step", {0: {"role": "assistant", "content": "a"}})[0] for _ in range(3)]
    assert [reply.messages["agent"][0]["content"] for reply in replies] == ["1 made"] * 3


def test_workers_end_with_the_pool():
    with pool("Echo") as envs:
        workers = [worker.process for worker in envs.workers]
        play(envs, talker("a"), ROWS[:1])
    assert all(process.poll() is not None for process in workers)
