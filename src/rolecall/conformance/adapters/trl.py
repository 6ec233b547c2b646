"""TRL's helpers in `trl.trainer.utils`, and methods of its GRPOTrainer and RLOOTrainer.

TRL's maths lies inside trainer methods. `_compute_loss` and `_generate_and_score_completions` are called here as they
are, on a stand-in that has the settings they read; its forward pass gives the log-probs of the case, its generation the
positions, its reward functions the scores.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from rolecall.conformance.adapters import NAN

PACKAGES = ("trl",)
REASONS = {
    "aggregate_leaves_out_an_empty_row": "definition: it divides by all rows of the micro-batch, so an answer that is "
    "masked out (mask_truncated_completions) makes the loss of the others smaller. A mean over sequences divides by "
    "those that are in it; bnpo and dapo, which count tokens, pass.",
    "aggregate_ignores_rubbish": NAN,
    "grpo_of_a_flat_group": "bug, small here: in float32 the mean of equal scores is off in the last place, and that "
    "error is divided by an std of about 0 + 1e-4: eight answers that all score 0.7 get advantages of 0.0006 instead of "
    "0. Equal scores must be found by comparing them.",
    "policy_loss_of_a_broken_record_is_finite": "robustness: exp of a log ratio is not bounded and overflows at 89 in "
    "float32, so one bad record makes the loss inf; verl, OpenRLHF and rolecall clamp the log ratio to 20.",
    "policy_loss_ignores_rubbish": NAN,
    "entropy_of_forbidden_choices": "bug where logits are masked with -inf: it adds p log p as 0 * -inf, which is NaN; "
    "p log p is 0 at p = 0.",
}
_LOSS_TYPES = {
    "token-mean": "bnpo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}


def aggregate(
    x: Tensor,
    mask: Tensor,
    *,
    mode: str,
    norm: float | None = None,
    tokens: int | None = None,
    sequences: int | None = None,
) -> Tensor:
    """GRPOTrainer._compute_loss at ratio 1 with advantages -x: bnpo (dapo with `tokens`), grpo, luspo, dr_grpo"""
    if mode not in _LOSS_TYPES:
        raise NotImplementedError(f"no {mode}")
    logprobs = torch.zeros_like(x)
    return _loss(
        logprobs,
        logprobs,
        -x,
        mask,
        loss_type=_LOSS_TYPES[mode] if tokens is None else "dapo",
        tokens=tokens,
        max_completion_length=norm,
        # Micro-batches of an accumulation step have equally many rows.
        current_gradient_accumulation_steps=1 if sequences is None else sequences / len(x),
    )


def grpo(scores: Tensor, groups: Tensor, *, scale: str | None = "group", include: Tensor | None = None) -> Tensor:
    """GRPOTrainer._generate_and_score_completions with rewards that are given; a failed one is None"""
    return _advantages(GRPOTrainer, scores, groups, include, scale_rewards=scale or "none")


def rloo(scores: Tensor, groups: Tensor, *, include: Tensor | None = None) -> Tensor:
    """RLOOTrainer._generate_and_score_completions with rewards that are given; a failed one is None"""
    return _advantages(RLOOTrainer, scores, groups, include)


def kl_in_loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """GRPOTrainer._compute_loss with advantages 0 and beta 1; use_bias_correction_kl as by default"""
    return _loss(logprobs, logprobs.detach(), torch.zeros_like(logprobs), mask, ref_logprobs=ref_logprobs)


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """trainer.utils.selective_log_softmax of logits and ids that the adapter aligns"""
    scored = selective_log_softmax(logits[:, :-1], ids[:, 1:], temperature=temperature)
    return torch.nn.functional.pad(scored, (1, 0))


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """GRPOTrainer._compute_loss with loss_type dapo; dual clip is its delta"""
    return _loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        epsilon_low=clip_low,
        epsilon_high=clip_high,
        delta=dual_clip,
    )


def importance_weights(
    logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, level: str, kind: str, high: float
) -> Tensor:
    """GRPOTrainer._generate_and_score_completions with use_vllm and vllm_importance_sampling_mode {level}_{kind}"""
    rows = len(mask)
    generated: Any = (
        [[0]] * rows,
        mask.tolist(),
        mask.tolist(),
        [""] * rows,
        behaviour_logprobs.tolist(),
        {},
        None,
        None,
    )
    made = _generated(
        GRPOTrainer,
        generated,
        torch.zeros(rows),
        rows,
        logprobs=logprobs,
        use_vllm=True,
        vllm_importance_sampling_mode=f"{level}_{kind}",
        vllm_importance_sampling_clip_max=high,
    )
    return made["importance_sampling_ratio"].expand_as(mask)


def entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """trainer.utils.entropy_from_logits"""
    return entropy_from_logits(logits)


def _loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: str = "dapo",
    tokens: int | None = None,
    ref_logprobs: Tensor | None = None,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    **settings: Any,
) -> Tensor:
    """`_compute_loss` reads no more of the trainer than this."""
    counts = mask.long()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **options: (logprobs, torch.zeros_like(logprobs), None),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
        args=SimpleNamespace(use_bias_correction_kl=True, delta=delta, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=0.0 if ref_logprobs is None else 1.0,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        importance_sampling_level="token",
        loss_type=loss_type,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        **{"current_gradient_accumulation_steps": 1, **settings},
    )
    inputs = {
        "prompt_ids": counts[:, :0],
        "prompt_mask": counts[:, :0],
        "completion_ids": counts,
        "completion_mask": counts,
        "advantages": advantages,
        "old_per_token_logps": old_logprobs,
        "ref_per_token_logps": ref_logprobs,
        "num_items_in_batch": counts.sum() if tokens is None else torch.tensor(tokens),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def _advantages(trainer: Any, scores: Tensor, groups: Tensor, include: Tensor | None, **settings: Any) -> Tensor:
    """Answers of one token each."""
    rewards = scores if include is None else torch.where(include, scores, torch.nan)
    rows, texts = [[0]] * len(scores), [""] * len(scores)
    generated: Any = (rows, rows, texts) if trainer is RLOOTrainer else (rows, rows, None, texts, None, {}, None, None)
    samples = len(groups) // len(groups.unique())
    logprobs = torch.zeros(len(scores), 1)
    return _generated(trainer, generated, rewards, samples, logprobs=logprobs, **settings)["advantages"]


def _generated(
    trainer: Any, generated: Any, rewards: Tensor, samples: int, *, logprobs: Tensor | None = None, **settings: Any
) -> dict[str, Tensor]:
    """`_generate_and_score_completions` reads no more of the trainer than this."""
    stand_in = SimpleNamespace(
        **{
            "_calculate_rewards": lambda *args: rewards[:, None],
            "_generate": lambda prompts: generated,
            "_get_per_token_logps_and_entropies": lambda *args, **options: (logprobs, None, None),
            "_logs": {name: [] for name in ("prompt", "completion", "advantages")},
            "_metrics": defaultdict(lambda: defaultdict(list)),
            "_pending_extra_logs": {},
            "_pending_metrics": {},
            "_tokenizer": SimpleNamespace(pad_token_id=0),
            "accelerator": SimpleNamespace(device="cpu", process_index=0, gather=lambda x: x),
            "args": SimpleNamespace(
                gradient_accumulation_steps=1,
                gradient_checkpointing_kwargs=None,
                per_device_train_batch_size=len(rewards),
                steps_per_generation=1,
            ),
            "beta": 0.0,
            "environment_factories": None,
            "environments": None,
            "mask_truncated_completions": False,
            "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
            "multi_objective_aggregation": "sum_then_normalize",
            "normalize_advantages": False,
            "num_generations": samples,
            "num_iterations": 1,
            "pad_to_multiple_of": None,
            "reward_clip_range": None,
            "reward_func_names": [],
            "reward_weights": torch.ones(1),
            "scale_rewards": "group",
            "tools": None,
            "use_vllm": False,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_clip_min": None,
            **settings,
        }
    )
    return trainer._generate_and_score_completions(stand_in, [{"prompt": ""}] * len(rewards))
