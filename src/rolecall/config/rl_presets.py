"""The presets of `rolecall rl`: each an algorithm as its authors describe it. docs/algorithms has a page for each."""

from typing import Any


def _preset(name: str, *, samples: int, prompts: int | None = None, **algorithm: Any) -> dict[str, Any]:
    rollout = {"samples": samples} if prompts is None else {"prompts": prompts, "samples": samples}
    return {"algorithm": {"name": name, **algorithm}, **rollout}


_REINFORCED: dict[str, Any] = {
    "loss": "reinforce",
    "aggregate": "seq-mean-token-sum",
    "kl_in": "reward",
    "kl_kind": "k1",
}
"""Plain log-probs of the whole answer, which is one action, with the KL in its reward."""
_TWO_STEPS: dict[str, Any] = {"aggregate": "token-mean", "minibatches": 2}
_CRITIC: dict[str, Any] = {"epochs": 2, "minibatches": 2, "aggregate": "token-mean"}

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024: group-relative advantages, clipped ratio, KL in the loss.
    "grpo": _preset("grpo", samples=8, kl_coef=0.0),
    # Liu et al. 2025: GRPO without the two divisions that favour some prompts and some lengths.
    "dr-grpo": _preset("grpo", samples=8, scale="none", aggregate="seq-mean-token-sum-norm"),
    # Yu et al. 2025: GRPO that clips higher, counts tokens, replaces flat groups and fades out long answers.
    "dapo": _preset(
        "grpo",
        samples=8,
        **_TWO_STEPS,
        clip_low=0.2,
        clip_high=0.28,
        drop_flat=True,
        resample=4,
        overlong_buffer=0.2,
    ),
    # Zheng et al. 2025: GRPO with one ratio per answer, whose clip range is that of a mean over tokens.
    "gspo": _preset(
        "grpo", samples=8, loss="gspo", aggregate="seq-mean-token-mean", minibatches=2, clip_low=3e-4, clip_high=4e-4
    ),
    # MiniMax 2025: GRPO whose ratio is a clipped weight, so that every token keeps a gradient. 1 leaves the low side free.
    "cispo": _preset("grpo", samples=8, loss="cispo", **_TWO_STEPS, clip_low=1.0, clip_high=0.28),
    # Ahmadian et al. 2024: each answer against the mean of the others; the whole answer is one action.
    "rloo": _preset("rloo", samples=4, **_REINFORCED),
    # Hao et al. 2025: on-policy, with the baseline of least variance.
    "opo": _preset("opo", samples=8, loss="reinforce", aggregate="token-mean"),
    # Li et al. 2023: each answer against the greedy answer to its prompt.
    "remax": _preset("remax", prompts=64, samples=1, **_REINFORCED),
    # Williams 1992, with the batch's mean score as baseline.
    "reinforce": _preset("reinforce", samples=4, baseline="mean", aggregate="token-mean"),
    # Hu 2025: returns of token rewards with the KL inside, whitened over the batch, and PPO's clipped ratio; no critic.
    "reinforce++": _preset(
        "reinforce++", prompts=64, samples=1, **_TWO_STEPS, kl_in="reward", kl_kind="k1", kl_coef=0.01
    ),
    # The same with the prompt's mean score as baseline, and the KL in the loss.
    "reinforce++-baseline": _preset(
        "reinforce++-baseline", samples=8, **_TWO_STEPS, kl_in="loss", kl_kind="k2", kl_coef=0.001
    ),
    # Schulman et al. 2017 as commonly used for language models: a critic, GAE, several passes.
    "ppo": _preset(
        "ppo",
        prompts=64,
        samples=1,
        critic="shared",
        **_CRITIC,
        kl_in="reward",
        kl_kind="k1",
        kl_coef=0.0,
        vf_coef=0.1,
        lam=0.95,
    ),
    # Dubois et al. 2023: rollout 512, step 256, 2 epochs, gamma = lam = 1, whitened rewards, clamped KL in the reward.
    "alpacafarm-ppo": {
        **_preset(
            "ppo",
            prompts=512,
            samples=1,
            critic="separate",
            **_CRITIC,
            clip_low=0.2,
            clip_high=0.2,
            value_clip=0.2,
            vf_coef=0.1,
            gamma=1.0,
            lam=1.0,
            whiten_rewards=True,
            kl_in="reward",
            kl_kind="clamp",
            kl_coef=0.0067,
        ),
        "sampling": {"max_new_tokens": 300},
        "optim": {"lr": 1e-5},
    },
}
