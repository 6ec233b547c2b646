"""`rolecall marl`: agents that learn together."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rolecall.config.marl import MARLOptions
from rolecall.errors import UserError
from rolecall.jobs.building import Built, Job, loop_options
from rolecall.jobs.running import Run, train
from rolecall.marl.envs import open_envs
from rolecall.marl.nets import save_agents
from rolecall.marl.ppo import ActorCritic
from rolecall.recipes.marl import EpisodeRecords, PPOLearner, QLearner, networks
from rolecall.train.callbacks import Given
from rolecall.train.manifest import RefusedCheckpointError
from rolecall.train.optim import make_optimizer
from rolecall.train.persist import load_optimizer
from rolecall.train.progress import Progress
from rolecall.train.state import check_finite, read_state, write_state
from rolecall.train.step import Updater

_STATE = "trainer"


def marl(
    *,
    preset: str | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Given] = (),
    **settings: Any,
) -> Run:
    """Train agents: `marl(env="lbf:8x8-2p-2f-coop", algo="mappo", steps=300)`.

    Settings are those of `rolecall marl`, nested or dotted.
    """
    return train(MARLOptions, settings, preset=preset, progress=progress, callbacks=callbacks)


def build(job: Job) -> Built:
    options, stack = job.options, job.stack
    if job.accelerator.num_processes > 1:
        raise UserError("marl trains in one process; `workers` spreads the environments over several")

    def opened(count: int) -> Any:
        envs = open_envs(
            options.env,
            count,
            limit=options.limit,
            workers=options.workers,
            deadline=options.deadline,
            network=options.network,
            variables=options.variables,
        )
        stack.callback(envs.close)
        return envs

    envs = opened(options.episodes)
    trials = opened(options.eval.episodes) if options.eval.every else None
    module = networks(options, envs.spec)
    optimizer = make_optimizer(module, options.optim)
    updater = Updater(
        job.accelerator,
        module,
        optimizer,
        token_budget=options.optim.token_budget,
        max_grad_norm=options.optim.max_grad_norm,
    )
    records = EpisodeRecords(options, envs.spec)
    parts: dict[str, Any] = {"updater": updater, "envs": envs, "watch": records}
    learner: PPOLearner | QLearner
    if isinstance(module, ActorCritic):
        learner = PPOLearner(options, module=module, **parts)
    else:
        learner = QLearner(options, module=module, **parts)

    write, read = _checkpoints(module, optimizer, learner)

    def save_model(directory: Path) -> None:
        about = {"env": options.env, "algo": options.algo, "agents": list(envs.spec.agents)}
        save_agents(module.agents, directory, about)

    def evaluate(step: int) -> dict[str, float]:
        assert trials is not None
        return learner.evaluate(trials)

    return Built(
        learner=learner,
        loop=loop_options(options, main="return"),
        write=write,
        read=read,
        save_model=save_model,
        module=module,
        evaluate=evaluate if trials is not None else None,
        watch_run=partial(setattr, records, "run"),
    )


def _checkpoints(module: torch.nn.Module, optimizer: Any, learner: PPOLearner | QLearner) -> tuple[Any, Any]:
    """What writes a checkpoint, and what reads it back."""

    def write(directory: Path, extra: dict[str, Any]) -> None:
        check_finite(module)
        state = {"module": dict(module.state_dict()), "optimizer": optimizer.state_dict()}
        write_state(directory, _STATE, {**state, "learner": learner.state_dict(), "extra": extra})

    def read(directory: Path) -> dict[str, Any]:
        state = read_state(directory, _STATE)
        _load(module, state["module"], directory)
        load_optimizer(optimizer, state["optimizer"])
        try:
            learner.load_state_dict(state["learner"])
        except (KeyError, ValueError) as error:
            raise RefusedCheckpointError(f"the checkpoint {directory} is of another run: {error}") from error
        extra: dict[str, Any] = state["extra"]
        return extra

    return write, read


def _load(module: torch.nn.Module, saved: dict[str, torch.Tensor], directory: Path) -> None:
    """Put weights back, or say which one does not fit."""
    own = module.state_dict()
    for name in [*own, *(n for n in saved if n not in own)]:
        there, here = (str(tuple(w[name].shape)) if name in w else "absent" for w in (saved, own))
        if there != here:
            raise RefusedCheckpointError(
                f"the checkpoint {directory} is of other networks: {name} is {there} there and {here} here"
            )
    module.load_state_dict(saved)
