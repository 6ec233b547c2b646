"""Kuhn poker, for two sides of one policy, with the exact value of any strategy.

Three cards, K over Q over J; each player antes 1 and gets one. A player says `bet` or `pass`:

    pass pass          the higher card wins 1          bet pass           the first wins 1
    pass bet pass      the second wins 1               bet bet            the higher card wins 2
    pass bet bet       the higher card wins 2

In equilibrium the first player loses 1/18 a game (Kuhn 1950), and no strategy can be exploited.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from random import Random
from typing import Any

from rolecall.tasks.builtin import BuiltIn, Split
from rolecall.tasks.env import Message, Move
from rolecall.tasks.rows import ListRows, Rows

PLAYERS = ("first", "second")
_RANK = {"J": 0, "Q": 1, "K": 2}
_DEMONSTRATED = {"J": 1 / 3, "Q": 1 / 2, "K": 2 / 3}
"""How likely the demonstrations bet. They lean on the card, so that a model that imitates them reads it."""
DEALS = tuple(first + second for first, second in permutations("JQK", 2))
"""The first player's card, then the second's."""
_DECISIONS = {"first": ("", "pb"), "second": ("p", "b")}
"""What each player may have heard when it has to speak: p for pass, b for bet."""

Strategy = Mapping[tuple[str, str, str], float]
"""How likely a player bets, by (player, card, what was said so far)."""


@dataclass(frozen=True, kw_only=True)
class Kuhn(BuiltIn):
    """Both players are the policy; each side's words train for that side only."""

    def rows(self, split: Split, *, n: int, seed: int = 0) -> Rows:
        """Deals; `prompt` and `player` are one side's, for demonstrations."""
        rng = Random(f"kuhn/{split}/{seed}")
        drawn = [(rng.choice(DEALS), PLAYERS[i % 2], i) for i in range(n)]
        return ListRows(
            {"prompt": [_told(player, deal)], "deal": deal, "player": player, "draw": i, "task": self.name}
            for deal, player, i in drawn
        )

    def gold(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """One side of a game between players who bet with one jack in three, one queen in two, two kings in three."""
        rng, said, messages = Random(f"kuhn/{row['draw']}/{row['deal']}"), "", list[Message]()
        while pays(row["deal"], said) is None:
            speaker = _speaker(said)
            mine, card = speaker == row["player"], row["deal"][PLAYERS.index(speaker)]
            word = "b" if rng.random() < _DEMONSTRATED[card] else "p"
            said += word
            messages.append({"role": "assistant", "content": _WORDS[word]} if mine else _heard(word))
        while messages[-1]["role"] != "assistant":
            messages.pop()
        return messages

    def env(self) -> "KuhnGame":
        return KuhnGame()


class KuhnGame:
    """One game. Who says anything but `bet` or `pass` loses 2 and ends it; that costs the other nothing."""

    players = PLAYERS

    def reset(self, row: Mapping[str, Any], seed: int) -> Move:
        self.deal, self.said = str(row["deal"]), ""
        return Move(speaker="first", messages={player: [_told(player, self.deal)] for player in PLAYERS})

    def step(self, message: Message) -> Move:
        speaker = _speaker(self.said)
        other = PLAYERS[speaker == "first"]
        letter = {word: letter for letter, word in _WORDS.items()}.get(message["content"].strip())
        if letter is None:
            return Move(speaker=other, rewards={speaker: -2.0, other: 0.0}, done=True, counts={"illegal_moves": 1.0})
        self.said += letter
        won = pays(self.deal, self.said)
        if won is not None:
            return Move(speaker=other, rewards={"first": float(won), "second": float(-won)}, done=True)
        return Move(speaker=other, messages={other: [_heard(letter, author=speaker)]})


def pays(deal: str, said: str) -> int | None:
    """What the first player wins, or None if the game goes on."""
    higher = 1 if _RANK[deal[0]] > _RANK[deal[1]] else -1
    return {"pp": higher, "bp": 1, "pbp": -1, "bb": 2 * higher, "pbb": 2 * higher}.get(said)


def decisions(player: str) -> Iterator[tuple[str, str, str]]:
    """Everything a player may have to decide on, as a `Strategy` names it."""
    for card, said in product("JQK", _DECISIONS[player]):
        yield player, card, said


def game_value(strategy: Strategy) -> float:
    """What the first player wins on average, exactly (in the strategy's own numbers, fractions too)."""
    return sum(_value(strategy, deal, "") for deal in DEALS) / len(DEALS)


def exploitability(strategy: Strategy) -> float:
    """What best responses would win against both sides, on average: 0 in equilibrium only."""
    return (_best(strategy, "first", 1) + _best(strategy, "second", -1)) / 2


def _best(strategy: Strategy, player: str, sign: int) -> float:
    """The most that a player can win against the other side."""
    best = -2.0
    for plan in product((0, 1), repeat=6):
        pure = dict(zip(decisions(player), plan, strict=True))
        best = max(best, sign * game_value({**strategy, **pure}))
    return best


def _value(strategy: Strategy, deal: str, said: str) -> float:
    won = pays(deal, said)
    if won is not None:
        return won
    player = _speaker(said)
    bet = strategy[player, deal[PLAYERS.index(player)], said]
    return bet * _value(strategy, deal, said + "b") + (1 - bet) * _value(strategy, deal, said + "p")


_WORDS = {"p": "pass", "b": "bet"}


def _speaker(said: str) -> str:
    return PLAYERS[len(said) % 2]


def _told(player: str, deal: str) -> Message:
    return {"role": "user", "content": f"{player} {deal[PLAYERS.index(player)]}"}


def _heard(letter: str, author: str | None = None) -> Message:
    message = {"role": "user", "content": _WORDS[letter]}
    return message if author is None else {**message, "author": author}
