"""Options of `rolecall rl`, and its presets."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rolecall.config.parts import (
    ChatOptions,
    EngineOptions,
    HeldOutOptions,
    OptimOptions,
    PolicyOptions,
    RunOptions,
    SaveOptions,
)
from rolecall.config.plan import logits_line, ranks_line
from rolecall.config.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class AlgorithmOptions:
    """What is optimised."""

    name: Literal["grpo", "ppo", "reinforce"] = "grpo"
    """How advantages and the loss are made."""
    scale: Literal["group", "batch", "none"] = "group"
    """grpo: what centred scores are divided by."""
    baseline: Literal["mean", "ema", "prompt", "none"] = "mean"
    """reinforce: what is subtracted from the score."""
    aggregate: Literal[
        "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "seq-mean-token-mean"
    """How per-token losses become one number."""
    norm: float | None = None
    """seq-mean-token-sum-norm: the constant length; sampling.max_new_tokens if not given."""
    epochs: int = 1
    """Passes over each rollout."""
    minibatches: int = 1
    """Optimiser steps per pass."""
    clip_low: float = 0.2
    """The ratio's lower clip, 1 - this."""
    clip_high: float = 0.2
    """The ratio's upper clip, 1 + this."""
    dual_clip: float | None = None
    """Cap on the loss of answers with negative advantage, as a multiple of it."""
    old_logprobs: Literal["auto", "detach", "recompute", "behaviour"] = "auto"
    """Where the ratio's denominator comes from. `auto`: detach with one optimiser step per rollout, else recompute."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference; 0 needs no reference."""
    kl_kind: Literal["k1", "clamp", "k2", "k3", "abs"] = "k3"
    """The KL estimate."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it goes. In the loss it gets the gradient of KL(policy || reference) whatever its kind."""
    kl_target: float | None = None
    """Steer kl_coef so that the KL per answer stays near this."""
    kl_horizon: float = 10_000.0
    """How many answers that steering takes."""
    reference_every: int | None = None
    """Make the policy the new reference every so many steps."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    critic: Literal["none", "shared", "separate"] = "none"
    """ppo: a value head on the policy's trunk, or a critic of its own."""
    critic_from: str | None = None
    """A reward model to start a separate critic from; the policy if not given."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    value_clip: float | None = 0.2
    """How far values may move from the old ones within an update."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """GAE's lambda."""
    bootstrap_truncated: bool = False
    """Take the critic's value behind an answer that was cut off, instead of 0."""
    whiten_rewards: bool = False
    """Scale per-token rewards to unit variance, without a shift."""
    train_stop: bool = True
    """Train the choice to stop, not only the content."""
    drop_truncated: bool = False
    """Leave answers that were cut off out of training."""
    drop_flat: bool = False
    """Leave groups whose answers all scored the same out of training (and of denominators)."""
    score_clip: float | None = None
    """Keep scores within plus or minus this."""
    missing_stop_penalty: float = 0.0
    """Subtracted from the score of an answer that did not end itself."""
    overlong_buffer: int | None = None
    """Soft length limit: the penalty grows from 0 to 1 over the last so many tokens before max_new_tokens."""

    def __post_init__(self) -> None:
        steps = self.epochs * self.minibatches
        if self.epochs < 1 or self.minibatches < 1:
            raise ValueError(f"epochs and minibatches must be at least 1, got {self.epochs} and {self.minibatches}")
        if self.old_logprobs == "detach" and steps > 1:
            raise ValueError(
                f"old_logprobs=detach needs one optimiser step per rollout, but epochs x minibatches is {steps}; use recompute"
            )
        if self.name == "reinforce" and steps > 1:
            raise ValueError(
                f"reinforce has no ratio, so it takes one optimiser step per rollout, but epochs x minibatches is {steps}; "
                "use grpo or ppo, or smaller rollouts"
            )
        if self.name == "ppo" and self.critic == "none":
            raise ValueError("ppo needs a critic: set algorithm.critic to shared or separate")
        if self.name != "ppo" and self.critic != "none":
            raise ValueError(f"{self.name} uses no critic: set algorithm.critic to none, or use ppo")
        if self.critic_from is not None and self.critic != "separate":
            raise ValueError("algorithm.critic_from needs algorithm.critic separate")
        if self.kl_target is not None and self.kl_coef <= 0:
            raise ValueError("kl_target steers kl_coef, which must start above 0")

    @property
    def old_source(self) -> str:
        """Where old log-probs really come from."""
        if self.old_logprobs != "auto":
            return self.old_logprobs
        alone = (
            self.epochs * self.minibatches == 1
            and self.critic == "none"
            and not (self.kl_coef and self.kl_in == "reward")
        )
        return "detach" if alone else "recompute"


PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024: group-relative advantages, clipped ratio, KL in the loss.
    "grpo": {"algorithm": {"name": "grpo", "kl_coef": 0.0}, "samples": 8},
    # Schulman et al. 2017 as commonly used for language models: a critic, GAE, several passes.
    "ppo": {
        "algorithm": {
            "name": "ppo",
            "critic": "shared",
            "epochs": 2,
            "minibatches": 2,
            "aggregate": "token-mean",
            "kl_in": "reward",
            "kl_kind": "k1",
            "kl_coef": 0.0,
            "vf_coef": 0.1,
            "lam": 0.95,
        },
        "prompts": 64,
        "samples": 1,
    },
    # Dubois et al. 2023: rollout 512, step 256, 2 epochs, gamma = lam = 1, whitened rewards, clamped KL in the reward.
    "alpacafarm-ppo": {
        "algorithm": {
            "name": "ppo",
            "critic": "separate",
            "epochs": 2,
            "minibatches": 2,
            "aggregate": "token-mean",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "value_clip": 0.2,
            "vf_coef": 0.1,
            "gamma": 1.0,
            "lam": 1.0,
            "whiten_rewards": True,
            "kl_in": "reward",
            "kl_kind": "clamp",
            "kl_coef": 0.0067,
        },
        "prompts": 512,
        "samples": 1,
        "sampling": {"max_new_tokens": 300},
        "optim": {"lr": 1e-5},
    },
    # Williams 1992, with the batch's mean score as baseline.
    "reinforce": {"algorithm": {"name": "reinforce", "baseline": "mean", "aggregate": "token-mean"}, "samples": 4},
}


@dataclass(frozen=True, kw_only=True)
class RLOptions(RunOptions):
    """Reinforcement learning of a language model from a reward."""

    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS
    model: str = "tiny"
    """`tiny` (built in), a model directory, a .gguf file, a Hugging Face hub id, or a run's directory."""
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    rows: str = "addition"
    """Prompts: a .jsonl or .parquet file, a saved Hugging Face dataset, a built-in task, or rg:NAME."""
    reward: tuple[str, ...] = ()
    """Reward functions: file.py:name, module:name, a built-in verifier, or a reward model's run. A task brings its own."""
    reward_weights: tuple[float, ...] | None = None
    """One weight per reward; 1 each if not given."""
    reward_deadline: float = 60.0
    """Seconds a reward function may take before it is killed and its sample counted as failed."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    steps: int = 100
    """Rollouts to train on."""
    prompts: int = 16
    """Prompts per rollout."""
    samples: int = 8
    """Answers per prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    eval: HeldOutOptions = field(default_factory=HeldOutOptions)
    save: SaveOptions = field(default_factory=SaveOptions)
    seed: int = 0
    """Seeds everything: data order, sampling, new heads."""

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        if self.prompts < 1 or self.samples < 1 or self.steps < 1:
            raise ValueError(
                f"steps, prompts and samples must be at least 1, got {self.steps}, {self.prompts}, {self.samples}"
            )
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature 0 gives the same answer every time: there is nothing to compare; use 1"
            )
        if self.algorithm.minibatches > self.prompts * self.samples:
            raise ValueError(
                f"{self.prompts} x {self.samples} answers cannot be cut into {self.algorithm.minibatches} mini-batches"
            )
        if self.algorithm.name == "grpo" and self.samples < 2:
            raise ValueError("grpo compares the answers to a prompt: samples must be at least 2")


def plan(options: RLOptions) -> str:
    """The batch plan that `--dry-run` prints: what one step is made of."""
    o = options.algorithm
    answers = options.prompts * options.samples
    per_step = math.ceil(answers / o.minibatches)
    tokens = answers * options.sampling.max_new_tokens
    lines = [
        f"one step: {options.prompts} prompts x {options.samples} answers = {answers} answers of up to "
        f"{options.sampling.max_new_tokens} tokens ({tokens:,} new tokens at most)",
        f"update: {o.epochs} passes x {o.minibatches} mini-batches = {o.epochs * o.minibatches} optimiser steps, "
        f"about {per_step} answers each, in micro-batches of up to {options.optim.token_budget:,} tokens",
        ranks_line(options.prompts, "prompts"),
        logits_line(options.model, options.optim.token_budget),
        f"old log-probs: {o.old_source}; reference: {'yes' if o.kl_coef else 'no'}; critic: {o.critic}",
        f"in all: {options.steps} steps, {options.steps * answers:,} answers, "
        f"{options.steps * o.epochs * o.minibatches:,} optimiser steps",
    ]
    if o.epochs * o.minibatches > 1:
        lines.append("after the first optimiser step of a rollout the policy is ahead of the one that sampled")
    return "\n".join(lines)
