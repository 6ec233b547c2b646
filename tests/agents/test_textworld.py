"""Games of TextWorld, with the real package: made offline, won by their own walkthrough."""

import tempfile

import pytest
from talking import play, spoken, talker

from rolecall.agents.environments import check_name
from rolecall.agents.textworld_env import TextWorldEnv
from rolecall.tasks.env import EnvError
from rolecall.types import Finish

textworld = pytest.importorskip("textworld")


@pytest.mark.slow
def test_a_game_is_made_once_and_its_walkthrough_wins_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = TextWorldEnv(rooms=1, objects=3, quest=2)
    path = made._made(5)
    before = path.stat().st_mtime_ns
    commands = textworld.Game.load(str(path.with_suffix(".json"))).walkthrough
    assert len(commands) == 2
    how = {"new_tokens": 60, "context_length": 4000, "max_turns": 5}
    (won,) = play(lambda: TextWorldEnv(rooms=1, objects=3, quest=2), talker(*commands), [{"seed": 5}], **how)
    assert (won.failure, won.finish, won.rewards) == (None, Finish.ENVIRONMENT, {"agent": 1.0})
    assert (won.counts["won"], won.counts["turns"], won.view["won"]) == (1, 2, True)
    (lost,) = play(
        lambda: TextWorldEnv(rooms=1, objects=3, quest=2, hints=True), talker("dance", ""), [{"game": str(path)}], **how
    )
    assert (lost.finish, lost.rewards, lost.counts["no_commands"]) == (Finish.MAX_TURNS, {"agent": 0.0}, 4)
    (trajectory,) = lost.trajectories(group=0)["agent"]
    heard = [text for who, _, text in spoken(trajectory) if who in ("prompt", "user")]
    assert commands[0] in heard[0], "what can be done is listed"
    assert ">" not in heard[1].replace("<|", "").replace("|>", "")
    assert path.stat().st_mtime_ns == before


def test_what_is_no_game_is_said(tmp_path):
    check_name("textworld:rooms=2,hints=true")
    with pytest.raises(EnvError, match="there is no option 'room', but rooms, objects, quest, hints"):
        check_name("textworld:room=2")
    with pytest.raises(EnvError, match="rooms must be a whole number of at least 1, got 0"):
        check_name("textworld:rooms=0")
    with pytest.raises(EnvError, match="there is no game"):
        TextWorldEnv().reset({"game": str(tmp_path / "none.z8")}, 0)
