"""Environments that misbehave, each as a function that makes one: `odd_envs:never_ends`."""

import os
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Parallel:
    """A parallel environment in PettingZoo's manner: two agents, three actions, ends after five steps."""

    possible_agents = ("ann", "bob")
    length = 5

    def observation_space(self, agent):
        return spaces.Box(-9, 9, (2,) if agent == "ann" else (3,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3 if agent == "ann" else 2)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.t, self.luck = 0, seed % 7
        return self.see(), {agent: {} for agent in self.agents}

    def see(self):
        return {a: np.full(self.observation_space(a).shape, self.t + self.luck / 10, np.float32) for a in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.t += 1
        over = self.t == self.length
        rewards = {agent: float(actions[agent]) for agent in self.agents}
        ended = dict.fromkeys(self.agents, over)
        cut = dict.fromkeys(self.agents, False)
        obs, infos = self.see(), {agent: {} for agent in self.agents}
        if over:
            self.agents = []
        return obs, rewards, ended, cut, infos

    def close(self):
        pass


class Masked(Parallel):
    """Observations with an action mask inside: what was done last may not be done again."""

    def observation_space(self, agent):
        return spaces.Dict({"observation": super().observation_space(agent), "action_mask": spaces.MultiBinary(3)})

    def see(self):
        last = getattr(self, "last", {})
        return {
            agent: {
                "observation": np.zeros(2 if agent == "ann" else 3, np.float32),
                "action_mask": np.array([a != last.get(agent) for a in range(3 if agent == "ann" else 2)], np.int8),
            }
            for agent in self.agents
        }

    def reset(self, seed=None, options=None):
        self.last = {}
        return super().reset(seed)

    def step(self, actions):
        assert all(self.last.get(agent) != action for agent, action in actions.items())
        self.last = dict(actions)
        return super().step(actions)


class ComeAndGo(Parallel):
    """Ann leaves after step 1, is back for step 3; bob dies at step 3 (his last choice)."""

    def step(self, actions):
        _, rewards, *_ = super().step(actions)
        if self.t == 5:
            return {"ann": np.zeros(2, np.float32)}, rewards, {"ann": True}, {"ann": False}, {}
        there = {1: ["ann", "bob"], 2: ["bob"], 3: ["ann", "bob"], 4: ["ann"]}[self.t]
        self.agents = there
        ended = {"bob": self.t == 4, "ann": False}
        return self.see(), rewards, ended, {"ann": False, "bob": False}, {agent: {} for agent in there}


class NeverEnds(gymnasium.Env):
    """One agent, no end."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2, start=3)

    def reset(self, *, seed=None, options=None):
        self.t, self.luck = 0, seed % 4
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert action in (3, 4)
        self.t += 1
        return np.zeros(2, np.float32), 1.0, False, False, {}


class Raises(NeverEnds):
    def step(self, action):
        if self.luck == 0:
            raise RuntimeError("the board fell down")
        return super().step(action)


class NotFinite(NeverEnds):
    def step(self, action):
        seen, *rest = super().step(action)
        return (seen + np.nan if self.luck == 0 and self.t == 2 else seen), *rest


class RewardNotFinite(NeverEnds):
    def step(self, action):
        seen, paid, *rest = super().step(action)
        return seen, (np.inf if self.luck == 0 and self.t == 2 else paid), *rest


class NoAction(NeverEnds):
    def step(self, action):
        found = super().step(action)
        return *found[:-1], {"action_mask": np.array([self.t < 2, self.t < 2])}


class Hangs(NeverEnds):
    def step(self, action):
        if self.luck == 0:
            time.sleep(1000)
        return super().step(action)


class Crashes(NeverEnds):
    def step(self, action):
        if self.luck == 0:
            os._exit(9)
        return super().step(action)


class Truncates(NeverEnds):
    """Cuts itself off at 7 and ends at 4 if it is lucky."""

    def step(self, action):
        found = super().step(action)
        return *found[:2], self.luck == 0 and self.t == 4, self.t == 7, {}


class Continuous(NeverEnds):
    action_space = spaces.Box(-1, 1, (2,), np.float32)


class OwnLimit(NeverEnds):
    """Reports its own limit as an end, as rware does."""

    max_steps, ends = 6, 6

    def step(self, action):
        found = super().step(action)
        return *found[:2], self.t == self.ends, False, {}


class EndsBeforeItsLimit(OwnLimit):
    ends = 4


class ParallelOwnLimit(Parallel):
    max_steps = 5


own_limit = OwnLimit
ends_before_its_limit = EndsBeforeItsLimit
parallel_own_limit = ParallelOwnLimit
always_good = Parallel
come_and_go = ComeAndGo
never_ends = NeverEnds
raises = Raises
not_finite = NotFinite
reward_not_finite = RewardNotFinite
no_action = NoAction
masked = Masked
hangs = Hangs
crashes = Crashes
truncates = Truncates
continuous = Continuous


def always_broken():
    env = Raises()
    env.reset = lambda seed=None, options=None: (setattr(env, "luck", 0), (np.zeros(2, np.float32), {}))[1]
    return env


def nothing():
    return 3
