"""Options of `rolecall marl`, and its presets."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rolecall.config.parts import OptimOptions, RunOptions, SaveOptions


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The agents' networks."""

    hidden: int = 64
    """Width of every layer, the critic's too."""
    recurrent: bool = False
    """A GRU that remembers the episode, for agents that see only a part of the world."""
    share: bool = True
    """One network for all agents, which is given the agent's number; off: a network for each."""
    last_action: bool = False
    """Agents also see what they did last."""

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise ValueError(f"agent.hidden must be at least 1, got {self.hidden}")


@dataclass(frozen=True, kw_only=True)
class QOptions:
    """iql, vdn and qmix: Q-learning from a buffer of episodes."""

    gamma: float = 0.9
    """Discount per step. Use a smaller value when estimates are noisy."""
    lam: float = 0.5
    """Lambda of TD(lambda) targets; 0 is the one-step target."""
    double: bool = True
    """The live network chooses the next action, the target network values it."""
    buffer: int = 2000
    """Episodes that are kept."""
    batch: int = 32
    """Episodes per optimiser step."""
    updates: int = 16
    """Optimiser steps per step."""
    target_every: int = 200
    """Optimiser steps between copies to the target networks."""
    tau: float | None = 0.01
    """Instead, move the target networks by this share in every optimiser step; None copies."""
    epsilon_start: float = 1.0
    """Share of random choices at the beginning."""
    epsilon_end: float = 0.05
    """Share of random choices in the end."""
    epsilon_steps: int = 100_000
    """Environment steps over which it falls."""
    epsilon_spread: float = 0.0
    """Of the episodes played at the same time the last has at least this share of random choices, the first none beyond
    epsilon, those between in even steps (as in Ape-X, arXiv 1803.00933): what is learned late is explored too. It fades to
    nothing at the last step."""
    alpha: float = 0.6
    """Draw episodes in proportion to their error to this power; 0 draws them evenly."""
    beta: float = 0.4
    """With alpha: how far weights undo the bias of such draws, 0 to 1."""
    scale_rewards: bool = True
    """Divide rewards by their running standard deviation, without a shift, which would change what is best."""
    embed: int = 32
    """qmix: width of the mixing network."""
    hyper: int = 64
    """qmix: width of the networks that make the mixing network's weights from the state."""

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ValueError(f"q.gamma and q.lam lie between 0 and 1, got {self.gamma} and {self.lam}")
        if self.buffer < self.batch or self.batch < 1 or self.updates < 1 or self.target_every < 1:
            raise ValueError(
                f"q.batch, q.updates and q.target_every must be at least 1 and q.buffer at least q.batch, got "
                f"{self.batch}, {self.updates}, {self.target_every} and {self.buffer}"
            )
        if self.embed < 1 or self.hyper < 1:
            raise ValueError(f"q.embed and q.hyper must be at least 1, got {self.embed} and {self.hyper}")
        if not 0 <= self.epsilon_end <= self.epsilon_start <= 1:
            raise ValueError(
                f"q.epsilon falls from epsilon_start to epsilon_end within 0 to 1, got {self.epsilon_start} and "
                f"{self.epsilon_end}"
            )
        if not 0 <= self.epsilon_spread <= 1:
            raise ValueError(f"q.epsilon_spread lies between 0 and 1, got {self.epsilon_spread}")

    def epsilon(self, env_steps: int) -> float:
        """The share of random choices after this many environment steps."""
        done = min(1.0, env_steps / max(1, self.epsilon_steps))
        return self.epsilon_start + done * (self.epsilon_end - self.epsilon_start)

    def shares(self, env_steps: int, *, done: float, count: int) -> list[float]:
        """The same in each of `count` environments, when this share of the run is done, 0 to 1."""
        least, most = self.epsilon(env_steps), self.epsilon_spread * (1 - done)
        return [max(least, most * i / max(1, count - 1)) for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class PPOOptions:
    """ippo and mappo."""

    gamma: float = 0.99
    """Discount per step."""
    lam: float = 0.95
    """GAE's lambda."""
    epochs: int = 4
    """Passes over each step's episodes."""
    minibatches: int = 1
    """Optimiser steps per pass."""
    clip: float = 0.2
    """The ratio is clipped to 1 plus or minus this."""
    value_clip: float | None = 0.2
    """How far values may move within an update, on the critic's own scale."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    entropy_end: float | None = None
    """Weight of the entropy bonus at the last step, to which it moves in a straight line; None keeps it."""
    value_norm: bool = True
    """The critic learns returns scaled by their running mean and standard deviation."""

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ValueError(f"ppo.gamma and ppo.lam lie between 0 and 1, got {self.gamma} and {self.lam}")
        if self.epochs < 1 or self.minibatches < 1:
            raise ValueError(
                f"ppo.epochs and ppo.minibatches must be at least 1, got {self.epochs}, {self.minibatches}"
            )

    def entropy(self, done: float) -> float:
        """The weight of the entropy bonus when this share of the run is done, 0 to 1."""
        end = self.entropy_coef if self.entropy_end is None else self.entropy_end
        return self.entropy_coef + done * (end - self.entropy_coef)


@dataclass(frozen=True, kw_only=True)
class EpisodeEvalOptions:
    """Evaluation episodes: Q-learners do what they think best, or nearly; PPO draws from its policy."""

    every: int = 50
    """Steps between evaluations; there is one before the first step and one at the end, too. 0: never."""
    episodes: int = 32
    """How many, with the same seeds every time."""
    greedy: bool = False
    """ippo and mappo: take the likeliest action instead of drawing one. Agents that must meet may then miss each other
    for ever."""
    temperature: float = 0.0
    """iql, vdn and qmix: draw from softmax(Q / temperature), so that two who wait for each other at different places get
    apart; 0 takes the best action."""
    stop_at: float | None = None
    """End the run when the mean return reaches this."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.episodes < 1:
            raise ValueError(f"eval.every is 0 or more and eval.episodes at least 1, got {self.every}, {self.episodes}")
        if self.temperature < 0:
            raise ValueError(f"eval.temperature is 0 or more, got {self.temperature}")


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Episodes that are written to `rollouts/`, to be looked at."""

    every: int = 20
    """Steps between records; 0 is never."""
    episodes: int = 4
    """How many of the step's episodes."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.episodes < 1:
            raise ValueError(
                f"record.every is 0 or more and record.episodes at least 1, got {self.every}, {self.episodes}"
            )


PRESETS: dict[str, dict[str, Any]] = {
    # EPyMARL's own configurations, as far as there are options for them. It plays one episode, then makes one update:
    # here ten are played at a time, then ten updates made.
    "epymarl-qmix": {
        "algo": "qmix",
        "episodes": 10,
        "agent": {"hidden": 64},
        "q": {
            "gamma": 0.99,
            "lam": 0.0,
            "buffer": 5000,
            "batch": 32,
            "updates": 10,
            "tau": None,
            "target_every": 200,
            "epsilon_steps": 50_000,
            "alpha": 0.0,
            "embed": 32,
            "hyper": 64,
        },
        "optim": {"lr": 5e-4, "max_grad_norm": 10.0},
    },
    "epymarl-mappo": {
        "algo": "mappo",
        "episodes": 10,
        "agent": {"hidden": 128, "recurrent": True},
        "ppo": {"gamma": 0.99, "epochs": 4, "clip": 0.2, "value_clip": None, "entropy_coef": 0.001},
        "optim": {"lr": 3e-4, "max_grad_norm": 10.0},
    },
}


@dataclass(frozen=True, kw_only=True)
class MARLOptions(RunOptions):
    """Agents that learn together in an environment."""

    command: ClassVar[str] = "marl"
    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS
    env: str = "lbf:8x8-2p-2f-coop"
    """`climbing`, `penalty:-100`, `lbf:8x8-2p-2f-coop`, or with `rolecall[marl]` `lbforaging:…`, `mpe:speaker-listener`,
    `pettingzoo:MODULE`, `gym:ID`; or your own, `file.py:function`."""
    algo: Literal["iql", "vdn", "qmix", "ippo", "mappo"] = "mappo"
    """Independent Q-learning, a sum or a monotonic mix of the agents' Q; PPO with a critic of the agent's own observation
    or of the whole state."""
    steps: int = 300
    """Rounds of episodes to learn from."""
    episodes: int = 32
    """Episodes per step, all played at the same time."""
    rewards: Literal["team", "individual"] = "team"
    """Whether agents share what all of them get (vdn and qmix must)."""
    limit: int | None = None
    """Steps after which an episode is cut off; the environment's own limit if not given."""
    workers: int = 0
    """Processes to play in, for slow environments; 0: this one."""
    deadline: float = 60.0
    """With workers: seconds an environment may take for a step before it is ended and its episode discarded."""
    network: bool = False
    """With workers: let environments use the network."""
    variables: tuple[str, ...] = ()
    """With workers: environment variables that environments see in addition to the usual ones (PATH, HOME, thread counts)."""
    agent: NetworkOptions = field(default_factory=NetworkOptions)
    q: QOptions = field(default_factory=QOptions)
    ppo: PPOOptions = field(default_factory=PPOOptions)
    optim: OptimOptions = field(default_factory=lambda: OptimOptions(lr=2e-3, max_grad_norm=10.0))
    eval: EpisodeEvalOptions = field(default_factory=EpisodeEvalOptions)
    record: RecordOptions = field(default_factory=RecordOptions)
    save: SaveOptions = field(default_factory=lambda: SaveOptions(every=200))
    seed: int = 0
    """Seeds everything: networks, environments, choices, draws from the buffer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("steps", "episodes")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1 step, got {self.limit}")
        if self.workers < 0 or self.deadline <= 0:
            raise ValueError(f"workers is 0 or more and deadline more than 0, got {self.workers} and {self.deadline}")
        if (self.network or self.variables) and not self.workers:
            raise ValueError("network and variables are for environments in processes of their own: give workers too")
        if self.rewards == "individual" and self.algo in ("vdn", "qmix"):
            raise ValueError(f"{self.algo} learns what the team gets: use rewards team, or iql, ippo or mappo")
        if self.device not in ("auto", "cpu"):
            raise ValueError("networks of agents are small and train on the cpu: leave out device")

    @property
    def on_policy(self) -> bool:
        """PPO, which learns from fresh episodes only."""
        return self.algo in ("ippo", "mappo")

    def plan(self) -> str:
        """What `--dry-run` says of a step."""
        o = self
        net = f"{'GRU' if o.agent.recurrent else 'feed-forward'} of {o.agent.hidden}, {'one' if o.agent.share else 'each its own'}"
        where = f"{o.workers} processes" if o.workers else "this process"
        if o.on_policy:
            update = f"{o.ppo.epochs} passes x {o.ppo.minibatches} mini-batches over these episodes"
            total = o.steps * o.ppo.epochs * o.ppo.minibatches
        else:
            update = f"{o.q.updates} optimiser steps on {o.q.batch} of the last {o.q.buffer:,} episodes"
            total = o.steps * o.q.updates
        lines = [
            f"one step: {o.episodes} whole episodes of {o.env}, played at the same time in {where}",
            f"update ({o.algo}): {update}; networks: {net}",
            f"in all: {o.steps:,} steps, {o.steps * o.episodes:,} episodes, {total:,} optimiser steps",
        ]
        if not o.on_policy:
            lines.append(
                f"random choices: {o.q.epsilon_start:g} falling to {o.q.epsilon_end:g} over {o.q.epsilon_steps:,} environment steps"
            )
        return "\n".join(lines)
