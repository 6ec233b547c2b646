"""Agents that learn together: a round of whole episodes, then an update, again and again.

    IQL, VDN, QMIX   play with random choices mixed in -> buffer -> draw episodes -> Q-learning -> target follows
    IPPO, MAPPO      play -> values, GAE -> a few passes of the clipped loss

Left out: communication between agents, continuous actions, self-play.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rolecall.config.marl import MARLOptions
from rolecall.experience.store import RolloutDetails, write_rollouts
from rolecall.files import DiskError
from rolecall.marl.acting import Actor
from rolecall.marl.buffer import EpisodeBuffer
from rolecall.marl.envs import Envs, EnvSpec
from rolecall.marl.nets import Agents, AgentShape, Critic, MonotonicMixer, RunningMoments, SumMixer
from rolecall.marl.ppo import ActorCritic, Steps, ppo_loss, prepare
from rolecall.marl.q_learning import QNetworks, follow, q_loss
from rolecall.marl.runner import Round, Runner
from rolecall.recipes.records import KEPT_EVERY
from rolecall.train.optim import lr_factor, set_lr
from rolecall.train.rundir import RunDir
from rolecall.train.step import Updater
from rolecall.types import Batch, Finish, Trajectory

TRAIN, EVALUATE = 0, 1
"""Phases: what keys the random numbers of a round, beside seed and step."""


def agents_of(options: MARLOptions, spec: EnvSpec) -> Agents:
    """The agents' networks for an environment."""
    o = options.agent
    shape = AgentShape(
        agents=len(spec.agents),
        obs=spec.obs_size,
        actions=spec.n_actions,
        hidden=o.hidden,
        recurrent=o.recurrent,
        shared=o.share,
        last_action=o.last_action,
    )
    return Agents(shape, seed=options.seed)


def networks(options: MARLOptions, spec: EnvSpec) -> QNetworks | ActorCritic:
    """All that trains."""
    agents, count, hidden = agents_of(options, spec), len(spec.agents), options.agent.hidden
    if options.on_policy:
        view = spec.obs_size if options.algo == "ippo" else spec.joint_state_size
        critic = Critic(view + count, hidden, seed=options.seed + 1)
        return ActorCritic(agents, critic, view="own" if options.algo == "ippo" else "state")
    mixer: nn.Module | None = SumMixer() if options.algo == "vdn" else None
    if options.algo == "qmix":
        q = options.q
        mixer = MonotonicMixer(count, spec.joint_state_size, embed=q.embed, hidden=q.hyper, seed=options.seed + 1)
    return QNetworks(agents, mixer)


class _Marl:
    """What both kinds share: playing, counting, evaluating."""

    def __init__(
        self,
        options: MARLOptions,
        *,
        updater: Updater,
        agents: Agents,
        envs: Envs,
        watch: Callable[[int, Round], None] = lambda step, found: None,
    ) -> None:
        self.options, self.updater, self.agents, self.watch = options, updater, agents, watch
        self.runner = Runner(envs, rewards=options.rewards, seed=options.seed)
        self.env_steps = self.episodes = self.broken = 0
        self._noted: dict[str, list[torch.Tensor]] = {}
        self._steps = self._skipped = 0
        self._metrics: dict[str, float] = {}

    def _play(self, step: int, actor: Actor) -> Round:
        set_lr(self.updater.optimizer, lr_factor(step, steps=self.options.steps, options=self.options.optim))
        found = self.runner.run(actor, phase=TRAIN, step=step)
        self.env_steps += int(found.episodes.lengths.sum())
        self.episodes += len(found.episodes)
        self.broken += sum(found.faults.values())
        self._noted, self._steps, self._skipped = {}, 0, 0
        self._metrics = {**describe(found), "env_steps": float(self.env_steps), "broken": float(self.broken)}
        self.watch(step, found)
        return found

    def _descend(self, loss: Callable[[], torch.Tensor]) -> None:
        """One optimiser step, unless loss or gradient is not finite."""
        total = torch.zeros(())

        def backward(rows: torch.Tensor) -> None:
            nonlocal total
            total = loss()
            total.backward()

        norm, finite = self.updater.descend(
            [torch.zeros(0, dtype=torch.long)], backward, lambda: bool(torch.isfinite(total))
        )
        self._note({"loss": total.detach(), "grad_norm": torch.tensor(norm)})
        self._steps, self._skipped = self._steps + 1, self._skipped + int(not finite)

    def _note(self, numbers: Mapping[str, torch.Tensor]) -> None:
        """Numbers of one optimiser step; the mean over a step's goes into its metrics."""
        for name, number in numbers.items():
            self._noted.setdefault(name, []).append(number)

    def metrics(self) -> dict[str, float]:
        rate = float(self.updater.optimizer.param_groups[0]["lr"])
        means = {name: float(torch.stack(numbers).double().mean()) for name, numbers in self._noted.items()}
        counts = {"optimizer_steps": float(self._steps), "skipped": float(self._skipped)}
        return {**self._metrics, **means, **counts, "learning_rate": rate}

    def evaluate(self, envs: Envs) -> dict[str, float]:
        """Mean return and length of episodes without exploration, with the same seeds every time."""
        o = self.options
        temperature = float(not o.eval.greedy) if o.on_policy else o.eval.temperature
        actor = Actor(self.agents, how="sample" if temperature else "greedy", temperature=temperature)
        return describe(Runner(envs, rewards=o.rewards, seed=o.seed).run(actor, phase=EVALUATE, step=0))

    def explain(self) -> str:
        m = self.metrics()
        return f"return {m['return']:.3f}, length {m['episode_length']:.1f}, {int(m['env_steps']):,} env steps"

    def mark(self) -> Callable[[], None]:
        """This moment, to come back to: playing moves the counters alone."""
        return partial(_Marl.load_state_dict, self, _Marl.state_dict(self))

    def state_dict(self) -> dict[str, Any]:
        return {"env_steps": self.env_steps, "episodes": self.episodes, "broken": self.broken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.env_steps, self.episodes, self.broken = (int(state[k]) for k in ("env_steps", "episodes", "broken"))


class QLearner(_Marl):
    """IQL, VDN or QMIX as a `train.loop.Learner`."""

    def __init__(self, options: MARLOptions, *, module: QNetworks, **parts: Any) -> None:
        super().__init__(options, agents=module.agents, **parts)
        o = options.q
        self.module, self.target = module, module.target()
        self._pair = list(self.target.parameters()), list(module.parameters())
        self.buffer = EpisodeBuffer(o.buffer, seed=options.seed, alpha=o.alpha, beta=o.beta)
        self.moments = RunningMoments()
        self.updates = 0

    def collect(self, step: int) -> Round:
        """A round of episodes with random choices mixed in."""
        o = self.options
        shares = o.q.shares(self.env_steps, done=step / o.steps, count=o.episodes)
        found = self._play(step, Actor(self.agents, how="epsilon", epsilon=np.array(shares)[:, None]))
        self._metrics["epsilon"] = shares[0]
        return found

    def update(self, found: Round) -> None:
        """Put the episodes into the buffer and learn from what is drawn."""
        o = self.options.q
        self.buffer.add(found.episodes)
        self.moments.update(found.episodes.reward, found.episodes.valid[..., None].expand_as(found.episodes.reward))
        for _ in range(o.updates):
            drawn = self.buffer.sample(o.batch)
            batch = drawn.episodes

            def loss(batch: Any = batch, drawn: Any = drawn) -> torch.Tensor:
                found = q_loss(
                    self.module,
                    self.target,
                    batch,
                    gamma=o.gamma,
                    lam=o.lam,
                    double=o.double,
                    weights=drawn.weights if o.alpha else None,
                    scale=self._scaled,
                )
                if o.alpha:
                    self.buffer.set_priorities(drawn.index, found.errors)
                self._note({"q/taken": found.q, "q/target": found.target, "q/error": found.errors.mean()})
                return found.loss

            self._descend(loss)
            self.updates += 1
            if o.tau is not None:
                follow(*self._pair, share=o.tau)
            elif self.updates % o.target_every == 0:
                follow(*self._pair, share=1.0)

    def _scaled(self, rewards: torch.Tensor) -> torch.Tensor:
        return rewards / self.moments.std.float() if self.options.q.scale_rewards else rewards

    def state_dict(self) -> dict[str, Any]:
        """Counters, the buffer, the target networks, the rewards' moments."""
        return {
            **super().state_dict(),
            "updates": self.updates,
            "target": dict(self.target.state_dict()),
            "moments": dict(self.moments.state_dict()),
            "buffer": self.buffer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.updates = int(state["updates"])
        self.target.load_state_dict(state["target"])
        self.moments.load_state_dict(state["moments"])
        self.buffer.load_state_dict(state["buffer"])


class PPOLearner(_Marl):
    """IPPO or MAPPO as a `train.loop.Learner`."""

    def __init__(self, options: MARLOptions, *, module: ActorCritic, **parts: Any) -> None:
        super().__init__(options, agents=module.agents, **parts)
        self.module = module
        self.moments = RunningMoments(decay=0.99) if options.ppo.value_norm else None
        self._step = 0

    def collect(self, step: int) -> Round:
        """A round of episodes drawn from the policy."""
        self._step = step
        return self._play(step, Actor(self.agents, how="sample"))

    def update(self, found: Round) -> None:
        o = self.options.ppo
        steps, measured = prepare(
            self.module, self.moments, found.episodes, gamma=o.gamma, lam=o.lam, logprobs=o.minibatches > 1
        )
        self._metrics.update(measured)
        entropy_coef = o.entropy(self._step / max(1, self.options.steps - 1))
        rng = np.random.default_rng([self.options.seed, 2, self._step])
        for _ in range(o.epochs):
            if o.minibatches == 1:
                logprobs = self._learn_from(steps, entropy_coef)
                if steps.old_logprobs is None:
                    steps = replace(steps, old_logprobs=logprobs)
                continue
            for index in torch.from_numpy(rng.permutation(len(steps))).chunk(o.minibatches):
                self._learn_from(steps.part(index.sort().values), entropy_coef)

    def _learn_from(self, steps: Steps, entropy_coef: float) -> torch.Tensor:
        """One optimiser step; returns the log-probs before it."""
        o = self.options.ppo
        logprobs = torch.empty(0)

        def loss() -> torch.Tensor:
            nonlocal logprobs
            found = ppo_loss(
                self.module,
                steps,
                clip=o.clip,
                clip_value=o.value_clip,
                vf_coef=o.vf_coef,
                entropy_coef=entropy_coef,
            )
            self._note({f"loss/{name}": term.detach() for name, term in found.terms.items()})
            self._note(found.measured)
            logprobs = found.logprobs
            return found.loss

        self._descend(loss)
        return logprobs

    def state_dict(self) -> dict[str, Any]:
        """Counters and the returns' moments."""
        return {**super().state_dict(), "moments": dict(self.moments.state_dict()) if self.moments else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.moments is not None:
            self.moments.load_state_dict(state["moments"])


def describe(found: Round) -> dict[str, float]:
    """Numbers about a round; the return is the team's, or the mean of the agents' own."""
    returns = found.episodes.returns().mean(1).double()
    lengths = found.episodes.lengths.double()
    return {
        "return": float(returns.mean()),
        "return_std": float(returns.std(correction=0)),
        "episode_length": float(lengths.mean()),
        "truncated_ratio": float(found.episodes.bootstrap.double().mean()),
    }


_log = logging.getLogger(__name__)


class EpisodeRecords:
    """Writes some episodes of every so many steps."""

    def __init__(self, options: MARLOptions, spec: EnvSpec) -> None:
        self.options, self.spec = options, spec
        self.run: RunDir | None = None

    def __call__(self, step: int, found: Round) -> None:
        """Record a round of the step (counted from 0). A file that finds no room is said, and training goes on."""
        o = self.options.record
        if self.run is None or not o.every or (step + 1) % o.every:
            return
        path = self.run.rollouts / f"step-{step + 1:06d}.parquet"
        try:
            self._write(path, step + 1, found)
        except DiskError as error:
            _log.warning("the record of step %d was not written, the run continues: %s", step + 1, error)
            return
        if self.options.save.rollouts:
            self.run.thin(self.run.rollouts, last=self.options.save.rollouts, every=KEPT_EVERY)

    def _write(self, path: Path, step: int, found: Round) -> None:
        episodes = found.episodes.rows(slice(0, self.options.record.episodes)).trimmed()
        time = int(episodes.lengths.max())
        trajectories, details = [], []
        rewards = episodes.reward.expand(-1, -1, len(self.spec.agents))
        for b, length in enumerate(episodes.lengths.tolist()):
            ended = not bool(episodes.bootstrap[b])
            for a, agent in enumerate(self.spec.agents):
                actions = episodes.actions[b, :length, a, 0].tolist()
                total = float(rewards[b, :length, a].double().sum())
                trajectories.append(
                    Trajectory(
                        ids=tuple(actions),
                        roles=tuple(episodes.roles[b, :length, a].tolist()),
                        agent=agent,
                        episode=b,
                        group=0,
                        scores={"return": total},
                        finish=Finish.ENVIRONMENT if ended else Finish.MAX_TURNS,
                        policy_version=step - 1,
                    )
                )
                details.append(
                    RolloutDetails(
                        prompt_text=f"{self.spec.name}, seed {found.seeds[b]}",
                        answer_text=" ".join(map(str, actions)),
                        seed=found.seeds[b],
                        sampling=None,
                        sample=b,
                        extras={"env": self.spec.name, "steps": length, "ended": ended, "algo": self.options.algo},
                    )
                )

        def rows(x: torch.Tensor) -> torch.Tensor:
            return x[:, :time].transpose(1, 2).flatten(0, 1)

        lengths = episodes.lengths.repeat_interleave(len(self.spec.agents))
        inside = torch.arange(time) < lengths[:, None]
        # After a row's end a record has padding.
        batch = Batch(
            ids=torch.where(inside, rows(episodes.actions[..., 0]), 0),
            roles=torch.where(inside, rows(episodes.roles), 0).to(torch.uint8),
            verdicts=torch.where(inside, rows(episodes.verdicts), 0).to(torch.uint8),
            rewards=torch.where(inside, rows(rewards), torch.nan),
            scores=torch.tensor([t.scores["return"] for t in trajectories], dtype=torch.float64),
            groups=torch.zeros(len(trajectories), dtype=torch.long),
        )
        write_rollouts(path, trajectories, batch, step=step, details=details, model="agents", tokenizer="actions")
