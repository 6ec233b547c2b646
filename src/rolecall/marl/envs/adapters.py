"""Environments of other packages, one at a time: Gymnasium (one agent, or a tuple of them), PettingZoo parallel."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolecall.marl.envs.base import EnvError, EnvSpec, Moment
from rolecall.tasks.env import at_own_limit, own_limit

DEFAULT_LIMIT = 500
"""Steps after which an episode is cut off if the environment names no limit of its own."""


class GymEnv:
    """A Gymnasium environment: a Discrete action space and one agent, or a Tuple of Discrete ones and an agent for each.

    An end at the step limit that an environment keeps itself (rware's `max_steps`) is a truncation; where the environment
    can tell the two apart, `really_ended` does.
    """

    def __init__(
        self,
        env: Any,
        *,
        name: str,
        limit: int | None = None,
        before_reset: Callable[[Any], None] = lambda env: None,
        really_ended: Callable[[Any], bool] | None = None,
    ) -> None:
        from gymnasium import spaces

        self._env, self._before_reset, self._really_ended = env, before_reset, really_ended
        self._several = isinstance(env.action_space, spaces.Tuple)
        own = list(env.action_space) if self._several else [env.action_space]
        seen = list(env.observation_space) if self._several else [env.observation_space]
        self._starts = tuple(int(space.start) for space in own if isinstance(space, spaces.Discrete))
        if len(self._starts) != len(own):
            raise EnvError(
                f"{name} has actions of the kind {own[0]}; agents here choose among numbered ones (Discrete)"
            )
        self.actions = tuple(int(space.n) for space in own)
        agents = tuple(f"agent_{i}" for i in range(len(own))) if self._several else ("agent",)
        self.spec = EnvSpec(
            name=name,
            agents=agents,
            obs_size=max(_size(space, name) for space in seen),
            n_actions=max(self.actions),
            limit=limit or _own_limit(env) or DEFAULT_LIMIT,
            team="sum",
        )
        self._spaces = seen

    def reset(self, seed: int) -> Moment:
        self._steps = 0
        self._before_reset(self._env)
        obs, info = self._env.reset(seed=seed)
        return self._moment(obs, info)

    def step(self, actions: Sequence[int]) -> Moment:
        shifted = [a + start for a, start in zip(actions, self._starts, strict=True)]
        obs, reward, ended, cut, info = self._env.step(shifted if self._several else shifted[0])
        self._steps += 1
        if self._cut_short(ended, cut):
            ended, cut = False, True
        rewards = list(reward) if np.ndim(reward) else [reward] * len(self.spec.agents)
        return self._moment(obs, info, rewards, ended=bool(np.all(ended)), cut=bool(np.any(cut)))

    def _cut_short(self, ended: Any, cut: Any) -> bool:
        """Whether what is reported as an end is the environment's own limit."""
        if not np.all(ended) or np.any(cut):
            return False
        if self._really_ended is not None:
            return not self._really_ended(self._env)
        return at_own_limit(self._env, self._steps)

    def _moment(
        self, obs: Any, info: Any, rewards: Sequence[float] = (), *, ended: bool = False, cut: bool = False
    ) -> Moment:
        parts = obs if self._several else (obs,)
        found = info.get("action_mask") if isinstance(info, Mapping) else None
        masks = {} if found is None else dict(enumerate(found if np.ndim(found) > 1 else [found]))
        return Moment(
            obs={i: _numbers(part, space) for i, (part, space) in enumerate(zip(parts, self._spaces, strict=True))},
            avail=masks,
            reward={i: float(reward) for i, reward in enumerate(rewards)},
            terminated=ended,
            truncated=cut and not ended,
        )

    def close(self) -> None:
        self._env.close()


class ParallelEnv:
    """A PettingZoo parallel environment. Agents may come and go; an episode is over when none is left.

    It ended if any of the last agents' terminations says so and not only because of a step limit that the environment
    keeps itself, else it was cut off.
    """

    def __init__(self, env: Any, *, name: str, limit: int | None = None) -> None:
        from gymnasium import spaces

        self._env = env
        agents = tuple(env.possible_agents)
        self._number = {agent: i for i, agent in enumerate(agents)}
        own = [env.action_space(agent) for agent in agents]
        for agent, space in zip(agents, own, strict=True):
            if not isinstance(space, spaces.Discrete):
                raise EnvError(
                    f"{name}: {agent} has actions of the kind {space}; agents here choose among numbered ones (Discrete)"
                )
        self.actions = tuple(int(space.n) for space in own)
        self._spaces = [env.observation_space(agent) for agent in agents]
        self._masked = [isinstance(space, spaces.Dict) and "action_mask" in space.spaces for space in self._spaces]
        self._spaces = [
            space["observation"] if masked else space for space, masked in zip(self._spaces, self._masked, strict=True)
        ]
        self.spec = EnvSpec(
            name=name,
            agents=agents,
            obs_size=max(_size(space, name) for space in self._spaces),
            n_actions=max(self.actions),
            limit=limit or _own_limit(env) or DEFAULT_LIMIT,
        )

    def reset(self, seed: int) -> Moment:
        self._steps = 0
        obs, infos = self._env.reset(seed=seed)
        return self._moment(obs, infos)

    def step(self, actions: Sequence[int]) -> Moment:
        chosen = {agent: actions[self._number[agent]] for agent in self._env.agents}
        obs, rewards, ended, cut, infos = self._env.step(chosen)
        self._steps += 1
        over = not self._env.agents
        terminated = over and (any(ended.values()) or not any(cut.values()))
        if terminated and all(ended.values()) and not any(cut.values()) and at_own_limit(self._env, self._steps):
            terminated = False
        gone = {agent for agent in obs if ended.get(agent) or (agent not in self._env.agents and not over)}
        return self._moment(
            {agent: seen for agent, seen in obs.items() if agent not in gone},
            infos,
            rewards,
            terminated=terminated,
            truncated=over and not terminated,
        )

    def _moment(
        self,
        obs: Mapping[str, Any],
        infos: Mapping[str, Any],
        rewards: Mapping[str, float] | None = None,
        *,
        terminated: bool = False,
        truncated: bool = False,
    ) -> Moment:
        seen: dict[int, NDArray] = {}
        masks: dict[int, NDArray] = {}
        for agent, what in obs.items():
            i = self._number[agent]
            info = infos.get(agent) or {}
            mask = what["action_mask"] if self._masked[i] else info.get("action_mask")
            if mask is not None:
                masks[i] = mask
            seen[i] = _numbers(what["observation"] if self._masked[i] else what, self._spaces[i])
        return Moment(
            obs=seen,
            avail=masks,
            reward={self._number[agent]: float(reward) for agent, reward in (rewards or {}).items()},
            terminated=terminated,
            truncated=truncated,
        )

    def close(self) -> None:
        self._env.close()


def foraging_env(id_: str, *, name: str, limit: int | None = None) -> GymEnv:
    """lbforaging's own environment, with its time limit as what it is: a cut.

    Its reset places players around where they stood in the episode before; forgetting those places makes an episode a
    function of its seed.
    """
    import gymnasium
    import lbforaging  # noqa: F401 - registers its environments

    def forget(env: Any) -> None:
        for player in env.players:
            player.position = None

    env = gymnasium.make(id_, disable_env_checker=True).unwrapped
    return GymEnv(
        env,
        name=name,
        limit=limit or env._max_episode_steps,
        before_reset=forget,
        really_ended=lambda env: env.field.sum() == 0,
    )


def _size(space: Any, name: str) -> int:
    from gymnasium import spaces

    try:
        return int(spaces.flatdim(space))
    except (NotImplementedError, ValueError) as error:
        raise EnvError(f"{name} shows observations of the kind {space}, which have no fixed size: {error}") from error


def _numbers(what: Any, space: Any) -> NDArray:
    """An observation as one row of numbers."""
    from gymnasium import spaces

    if isinstance(what, np.ndarray) and isinstance(space, spaces.Box):
        return what.reshape(-1)
    return np.asarray(spaces.flatten(space, what))


def _own_limit(env: Any) -> int | None:
    """The limit an environment names: Gymnasium's `max_episode_steps`, or one it keeps itself."""
    found = getattr(getattr(env, "spec", None), "max_episode_steps", None) or own_limit(env)
    return int(found) if found else None
