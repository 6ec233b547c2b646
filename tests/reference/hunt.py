"""The game of the multi-agent runs that are computed again: forced moves, an agent that leaves, ends and cuts."""

import numpy as np
from gymnasium import spaces


class Hunt:
    """A parallel environment in PettingZoo's manner. Everything is a function of the seed and of what was done.

    By `luck` = seed % 3: 0 ends after four steps; 1 cuts itself off after five; 2 goes on until somebody stops it. Bob is
    away at step 2; with luck 2 he dies after step 3. At step 1 ann has one action, at step 3 bob has.
    """

    possible_agents = ("ann", "bob")
    sizes, choices = {"ann": 2, "bob": 3}, {"ann": 4, "bob": 3}

    def observation_space(self, agent):
        return spaces.Box(-9, 9, (self.sizes[agent],), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(self.choices[agent])

    def reset(self, seed=None, options=None):
        self.t, self.luck, self.place = 0, seed % 3, (seed % 11) / 11
        self.agents = list(self.possible_agents)
        return self.look()

    def look(self):
        """What those who are there see, and what they may do."""
        self.seen, self.may = {}, {}
        for i, agent in enumerate(self.agents):
            self.seen[agent] = np.sin(self.place * np.arange(1, self.sizes[agent] + 1) + i + self.t).astype(np.float32)
            forced = self.t == (1, 3)[self.possible_agents.index(agent)]
            self.may[agent] = [a == 1 if forced else a != self.t % 3 for a in range(self.choices[agent])]
        return dict(self.seen), {agent: {"action_mask": np.array(may)} for agent, may in self.may.items()}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        assert all(self.may[agent][action] for agent, action in actions.items())
        self.t += 1
        self.place = (self.place * 3 + sum((i + 2) * a for i, a in enumerate(actions.values())) / 7) % 2
        paid = {
            agent: float(np.float32(1 + action * self.place - i)) for i, (agent, action) in enumerate(actions.items())
        }
        self.dead = self.luck == 2 and self.t > 3
        ended, cut = self.luck == 0 and self.t == 4, self.luck == 1 and self.t == 5
        self.agents = [a for a in self.possible_agents if a == "ann" or not (self.t == 2 or self.dead)]
        seen, infos = self.look()
        ends = dict.fromkeys(self.agents, ended) | ({"bob": True} if self.dead else {})
        cuts = dict.fromkeys(self.agents, cut)
        self.over = ended or cut
        if ended:
            self.seen = {}
        if self.over:
            self.agents = []
        return seen, paid, ends, cuts, infos

    def close(self):
        pass


make = Hunt
