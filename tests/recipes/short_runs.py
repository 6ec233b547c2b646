"""Learners on the built-in model, small enough to take a step in a fraction of a second."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from rolecall.config.parts import OptimOptions
from rolecall.config.rl import AlgorithmOptions, RLOptions
from rolecall.config.sampling import Sampling
from rolecall.policy.heads import ScalarHead
from rolecall.policy.load import LoadedModel, load
from rolecall.policy.lora import add_adapter, merged
from rolecall.policy.model import PolicyModel
from rolecall.recipes.guard import Guard
from rolecall.recipes.rl import RLLearner
from rolecall.rewards.records import Sample, Scored
from rolecall.rollout.native import NativeEngine
from rolecall.train.optim import make_optimizer
from rolecall.train.reference import Reference
from rolecall.train.step import Updater

ROWS = [{"prompt": f"{a} + {b} ="} for a in range(4) for b in range(4)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

GRPO = AlgorithmOptions(name="grpo", aggregate="token-mean")
GRPO_KL = AlgorithmOptions(name="grpo", aggregate="token-mean", kl_coef=0.05, old_logprobs="recompute")
PPO = AlgorithmOptions(
    name="ppo",
    critic="shared",
    epochs=2,
    minibatches=2,
    aggregate="token-mean",
    kl_in="reward",
    kl_kind="k1",
    kl_coef=0.05,
    entropy_coef=0.01,
)
REINFORCE = AlgorithmOptions(name="reinforce", aggregate="token-mean")


@dataclass
class Evenness:
    """A reward in this process: the share of even bytes, plus a part that is always 0.25; may fail on some samples."""

    names: tuple[str, ...] = ("even", "constant")
    failing: frozenset[tuple[int, int]] = field(default_factory=frozenset)

    def score(self, samples: Sequence[Sample], *, state: Mapping[str, Any] | None = None) -> list[Scored]:
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> Scored:
        if (sample.prompt_index, sample.sample_index) in self.failing:
            return Scored(scores={"even": None, "constant": 0.25}, total=None, failure=f"even failed on {sample.place}")
        even = sum(i % 2 == 0 for i in sample.completion_ids) / len(sample.completion_ids)
        return Scored(
            scores={"even": even, "constant": 0.25}, total=even + 0.25, extras={"length": len(sample.completion_ids)}
        )

    def take_metrics(self) -> dict[str, float]:
        return {}


def policy_of(*, dtype: str = "float32", lora: bool = False) -> LoadedModel:
    policy = load("tiny", dtype=dtype)
    return add_adapter(policy, rank=4, alpha=8) if lora else policy


def learner_of(
    algorithm: AlgorithmOptions = GRPO,
    *,
    prompts: int = 3,
    samples: int = 4,
    new_tokens: int = 8,
    lr: float = 1e-3,
    dtype: str = "float32",
    engine_dtype: str | None = None,
    lora: bool = False,
    reward: Any = None,
    policy: LoadedModel | None = None,
    **more: Any,
) -> RLLearner:
    """A learner on `tiny`; whatever else `RLLearner` takes is passed on."""
    options = RLOptions(
        prompts=prompts,
        samples=samples,
        steps=100,
        sampling=Sampling(max_new_tokens=new_tokens, temperature=0.8),
        algorithm=algorithm,
        optim=OptimOptions(lr=lr, token_budget=512),
    )
    policy = policy or policy_of(dtype=dtype, lora=lora)
    width = policy.model.config.hidden_size
    head = ScalarHead(width) if algorithm.critic == "shared" else None
    module = PolicyModel(policy.model, value_head=head)
    optimizer = make_optimizer(module, options.optim)
    accelerator = Accelerator(cpu=True)
    updater = Updater(accelerator, module, optimizer, token_budget=options.optim.token_budget, max_grad_norm=1.0)
    plain = merged(policy) if lora else policy
    engine = NativeEngine(
        plain.model,
        policy.tokenizer,
        stop_ids=policy.stop_ids,
        context_length=policy.context_length,
        dtype=DTYPES[engine_dtype or dtype],
    )
    more.setdefault("reference", Reference(module) if algorithm.kl_coef else None)
    return RLLearner(
        options,
        policy=policy,
        module=module,
        updater=updater,
        engine=more.pop("engine", engine),
        reward=reward or Evenness(),
        rows=ROWS,
        **more,
    )


def guard_of(learner: RLLearner, **more: Any) -> Guard:
    """The learner's tripwires, put on."""
    dtype = learner.engine._decoder.dtype
    guard = Guard(
        learner.options,
        policy=learner.policy,
        updater=learner.updater,
        engine=learner.engine,
        engine_dtype=dtype,
        **more,
    )
    learner.watches = [*learner.watches, guard]
    return guard


def run(learner: RLLearner, steps: int) -> None:
    for step in range(steps):
        learner.update(learner.collect(step))
