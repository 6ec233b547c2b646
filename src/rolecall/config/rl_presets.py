"""The presets of `rolecall rl`: each an algorithm as its authors describe it. docs/algorithms has a page for each."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024: group-relative advantages, clipped ratio, KL in the loss.
    "grpo": {"algorithm": {"name": "grpo", "kl_coef": 0.0}, "samples": 8},
    # Liu et al. 2025: GRPO without the two divisions that favour some prompts and some lengths.
    "dr-grpo": {"algorithm": {"name": "grpo", "scale": "none", "aggregate": "seq-mean-token-sum-norm"}, "samples": 8},
    # Yu et al. 2025: GRPO that clips higher, counts tokens, replaces flat groups and fades out long answers.
    "dapo": {
        "algorithm": {
            "name": "grpo",
            "aggregate": "token-mean",
            "minibatches": 2,
            "clip_low": 0.2,
            "clip_high": 0.28,
            "drop_flat": True,
            "resample": 4,
            "overlong_buffer": 0.2,
        },
        "samples": 8,
    },
    # Zheng et al. 2025: GRPO with one ratio per answer, whose clip range is that of a mean over tokens.
    "gspo": {
        "algorithm": {
            "name": "grpo",
            "loss": "gspo",
            "aggregate": "seq-mean-token-mean",
            "minibatches": 2,
            "clip_low": 3e-4,
            "clip_high": 4e-4,
        },
        "samples": 8,
    },
    # MiniMax 2025: GRPO whose ratio is a clipped weight, so that every token keeps a gradient. 1 leaves the low side free.
    "cispo": {
        "algorithm": {
            "name": "grpo",
            "loss": "cispo",
            "aggregate": "token-mean",
            "minibatches": 2,
            "clip_low": 1.0,
            "clip_high": 0.28,
        },
        "samples": 8,
    },
    # Ahmadian et al. 2024: each answer against the mean of the others; the whole answer is one action.
    "rloo": {
        "algorithm": {
            "name": "rloo",
            "loss": "reinforce",
            "aggregate": "seq-mean-token-sum",
            "kl_in": "reward",
            "kl_kind": "k1",
        },
        "samples": 4,
    },
    # Hao et al. 2025: on-policy, with the baseline of least variance.
    "opo": {"algorithm": {"name": "opo", "loss": "reinforce", "aggregate": "token-mean"}, "samples": 8},
    # Li et al. 2023: each answer against the greedy answer to its prompt.
    "remax": {
        "algorithm": {
            "name": "remax",
            "loss": "reinforce",
            "aggregate": "seq-mean-token-sum",
            "kl_in": "reward",
            "kl_kind": "k1",
        },
        "prompts": 64,
        "samples": 1,
    },
    # Williams 1992, with the batch's mean score as baseline.
    "reinforce": {"algorithm": {"name": "reinforce", "baseline": "mean", "aggregate": "token-mean"}, "samples": 4},
    # Hu 2025: returns of token rewards with the KL inside, whitened over the batch, and PPO's clipped ratio; no critic.
    "reinforce++": {
        "algorithm": {
            "name": "reinforce++",
            "aggregate": "token-mean",
            "minibatches": 2,
            "kl_in": "reward",
            "kl_kind": "k1",
            "kl_coef": 0.01,
        },
        "prompts": 64,
        "samples": 1,
    },
    # The same with the prompt's mean score as baseline, and the KL in the loss.
    "reinforce++-baseline": {
        "algorithm": {
            "name": "reinforce++-baseline",
            "aggregate": "token-mean",
            "minibatches": 2,
            "kl_in": "loss",
            "kl_kind": "k2",
            "kl_coef": 0.001,
        },
        "samples": 8,
    },
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
}
