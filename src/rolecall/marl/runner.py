"""Whole episodes in many environments at a time.

All episodes of a round begin together and each is a function of its seed and of the actor, so that nothing of an
environment needs saving: a round that is repeated is the same.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from rolecall.marl.acting import Actor
from rolecall.marl.envs.base import EnvError, Envs, Frame
from rolecall.marl.episodes import EpisodeBatch

Rewards = Literal["team", "individual"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What a round of episodes gave."""

    episodes: EpisodeBatch
    """Those that did not break, trimmed to the longest."""
    seeds: tuple[int, ...]
    """Theirs."""
    faults: Counter[str]
    """Why the others were discarded, and how often."""


def episode_seeds(*key: int, count: int) -> list[int]:
    """Seeds of a round's episodes, keyed by what it is: run, phase, step."""
    return np.random.SeedSequence(key).generate_state(count, np.uint32).astype(np.int64).tolist()


class Runner:
    """Plays rounds."""

    def __init__(self, envs: Envs, *, rewards: Rewards, seed: int) -> None:
        self.envs, self.rewards, self.seed = envs, rewards, seed

    def run(self, actor: Actor, *, phase: int, step: int) -> Round:
        """One episode in each environment. Seed, phase and step decide all that is random."""
        envs, spec = self.envs, self.envs.spec
        seeds = episode_seeds(self.seed, phase, step, count=envs.count)
        rng = np.random.default_rng([self.seed, phase, step, 1])
        tape = _Tape(envs, self.rewards)
        actor.begin()
        frame = envs.reset(seeds)
        running = np.ones(envs.count, bool)
        for t in range(spec.limit):
            tape.see(t, frame, running)
            if not running.any():
                break
            self._check_masks(frame, running, t)
            actions = actor.act(frame.obs, frame.avail, rng)
            frame = envs.step(actions, running)
            tape.act(t, actions, frame, running)
        else:
            tape.see(spec.limit, frame, running)
        return tape.round(seeds, step=step)

    def _check_masks(self, frame: Frame, running: np.ndarray, t: int) -> None:
        stuck = ~frame.avail.any(-1) & running[:, None]
        if stuck.any():
            agent = int(np.argwhere(stuck)[0, 1])
            raise EnvError(
                f"{self.envs.spec.name}: {self.envs.spec.agents[agent]} may do nothing at step {t} (its action mask is all "
                "zero); an agent that cannot act must be absent or have one action that does nothing",
                exit_code=1,
            )


class _Tape:
    """Records a round, slot by slot, for all environments at once; what follows an episode's end is cleared last."""

    def __init__(self, envs: Envs, rewards: Rewards) -> None:
        spec, count, slots = envs.spec, envs.count, envs.spec.limit + 1
        agents = len(spec.agents)
        self.spec, self.rewards = spec, rewards
        self.obs = np.empty((slots, count, agents, spec.obs_size), np.float32)
        self.avail = np.empty((slots, count, agents, spec.n_actions), bool)
        self.present = np.empty((slots, count, agents), bool)
        self.state = None if spec.state_size is None else np.empty((slots, count, spec.state_size), np.float32)
        self.actions = np.zeros((slots, count, agents), np.int64)
        self.reward = np.zeros((slots, count, agents), np.float32)
        self.terminated, self.truncated, self.filled = (np.zeros((slots, count), bool) for _ in range(3))
        self.faults: dict[int, str] = {}
        self.slots = 0

    def see(self, t: int, frame: Frame, running: np.ndarray) -> None:
        """What is there before action t; also, for episodes that just ended, after the last one."""
        for i, why in frame.faults.items():
            self.faults.setdefault(i, why)
        bad = ~np.isfinite(frame.obs).all((1, 2))
        if frame.state is not None:
            bad |= ~np.isfinite(frame.state).all(1)
        if bad.any():
            for i in np.flatnonzero(bad & self._live(t, running)).tolist():
                self.faults.setdefault(i, "its observation is not finite")
        self.filled[t] = self._live(t, running)
        self.obs[t], self.avail[t], self.present[t] = frame.obs, frame.avail, frame.present
        if self.state is not None:
            self.state[t] = frame.state
        self.slots = t + 1
        if self.faults:
            running[list(self.faults)] = False

    def _live(self, t: int, running: np.ndarray) -> np.ndarray:
        """Environments that run, or made their last step just before."""
        return running if t == 0 else running | (self.filled[t - 1] & (self.terminated[t - 1] | self.truncated[t - 1]))

    def act(self, t: int, actions: np.ndarray, frame: Frame, running: np.ndarray) -> None:
        """What was done at t and what came of it; environments whose episode is over stop running."""
        self.actions[t], self.reward[t] = actions, frame.reward
        self.terminated[t] = frame.terminated & running
        self.truncated[t] = frame.truncated & running & ~frame.terminated
        if t == self.spec.limit - 1:
            self.truncated[t] |= running & ~frame.terminated
        if not np.isfinite(frame.reward).all():
            for i in np.flatnonzero(running & ~np.isfinite(frame.reward).all(1)).tolist():
                self.faults.setdefault(i, "its reward is not finite")
        running &= ~(self.terminated[t] | self.truncated[t])

    def round(self, seeds: list[int], *, step: int) -> Round:
        """The whole episodes as a batch."""
        count = self.filled.shape[1]
        good = np.array([i for i in range(count) if i not in self.faults], np.int64)
        faults = Counter(self.faults.values())
        if not len(good):
            why, times = faults.most_common(1)[0]
            raise EnvError(
                f"all {count} episodes of step {step + 1} in {self.spec.name} broke; {times} of them because {why}",
                exit_code=1,
            )
        slots = self.slots
        filled = self.filled[:slots, good]
        ended = self.terminated[:, good] | self.truncated[:, good]
        acted = filled & ~np.concatenate([np.zeros((1, len(good)), bool), ended[: slots - 1]])
        reward = self.reward[:slots, good]
        if self.rewards == "team":
            total = reward.sum(2, keepdims=True)
            reward = total if self.spec.team == "sum" else total / reward.shape[2]
        batch = EpisodeBatch(
            obs=_kept(self.obs[:slots, good], filled),
            actions=_kept(self.actions[:slots, good], acted)[..., None],
            avail_actions=_kept(self.avail[:slots, good], filled),
            reward=_kept(reward, acted),
            terminated=_kept(self.terminated[:slots, good], filled)[..., None],
            truncated=_kept(self.truncated[:slots, good], filled)[..., None],
            filled=_kept(filled, filled)[..., None],
            present=_kept(self.present[:slots, good], filled),
            global_state=None if self.state is None else _kept(self.state[:slots, good], filled),
        ).trimmed()
        return Round(episodes=batch, seeds=tuple(seeds[i] for i in good), faults=faults)


def _kept(array: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    """[time, env, …] as [env, time, …], zero where the mask is False."""
    wide = mask.reshape(*mask.shape, *[1] * (array.ndim - 2))
    return torch.from_numpy(np.ascontiguousarray(np.where(wide, array, np.zeros((), array.dtype)).swapaxes(0, 1)))
