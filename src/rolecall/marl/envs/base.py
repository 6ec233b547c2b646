"""What a runner asks of environments, and how single ones are run side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rolecall.tasks.env import EnvError as EnvError

Team = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """What is known of an environment before the first episode."""

    name: str
    """As the user wrote it."""
    agents: tuple[str, ...]
    """All agents there can be, in the order of the arrays."""
    obs_size: int
    """Numbers an agent sees; those who see less are padded with zeros."""
    n_actions: int
    """Actions of the agent that has most; the others' further ones are never available."""
    limit: int
    """Steps after which an episode is cut off."""
    state_size: int | None = None
    """Numbers in the global state; None if it is all observations together."""
    team: Team = "mean"
    """How the agents' rewards make the team's: their sum, or their mean where all get the same."""

    @property
    def joint_state_size(self) -> int:
        """Numbers in the state that mixers and central critics see."""
        return len(self.agents) * self.obs_size if self.state_size is None else self.state_size


@dataclass(kw_only=True, slots=True)
class Frame:
    """What all environments show at one moment. The arrays belong to the environments and are written over next time."""

    obs: NDArray[np.float32]
    """[env, agent, obs]."""
    avail: NDArray[np.bool_]
    """[env, agent, action]: what may be done next. An absent agent has action 0 only."""
    present: NDArray[np.bool_]
    """[env, agent]."""
    reward: NDArray[np.float64]
    """[env, agent]: of the step just made."""
    terminated: NDArray[np.bool_]
    """[env]: that step ended the episode."""
    truncated: NDArray[np.bool_]
    """[env]: a limit cut the episode off."""
    state: NDArray[np.float32] | None = None
    """[env, state]."""
    faults: dict[int, str] = field(default_factory=dict)
    """Environments whose episode broke in this step, and why."""

    @classmethod
    def of(cls, spec: EnvSpec, count: int) -> "Frame":
        """Room for `count` environments, all agents present, everything available."""
        agents = len(spec.agents)
        return cls(
            obs=np.zeros((count, agents, spec.obs_size), np.float32),
            avail=np.ones((count, agents, spec.n_actions), bool),
            present=np.ones((count, agents), bool),
            reward=np.zeros((count, agents)),
            terminated=np.zeros(count, bool),
            truncated=np.zeros(count, bool),
            state=None if spec.state_size is None else np.zeros((count, spec.state_size), np.float32),
        )


class Envs(Protocol):
    """Many environments that step together."""

    spec: EnvSpec
    count: int

    def reset(self, seeds: Sequence[int]) -> Frame:
        """Begin an episode in each; it is a function of its seed alone."""
        ...

    def step(self, actions: NDArray[np.int64], running: NDArray[np.bool_]) -> Frame:
        """Do `actions` [env, agent] in the environments that are running; the others' part of the frame is void."""
        ...

    def close(self) -> None:
        """Free what they hold."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What one environment shows after a reset or a step; agents that are absent are left out of the mappings."""

    obs: Mapping[int, NDArray]
    """By agent's number."""
    avail: Mapping[int, NDArray] = field(default_factory=dict)
    """By agent's number, as long as the agent has actions; an agent left out may do all it has."""
    reward: Mapping[int, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    state: NDArray | None = None


class Env(Protocol):
    """One environment."""

    spec: EnvSpec
    actions: tuple[int, ...]
    """How many each agent has."""

    def reset(self, seed: int) -> Moment: ...
    def step(self, actions: Sequence[int]) -> Moment: ...
    def close(self) -> None: ...


class LocalEnvs:
    """Single environments in this process, one after the other."""

    def __init__(self, make: Callable[[], Env], count: int) -> None:
        self._envs = [make() for _ in range(count)]
        self.count, self.spec = count, self._envs[0].spec
        self._frame = Frame.of(self.spec, count)
        own = np.array(self._envs[0].actions)
        self._own = np.arange(self.spec.n_actions) < own[:, None]

    def reset(self, seeds: Sequence[int]) -> Frame:
        self._frame.faults = {}
        for i, (env, seed) in enumerate(zip(self._envs, seeds, strict=True)):
            self._take(i, lambda env=env, seed=seed: env.reset(seed))  # type: ignore[misc]
        return self._frame

    def step(self, actions: NDArray[np.int64], running: NDArray[np.bool_]) -> Frame:
        self._frame.faults = {}
        chosen = actions.tolist()
        for i in np.flatnonzero(running).tolist():
            self._take(i, lambda i=i: self._envs[i].step(chosen[i]))  # type: ignore[misc]
        return self._frame

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _take(self, i: int, act: Callable[[], Moment]) -> None:
        """Write what one environment shows into the frame; whatever it raises is its episode's fault."""
        frame = self._frame
        try:
            moment = act()
            present = list(moment.obs)
            frame.present[i] = False
            frame.present[i, present] = True
            frame.obs[i] = 0
            for agent, seen in moment.obs.items():
                frame.obs[i, agent, : seen.size] = np.asarray(seen).reshape(-1)
            frame.avail[i] = self._own
            for agent, mask in moment.avail.items():
                frame.avail[i, agent] = False
                frame.avail[i, agent, : len(mask)] = np.asarray(mask) != 0
            if len(present) < len(self.spec.agents):
                absent = ~frame.present[i]
                frame.avail[i, absent] = False
                frame.avail[i, absent, 0] = True
            frame.reward[i] = 0
            for agent, reward in moment.reward.items():
                frame.reward[i, agent] = reward
            frame.terminated[i], frame.truncated[i] = moment.terminated, moment.truncated
            if frame.state is not None:
                frame.state[i] = moment.state
        except EnvError:
            raise
        except Exception as error:  # an environment is anybody's program
            frame.faults[i] = f"it raised {type(error).__name__}: {error}"
