"""What an adapter may offer. This is the one place that states names, shapes and conventions.

Tensors are torch, float64 unless a case says float32, and [rows, positions] unless said otherwise: a row is a sequence,
a position is a token or a time step. `mask` is bool and True where a position counts (trained, or eligible for
rewards and returns). It may have holes, such as tool output inside an answer, and rows without any True.
What a function returns at positions that do not count is not looked at. What it is given there may be NaN.

`logprobs[t]` is the log-prob of token t itself, log p(token t | tokens before t), so it lines up with `mask[t]`.
Losses are one number, lower is better, and must be differentiable in their first argument. Unless `mode` says otherwise
they are the mean over all positions that count ("token-mean").

An adapter is a Python file with some of these functions. What it lacks is "not offered", and so is what needs a keyword
that its function does not take or for which it raises NotImplementedError.
"""

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


class Interface(Protocol):
    """The functions by name. In an adapter they are plain functions without `self`."""

    # masks and roles

    def answer_mask(self, ids: Tensor, *, stop_ids: Collection[int]) -> Tensor:
        """True up to and including the first stop id of each row of sampled ids; without one, everywhere."""

    def episode_mask(self, filled: Tensor, terminated: Tensor, truncated: Tensor) -> Tensor:
        """Time steps in which an agent acted, from flags per step. `filled` also holds the slot after the last action
        where an episode was cut off without a flag."""

    # reductions

    def masked_mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """Mean over the positions that count, one number; 0 if none does."""

    def masked_whiten(self, x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
        """Scale to unit deviation over the positions that count and shift to mean 0, or back to the old mean if
        `shift_mean` is False. The variance may divide by n or by n - 1."""

    def aggregate(
        self,
        x: Tensor,
        mask: Tensor,
        *,
        mode: str,
        norm: float | None = None,
        tokens: int | None = None,
        sequences: int | None = None,
    ) -> Tensor:
        """Per-position losses as one number; `mode` is one of MODES.

        token-sum: the sum. token-mean: that / positions that count. seq-mean-token-mean: mean over sequences of their means.
        seq-mean-token-sum: mean over sequences of their sums; with -norm those sums are divided by the constant `norm`.
        Sequences without a position that counts are in no mean. If the rows are one piece of a larger batch, `tokens`
        and `sequences` count the whole batch, and the results of all pieces add up to that of the whole batch.
        """

    # rewards, returns, advantages

    def shape_rewards(self, scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
        """scores [rows] -> rewards: - kl_coef kl at every position that counts, plus the score at the last one."""

    def gae(
        self,
        rewards: Tensor,
        values: Tensor,
        mask: Tensor,
        *,
        gamma: float,
        lam: float,
        bootstrap: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(advantages before any whitening, returns = advantages + values), along the positions that count.

        `bootstrap` [rows] is the value after the last position of a row that was cut off; 0 where it ended.
        """

    def discounted_returns(self, rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
        """G_t = r_t + gamma G_{t+1}, where t + 1 is the next position that counts."""

    def grpo(
        self, scores: Tensor, groups: Tensor, *, scale: str | None = "group", include: Tensor | None = None
    ) -> Tensor:
        """(score - mean of the group) / unbiased std, all [rows]; `groups` are integers, members side by side.

        scale "group": the std of the group. "batch": of the whole batch. None: no division. `include` is False where
        a reward failed: the row is in no statistic and gets 0.
        """

    def rloo(self, scores: Tensor, groups: Tensor, *, include: Tensor | None = None) -> Tensor:
        """score - mean of the other scores of the group, [rows]."""

    # KL

    def kl_estimate(
        self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kind: str, straight_through: bool = False
    ) -> Tensor:
        """KL(policy || reference) at each sampled token, differentiable. With x = logprobs - ref_logprobs: k1 = x,
        k2 = x^2 / 2, k3 = exp(-x) - 1 + x. With `straight_through` the gradient is that of k2, whatever the kind."""

    def kl_in_loss(self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        """The KL term as the library's loss has it by default, for tokens sampled from the policy: one number."""

    def kl_in_reward(self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        """The KL per position that the library subtracts from rewards by default."""

    # losses

    def token_logprobs(self, logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
        """logits [rows, positions, vocab] as a causal model gives them (those at t - 1 are about token t) -> log-probs
        of the ids, [rows, positions]. Position 0 has no prediction and is not looked at."""

    def sft_loss(self, logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """- mean log-prob of the ids at positions that count, from a causal model's logits."""

    def policy_loss(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None = None,
    ) -> Tensor:
        """PPO's clipped loss: mean of max(- A rho, - A clip(rho, 1 - clip_low, 1 + clip_high)); with `dual_clip` c at
        most - c A where A < 0. rho is the ratio of each token."""

    def value_loss(
        self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None
    ) -> Tensor:
        """Mean of 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); clip None: 0.5 (V - R)^2."""

    def importance_weights(
        self, logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, level: str, kind: str, high: float
    ) -> Tensor:
        """exp(logprobs - behaviour_logprobs) without gradient. level "token": each its own; "sequence": the product
        over the row. kind "truncate": at most `high`; "mask": 0 above `high`."""

    def entropy(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Entropy in nats of each position's distribution; logits [rows, positions, choices] may hold -inf."""

    def dpo_loss(
        self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float
    ) -> Tensor:
        """Mean over pairs of - log sigmoid(beta (log-ratio of chosen - log-ratio of rejected)); all [pairs], summed."""
