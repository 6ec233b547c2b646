"""Environment steps per second with learning, on LBF 8x8-2p-2f-coop: `python benchmarks/marl.py [--seconds 20]`.

EPyMARL on a machine like the one this was written on (2 shared cores) did 565 steps per second with QMIX and 750 with
MAPPO (10 processes), learning included; those two numbers are constants here, measured beforehand and not again. Our own
are from one thread of one process. Two clocks: the wall's, which other programs on the machine slow down, and the
process's own CPU time. Agents begin untrained, so that episodes have their full 50 steps, as theirs did.
"""

import argparse
import time
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from rolecall.config.marl import MARLOptions
from rolecall.config.merge import resolve
from rolecall.marl.acting import Actor
from rolecall.marl.envs import open_envs
from rolecall.marl.runner import Runner
from rolecall.recipes.marl import PPOLearner, QLearner, networks
from rolecall.train.optim import make_optimizer
from rolecall.train.step import Updater

ENV = "lbf:8x8-2p-2f-coop"
EPYMARL = {"qmix": 565, "mappo": 750}


class Clock:
    """Both clocks since it was made."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def rates(self, steps: int) -> tuple[float, float]:
        return steps / (time.perf_counter() - self.wall), steps / (time.process_time() - self.cpu)

    def over(self, seconds: float) -> bool:
        return time.process_time() - self.cpu > seconds


def limit(name: str, count: int, seconds: float) -> None:
    """The environment alone, with random actions."""
    envs, rng = open_envs(name, count), np.random.default_rng(0)
    actions = rng.integers(0, 6, (50, count, 2))
    clock, steps, everything = Clock(), 0, np.ones(count, bool)
    while not clock.over(seconds):
        envs.reset(list(range(steps, steps + count)))
        for t in range(50):
            envs.step(actions[t], everything)
        steps += 50 * count
    row(f"environment alone, {name}, {count} at a time", clock.rates(steps))


def row(what: str, rates: tuple[float, float], reference: float | None = None) -> None:
    ratio = (
        ""
        if reference is None
        else f"   {rates[0] / reference:5.1f} / {rates[1] / reference:.1f} x EPyMARL's {reference:g}"
    )
    print(f"{what:72} {rates[0]:9,.0f} wall {rates[1]:9,.0f} CPU{ratio}", flush=True)


def learning(
    algo: str, seconds: float, *, preset: str | None = None, play_only: bool = False, more: dict[str, Any] | None = None
) -> None:
    """Playing and learning together, as `rolecall marl` does it."""
    chosen = {"algo": algo, "env": ENV, **(more or {})}
    layers = [("preset", MARLOptions.presets[preset] if preset else {}), ("benchmark", chosen)]
    o: MARLOptions = resolve(MARLOptions, layers).options
    envs = open_envs(o.env, o.episodes)
    module = networks(o, envs.spec)
    updater = Updater(
        Accelerator(cpu=True),
        module,
        make_optimizer(module, o.optim),
        token_budget=o.optim.token_budget,
        max_grad_norm=o.optim.max_grad_norm,
    )
    learner = (PPOLearner if o.on_policy else QLearner)(o, module=module, updater=updater, envs=envs)  # type: ignore[arg-type]
    for step in range(4):
        learner.update(learner.collect(step))
    name = preset or "defaults"
    what = f"{algo}, {name}: {'GRU' if o.agent.recurrent else 'feed-forward'} {o.agent.hidden}, {o.episodes} at a time"
    if play_only:
        runner = Runner(envs, rewards="team", seed=0)
        actor = Actor(module.agents, how="sample" if o.on_policy else "epsilon", epsilon=1.0)
        clock, steps, step = Clock(), 0, 0
        while not clock.over(seconds):
            steps += int(runner.run(actor, phase=0, step=step).episodes.lengths.sum())
            step += 1
        row(f"{what}, playing only", clock.rates(steps))
        return
    updates = o.ppo.epochs * o.ppo.minibatches if o.on_policy else o.q.updates
    clock, before, step = Clock(), learner.env_steps, 4
    while not clock.over(seconds):
        learner.update(learner.collect(step))
        step += 1
    row(f"{what}, {updates} updates", clock.rates(learner.env_steps - before), EPYMARL[algo])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="CPU seconds per line")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    print("environment steps per second, one process, one thread")
    limit("lbforaging:8x8-2p-2f-coop", 32, seconds / 2)
    limit(ENV, 32, seconds / 2)
    for algo in ("qmix", "mappo"):
        learning(algo, seconds / 2, play_only=True)
        learning(algo, seconds)
        learning(algo, seconds, preset=f"epymarl-{algo}")
    learning("qmix", seconds, preset="epymarl-qmix", more={"episodes": 1, "q.updates": 1})


if __name__ == "__main__":
    main()
