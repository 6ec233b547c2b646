"""Environments that behave, and ones that do not."""

import os
import random
import time
import weakref
from pathlib import Path
from typing import ClassVar

from rolecall.tasks.env import Move, Step


class Echo:
    """Says what it heard, `rounds` times; 1 for every turn."""

    rounds = 3

    def reset(self, row, seed):
        self.heard = []
        return row.get("prompt", f"seed {seed}")

    def step(self, message):
        self.heard.append(message["content"])
        done = len(self.heard) == self.rounds
        return Step(messages=[{"role": "tool", "content": f"heard {len(self.heard)}"}], reward=1.0, done=done)


class Wordy(Echo):
    """Says more or less."""

    def step(self, message):
        said = super().step(message)
        return Step(messages="x" * (1 + len(message["content"]) * 7 % 13), reward=1.0, done=said.done)


class Dawdling(Echo):
    """Answers when there is a certain file, or makes that file at its end."""

    def reset(self, row, seed):
        self.row = row
        return super().reset(row, seed)

    def step(self, message):
        while "waits_for" in self.row and not Path(self.row["waits_for"]).exists():
            time.sleep(0.01)
        said = super().step(message)
        if said.done and "makes" in self.row:
            Path(self.row["makes"]).touch()
        return said


class Endless(Echo):
    """Never ends."""

    rounds = -1


class Counted(Echo):
    """Says how many of its kind its process holds, and then how many it has made."""

    held: ClassVar = weakref.WeakSet()
    made: ClassVar = []

    def reset(self, row, seed):
        self.held.add(self)
        self.made.append(seed)
        return f"{len(self.held)} held"

    def step(self, message):
        return Step(messages=f"{len(self.made)} made")


class Raising(Echo):
    """Raises on rows that say so."""

    def step(self, message):
        if self.bad and len(self.heard) == 1:
            raise RuntimeError("the sky fell")
        return super().step(message)

    def reset(self, row, seed):
        self.bad = row.get("bad", False)
        return super().reset(row, seed)


class Hanging(Raising):
    """Sleeps for ever on rows that say so, in its second turn."""

    def step(self, message):
        if self.bad and len(self.heard) == 1:
            time.sleep(1000)
        return Echo.step(self, message)


class Dying(Raising):
    """Takes its process down on rows that say so."""

    def step(self, message):
        if self.bad and len(self.heard) == 1:
            os._exit(7)
        return Echo.step(self, message)


class Fickle(Dying):
    """Draws from no seed, so that it cannot be played again."""

    def step(self, message):
        return Step(messages=str(random.random())) if not self.bad else super().step(message)


class NotText(Echo):
    """Returns what its row says."""

    def reset(self, row, seed):
        self.wrong = row["wrong"]
        return "go"

    def step(self, message):
        return self.wrong


class Counting:
    """Two players count in turn; who says 3 wins."""

    players = ("a", "b")

    def reset(self, row, seed):
        self.count = 0
        return Move(speaker="a", messages={"a": "you are a", "b": "you are b"})

    def step(self, message):
        me, other = ("a", "b") if self.count % 2 == 0 else ("b", "a")
        self.count += 1
        if self.count == 3:
            return Move(speaker=other, rewards={me: 1.0, other: -1.0}, done=True)
        said = [{"role": "user", "content": message["content"], "author": me}]
        return Move(speaker=other, messages={other: said})


class NoStep:
    def reset(self, row, seed):
        return "go"


NoStep.step = None


class Explodes:
    def __init__(self):
        raise OSError("no display")

    def reset(self, row, seed):
        return "go"

    def step(self, message):
        return Step(done=True)


class Deaf(Echo):
    def step(self):
        return Step(done=True)


class Gymnasiums(Echo):
    action_space = None

    def reset(self, *, seed=None, options=None):
        return "go", {}
