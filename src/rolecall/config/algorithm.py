"""Options of what `rolecall rl` optimises."""

from dataclasses import dataclass
from typing import Literal

COMPARING = ("grpo", "rloo", "opo", "reinforce++-baseline")
"""Algorithms that compare the answers to a prompt with each other: from equal scores they learn nothing."""

KL_IN_REWARD = ("k1", "clamp")
"""Kinds of KL whose place may be the reward."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmOptions:
    """What is optimised."""

    name: Literal["grpo", "rloo", "opo", "remax", "reinforce", "reinforce++", "reinforce++-baseline", "ppo"] = "grpo"
    """How scores become advantages (docs/algorithms)."""
    loss: Literal["auto", "clip", "gspo", "cispo", "reinforce"] = "auto"
    """The loss they go into: PPO's clipped ratio, one clipped ratio per answer, clipped weights, or plain log-probs
    without a ratio. `auto`: reinforce for reinforce, else clip."""
    scale: Literal["group", "batch", "none"] = "group"
    """grpo: what centred scores are divided by."""
    credit: Literal["episode", "turns", "adca", "gigpo"] = "episode"
    """grpo: what is compared. episode: scores, the same for every token. Of episodes of several turns also turn by turn
    (docs/credit.md). turns: what follows each turn. adca: judgements of turns beside the score. gigpo: turns that were taken in
    the same state beside the score."""
    credit_weight: float = 0.1
    """adca: weight of the judgements (alpha). gigpo: weight of the comparison of turns; its paper has 1."""
    credit_allocate: bool = False
    """adca: spread success or failure over the turns by their judgements, and compare those shares."""
    credit_judge: str | None = None
    """adca: who judges the turns of which no reward function says something: `policy`, the policy itself, or the address of an
    OpenAI-compatible API. Left out: what the environment gave for a turn is its judgement."""
    turn_gamma: float = 1.0
    """turns and gigpo: discount per turn."""
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
    kl_kind: Literal["auto", "k1", "clamp", "k2", "k3", "abs", "exact"] = "auto"
    """The KL estimate; `exact` is not an estimate but the KL over the whole vocabulary, for one more product with the head.
    In the reward only k1, and `clamp`, its one-sided form, pull towards the reference. `auto`: k1 in the reward, k3 in
    the loss."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it goes. In the loss it gets the gradient of KL(policy || reference) whatever its kind."""
    kl_warmup: int = 0
    """Steps over which the weight of the KL rises from 0 to kl_coef, in even parts."""
    kl_target: float | None = None
    """Steer kl_coef so that the KL per answer stays near this."""
    kl_horizon: float = 10_000.0
    """How many answers that steering takes."""
    reference_every: int | None = None
    """Steps between copies of the policy to the reference."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; with entropy_target, what it starts from."""
    entropy_target: float | None = None
    """Steer entropy_coef so that the mean entropy per token stays near this."""
    entropy_rate: float = 0.01
    """How much entropy_coef moves per step and per nat that the entropy is off its target."""
    entropy_max: float = 0.1
    """Where that steering ends; the other end is 0."""
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
    """Take the critic's value after an answer that was cut off, instead of 0."""
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
    overlong_buffer: float | None = None
    """Soft length limit: the penalty grows from 0 to 1 over this many tokens before max_new_tokens; below 1 it is
    a share of max_new_tokens."""
    resample: int = 0
    """Dynamic sampling: replace groups whose answers all score the same by other prompts, in at most this many
    rounds of sampling per step; 0 is off."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.minibatches < 1:
            raise ValueError(f"epochs and minibatches must be at least 1, got {self.epochs} and {self.minibatches}")
        self._check_steps()
        self._check_critic()
        self._check_loss()
        self._check_kl()
        self._check_credit()
        if self.entropy_target is not None and not (
            self.entropy_rate > 0 and 0 <= self.entropy_coef <= self.entropy_max
        ):
            raise ValueError(
                "entropy_target needs entropy_rate above 0 and an entropy_coef between 0 and entropy_max, got "
                f"entropy_rate={self.entropy_rate}, entropy_coef={self.entropy_coef}, entropy_max={self.entropy_max}"
            )
        if self.overlong_buffer is not None and self.overlong_buffer <= 0:
            raise ValueError(f"overlong_buffer must be above 0, got {self.overlong_buffer}")
        if self.resample < 0:
            raise ValueError(f"resample must be 0 (off) or a number of rounds, got {self.resample}")
        if self.resample and self.name not in COMPARING:
            raise ValueError(
                f"resample replaces groups whose answers all score the same, but {self.name} learns from those too; "
                f"set it to 0, or use {', '.join(COMPARING)}"
            )

    def _check_steps(self) -> None:
        steps = self.epochs * self.minibatches
        if self.old_logprobs == "detach" and steps > 1:
            raise ValueError(
                f"old_logprobs=detach needs one optimiser step per rollout, but epochs x minibatches is {steps}; use recompute"
            )
        if self.policy_loss == "reinforce" and steps > 1:
            raise ValueError(
                f"the loss of reinforce has no ratio, so it takes one optimiser step per rollout, but epochs x minibatches "
                f"is {steps}; set algorithm.loss to clip, or use smaller rollouts"
            )

    def _check_critic(self) -> None:
        if self.name == "ppo" and self.critic == "none":
            raise ValueError("ppo needs a critic: set algorithm.critic to shared or separate")
        if self.name != "ppo" and self.critic != "none":
            raise ValueError(f"{self.name} uses no critic: set algorithm.critic to none, or use ppo")
        if self.critic_from is not None and self.critic != "separate":
            raise ValueError("algorithm.critic_from needs algorithm.critic separate")

    def _check_loss(self) -> None:
        if self.policy_loss == "gspo" and self.name in ("ppo", "reinforce++"):
            raise ValueError(
                f"the loss of gspo has one ratio per answer, but the advantages of {self.name} differ from token to token; "
                "set algorithm.loss to clip"
            )
        if self.policy_loss != "clip" and self.dual_clip is not None:
            raise ValueError(f"dual_clip belongs to the loss clip, not to {self.policy_loss}: leave it out")

    def _check_credit(self) -> None:
        kind = self.credit
        if not 0 < self.turn_gamma <= 1:
            raise ValueError(f"turn_gamma is a discount, above 0 and at most 1, got {self.turn_gamma:g}")
        unused = [
            name
            for name, default, users in (
                ("credit_weight", 0.1, ("adca", "gigpo")),
                ("credit_allocate", False, ("adca",)),
                ("credit_judge", None, ("adca",)),
                ("turn_gamma", 1.0, ("turns", "gigpo")),
            )
            if getattr(self, name) != default and kind not in users
        ]
        if unused:
            raise ValueError(
                f"algorithm.{unused[0]} has no effect with credit {kind}: leave it out, or choose another credit"
            )
        if kind == "episode":
            return
        if self.credit_judge not in (None, "policy") and not str(self.credit_judge).startswith(("http://", "https://")):
            raise ValueError(
                f"credit_judge is `policy` or an address such as http://127.0.0.1:8750/v1, got {self.credit_judge!r}"
            )
        if self.name != "grpo":
            raise ValueError(
                f"credit {kind} compares turns as grpo does, not as {self.name}: use name grpo, or credit episode"
            )
        if self.scale == "batch" or (kind == "adca" and self.scale != "group"):
            raise ValueError(
                f"credit {kind} compares within groups, so scale {self.scale} does not go with it: use scale group"
            )
        if self.policy_loss == "gspo":
            raise ValueError(
                "the loss of gspo has one ratio per answer, but turns differ in credit: set algorithm.loss to clip"
            )
        if self.kl_coef and self.kl_in == "reward":
            raise ValueError(
                f"credit {kind} compares rewards of turns, and the KL is no part of them: set algorithm.kl_in to loss"
            )

    def _check_kl(self) -> None:
        if self.kl_in == "reward" and self.kl_estimator not in KL_IN_REWARD:
            raise ValueError(
                f"kl_kind {self.kl_kind} in the reward does not pull the policy towards the reference; set "
                f"algorithm.kl_kind k1, or algorithm.kl_in loss"
            )
        if self.kl_target is not None and self.kl_coef <= 0:
            raise ValueError("kl_target steers kl_coef, which must start above 0")
        if self.kl_warmup < 0:
            raise ValueError(f"kl_warmup is a number of steps, got {self.kl_warmup}")
        if self.kl_warmup and (self.kl_coef <= 0 or self.kl_target is not None):
            raise ValueError(
                "kl_warmup needs a kl_coef above 0 to rise to, and no kl_target, which steers it otherwise"
            )

    @property
    def kl_estimator(self) -> str:
        """The KL that is really used."""
        if self.kl_kind != "auto":
            return self.kl_kind
        return "k1" if self.kl_in == "reward" else "k3"

    @property
    def reference_line(self) -> str:
        """Whether there is a reference, and what for."""
        if not self.kl_coef:
            return "no"
        rising = f", rising over {self.kl_warmup} steps" if self.kl_warmup else ""
        return f"yes (KL {self.kl_estimator} in the {self.kl_in}, weight {self.kl_coef:g}{rising})"

    @property
    def policy_loss(self) -> str:
        """The loss that is really used."""
        if self.loss != "auto":
            return self.loss
        return "reinforce" if self.name == "reinforce" else "clip"

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
