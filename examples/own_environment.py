"""Your own environment of several turns: a class with `reset` and `step`."""

import tempfile

from steps import steps

import rolecall
from rolecall.tasks.env import Step


class Treasure:
    """Walk left or right on a strip of five fields to the treasure, told where you are after every step."""

    def reset(self, row, seed):
        self.place, self.goal, self.left = 2, (0, 4)[seed % 2], 6
        return f"at {self.place}, go {'left' if self.goal == 0 else 'right'}"

    def step(self, message):
        self.left -= 1
        text = message["content"]
        self.place += ("r" in text) - ("l" in text)
        if self.place == self.goal or not 0 <= self.place <= 4 or not self.left:
            return Step(reward=1 - abs(self.place - self.goal) / 4, done=True)  # nearer is better
        return Step(messages=f"at {self.place}")


if __name__ == "__main__":
    run = rolecall.rl(
        model="tiny",
        env=Treasure,
        preset="grpo",
        steps=steps(20),
        prompts=4,
        samples=8,
        sampling={"max_new_tokens": 4},
        optim={"lr": 3e-4},
        out=f"{tempfile.mkdtemp()}/treasure",
    )
    for line in run.metrics:
        print(f"step {line['step']}: reward {line['reward']:.3f}, turns {line['agents/turns']:.1f}")
