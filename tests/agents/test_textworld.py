"""Games of TextWorld, with the real package: made offline, won by their own walkthrough."""

import tempfile
from pathlib import Path

import pytest
from talking import play, spoken, talker

from rolecall.agents.environments import check_name
from rolecall.agents.textworld_env import TextWorldEnv
from rolecall.cli import main
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


@pytest.mark.slow
def test_the_coin_is_found_in_a_few_words(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def env():
        return TextWorldEnv(coin=3, brief=True)

    commands = textworld.Game.load(str(env()._made(1).with_suffix(".json"))).walkthrough
    assert commands[-1] == "take coin"
    (won,) = play(env, talker(*commands), [{"seed": 1}], new_tokens=20, max_turns=3)
    assert (won.failure, won.finish, won.rewards) == (None, Finish.ENVIRONMENT, {"agent": 1.0})
    (trajectory,) = won.trajectories(group=0)["agent"]
    heard = [text for who, _, text in spoken(trajectory) if who == "user"]
    assert [commands[turn + 1] in text.partition(": ")[2] for turn, text in enumerate(heard[:2])] == [True, True]
    assert not any(word in text for text in heard for word in ("look", "inventory", "examine", "\n"))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    (files,) = play(env, talker("look. Script", "a file", "save", "\x0e"), [{"seed": 1}], new_tokens=20, max_turns=4)
    assert (files.counts["no_commands"], sorted(tmp_path.iterdir())) == (3, before)
    (lost,) = play(env, talker("look"), [{"seed": 1}], new_tokens=20, max_turns=3)
    assert (lost.finish, lost.rewards) == (Finish.MAX_TURNS, {"agent": 0.0})


@pytest.mark.slow
def test_demonstrations_and_games_are_rows_that_the_commands_take(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import textworld_games as made

    monkeypatch.setattr(made, "GAMES", 2)
    monkeypatch.setattr(made, "DEMONSTRATIONS", 8)
    shown = made.demonstrations(seed=1)
    assert made.demonstrations(seed=1) == shown
    assert all(len(row["completion"]) <= 2 * made.TURNS - 1 for row in shown)
    assert any(row["completion"][-1]["content"] == "take coin" and len(row["completion"]) == 7 for row in shown)
    rows, games = made.write(shown, tmp_path / "shown.jsonl"), made.write(made.games(), tmp_path / "games.jsonl")
    short = ["--sampling.max_new_tokens", "12", "--agent.max_turns", "2", "--algorithm.entropy_coef", "0.01"]
    start, run = str(tmp_path / "start"), str(tmp_path / "run")
    assert main(["sft", "--model", "tiny", "--rows", rows, "--steps", "1", "--batch", "2", "--out", start]) == 0
    more = ["--env", made.ENV, "--rows", games, "--steps", "1", "--prompts", "2", "--samples", "2", "--out", run]
    assert main(["rl", "--model", start, *more, *short]) == 0


def test_what_is_no_game_is_said(tmp_path):
    check_name("textworld:rooms=2,hints=true")
    with pytest.raises(EnvError, match="there is no option 'room', but rooms, objects, quest, coin, hints, brief"):
        check_name("textworld:room=2")
    with pytest.raises(EnvError, match="rooms must be a whole number of at least 1, got 0"):
        check_name("textworld:rooms=0")
    with pytest.raises(EnvError, match="the level of coin says how large a game is; leave out rooms"):
        check_name("textworld:coin=4,rooms=2")
    with pytest.raises(EnvError, match="levels 1 to 300, got 301"):
        check_name("textworld:coin=301")
    with pytest.raises(EnvError, match="there is no game"):
        TextWorldEnv().reset({"game": str(tmp_path / "none.z8")}, 0)
