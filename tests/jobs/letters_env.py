"""An environment that any model can learn something from: it pays for the letters it is told. And one of TRL's kind."""

from random import Random

from rolecall.tasks.env import Step


class Letters:
    """Three turns at most, of a length that its seed decides; even bytes pay."""

    def reset(self, row, seed):
        self.turns, self.left = 0, 2 + Random(seed).randrange(2)
        return f"letters {row.get('seed', 0) % 7}:"

    def step(self, message):
        text = message["content"].encode()
        self.turns, self.left = self.turns + 1, self.left - 1
        reward = sum(byte % 2 == 0 for byte in text) / max(1, len(text))
        return Step(messages="more", reward=reward, done=self.left == 0)


class Counter:
    """As TRL's `environment_factory` takes it: made without arguments, tools by their public methods."""

    def __init__(self):
        self.value, self.reward = 0, 0.0

    def reset(self, **kwargs) -> str | None:
        return f" Count to {kwargs['goal']}."

    def increment(self, step: int) -> str:
        """Add to the counter.

        Args:
            step: How much to add.

        Returns:
            The counter's value.
        """
        self.value += step
        return str(self.value)
