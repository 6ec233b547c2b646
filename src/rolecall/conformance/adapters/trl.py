"""TRL's helpers in `trl.trainer.utils`, and the loss of its GRPOTrainer.

TRL's maths lies inside trainer methods. `GRPOTrainer._compute_loss` is called here as it is, on a stand-in with the
settings it reads, whose forward pass gives the log-probs of the case. Advantages are computed in the middle of
`_generate_and_score_completions`, which also generates and scores, so they are not offered.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

PACKAGES = ("trl",)
_NAN = (
    "robustness: it multiplies by the mask, and NaN * 0 is NaN; inputs must be replaced by `where` before arithmetic."
)
REASONS = {
    "aggregate_leaves_out_an_empty_row": "definition: it divides by all rows of the micro-batch, so an answer that is "
    "masked out (mask_truncated_completions) makes the loss of the others smaller. A mean over sequences divides by "
    "those that are in it; bnpo and dapo, which count tokens, pass.",
    "aggregate_ignores_rubbish": _NAN,
    "policy_loss_of_a_broken_record_is_finite": "robustness: exp of a log ratio is not bounded and overflows at 89 in "
    "float32, so one bad record makes the loss inf; verl, OpenRLHF and rolecall clamp the log ratio to 20.",
    "policy_loss_ignores_rubbish": _NAN,
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
