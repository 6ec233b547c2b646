"""PettingZoo's games of turns, with the real package."""

import pytest
from talking import play, spoken, talker

from rolecall.agents.environments import check_name, open_env
from rolecall.tasks.env import EnvError
from rolecall.types import Finish

pytest.importorskip("pettingzoo")


def test_players_take_turns_and_read_the_board():
    env = open_env("pettingzoo:classic/tictactoe-v3")
    (episode,) = play(env, talker("0", "1"), [{}], new_tokens=8, max_turns=3)
    assert (episode.finish, episode.counts["turns"]) == (Finish.MAX_TURNS, 3)
    first, second = (episode.trajectories(group=0)[player][0] for player in ("player_1", "player_2"))
    opening = spoken(first)[0][2]
    assert "take turns marking spaces on a 3 x 3 grid" in opening
    assert "You are player_1.\n\n0 1 2\n3 4 5\n6 7 8" in opening
    assert "You are player_2.\n\nO 1 2\n3 4 5" in spoken(second)[0][2]
    wanted = "Answer with one of these numbers, and nothing else: 1, 2, 3, 4, 5, 6, 7, 8."
    assert [text for who, _, text in spoken(second) if who == "user"] == [wanted], "0 is taken"
    assert episode.counts["bad_actions"] == 1


def test_a_game_to_its_end_gives_each_player_its_reward():
    game = open_env("pettingzoo:classic/connect_four-v3")()
    move = game.reset({"prompt": "Play."}, 0)
    assert move.messages["player_0"].startswith("Play.\n\nYou are player_0.\n\n. . .")
    for column in (0, 1, 0, 1, 0, 1):
        move = game.step({"role": "assistant", "content": str(column)})
        assert (move.done, move.rewards) == (False, {"player_0": 0.0, "player_1": 0.0})
    assert move.speaker == "player_0"
    assert ". . . . . . .\nX O . . . . .\nX O . . . . ." in move.messages["player_0"]
    move = game.step({"role": "assistant", "content": "0"})
    assert (move.done, move.truncated, move.rewards) == (True, False, {"player_0": 1.0, "player_1": -1.0})


def test_what_cannot_be_read_or_made_is_a_sentence():
    with pytest.raises(EnvError, match=r"pettingzoo does not make 'classic/tictactoes-v3'"):
        check_name("pettingzoo:classic/tictactoes-v3")
    with pytest.raises(EnvError, match="shows arrays of shape"):
        check_name("pettingzoo:classic/go-v5")
