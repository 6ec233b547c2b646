"""The reward and the game of the runs that are computed again: apart, so that their workers import nothing heavy."""

from rolecall.tasks.env import Move


def reward(completions, worth, **kwargs):
    """High for low bytes; fails where the answer is long."""
    return [score(text, w) for text, w in zip(completions, worth, strict=True)]


def score(text, worth):
    if len(text) % 5 == 3:
        return None
    return worth * sum(ord(c) < 100 for c in text) / 4 - 0.1 * len(text)


class Duel:
    """Ada and Bob speak in turns, two and one times; each is told what the other said."""

    players = ("ada", "bob")

    def reset(self, row, seed):
        self.said = []
        return Move(speaker="ada", messages={p: [{"role": "user", "content": row["prompt"]}] for p in self.players})

    def step(self, message):
        speaker, other = self.players if len(self.said) % 2 == 0 else self.players[::-1]
        self.said.append((speaker, message["content"]))
        if len(self.said) == 3:
            worth = {player: duel_score(player, self.said) for player in self.players}
            return Move(speaker=other, rewards=worth, done=True)
        return Move(
            speaker=other, messages={other: [{"role": "user", "content": message["content"], "author": speaker}]}
        )


def duel_score(player, said):
    """Low bytes of one's own, less the other's length."""
    own = "".join(text for who, text in said if who == player)
    other = "".join(text for who, text in said if who != player)
    return sum(ord(c) < 100 for c in own) / 4 - 0.1 * len(other)
