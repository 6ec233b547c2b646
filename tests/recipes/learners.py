"""RL learners on the tiny model, with scripted or real answers and rewards that are plain functions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from rolecall.config.merge import resolve
from rolecall.config.rl import RLOptions
from rolecall.policy.heads import Critic, ScalarHead
from rolecall.policy.load import LoadedModel, load
from rolecall.policy.model import PolicyModel
from rolecall.policy.tiny import TURN_END_ID
from rolecall.recipes.rl import RLLearner
from rolecall.rewards.records import Sample, Scored
from rolecall.rollout.native import NativeEngine
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.tasks.rows import ListRows
from rolecall.train.optim import make_optimizer
from rolecall.train.reference import Reference
from rolecall.train.step import Updater

STOP = TURN_END_ID
ROWS = [{"prompt": prompt} for prompt in ("go:", "on:", "up:", "at:")]


class Plain:
    """A reward that calls a function of the answer's text and ids, in this process."""

    names = ("plain",)

    def __init__(self, function: Callable[[Sample], float | None]) -> None:
        self._function = function
        self.taken = 0

    def score(self, samples: Sequence[Sample], *, state: Any = None) -> list[Scored]:
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> Scored:
        score = self._function(sample)
        return Scored(scores={"plain": score}, total=score, failure="failed" if score is None else None)

    def take_metrics(self) -> dict[str, float]:
        self.taken += 1
        return {}


def options_of(preset: str = "grpo", **settings: Any) -> RLOptions:
    return resolve(RLOptions, [("preset", RLOptions.presets[preset]), ("test", settings)]).options


def learner_of(
    options: RLOptions,
    reward: Callable[[Sample], float | None] | Any,
    *,
    script: Callable[..., Sequence[int]] | None = None,
    engine: Any = None,
    rows: Sequence[dict] = ROWS,
    policy: LoadedModel | None = None,
    **more: Any,
) -> RLLearner:
    """Everything a learner needs, on the tiny model."""
    policy = policy or load("tiny")
    o = options.algorithm
    if o.critic == "shared":
        module = PolicyModel(policy.model, value_head=ScalarHead(policy.model.config.hidden_size))
    elif o.critic == "separate":
        module = PolicyModel(policy.model, critic=Critic.from_policy(policy))
    else:
        module = PolicyModel(policy.model)
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(module, make_optimizer(module, options.optim))
    if engine is None and script is not None:
        engine = ScriptedEngine(script, stop_ids=(STOP,))
    if engine is None:
        engine = NativeEngine(
            policy.model, policy.tokenizer, stop_ids=policy.stop_ids, context_length=policy.context_length
        )
    return RLLearner(
        options,
        policy=policy,
        module=module,
        updater=Updater(
            accelerator,
            wrapped,
            optimizer,
            token_budget=options.optim.token_budget,
            max_grad_norm=options.optim.max_grad_norm,
        ),
        engine=engine,
        reward=Plain(reward) if callable(reward) else reward,
        rows=ListRows(rows),
        reference=Reference(module) if o.kl_coef > 0 else None,
        **more,
    )


def weights_of(learner: RLLearner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.module.named_parameters()}
