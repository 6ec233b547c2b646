"""TRL's names (GRPOConfig, GRPOTrainer and what they inherit of transformers' TrainingArguments)."""

from typing import Any

from rolecall.config.foreign import Differs, Foreign, Settings, choice, differs, from_peft, made, same, unused
from rolecall.config.plan import processes


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise Differs(f"it must be a whole number, got {value!r}") from None


def _answers(given: Settings) -> int:
    """Answers per rollout: TRL's generation batch."""
    if given.get("generation_batch_size") is not None:
        return _whole(given["generation_batch_size"])
    parts = _whole(given.get("steps_per_generation", given.get("gradient_accumulation_steps", 1)))
    ranks = processes()
    return _whole(given["per_device_train_batch_size"]) * ranks * parts


def _prompts(value: Any, given: Settings) -> Settings:
    if "num_generations" not in given:
        raise Differs(
            "it counts answers, `prompts` counts prompts per rollout: give `num_generations` beside it, or `prompts`"
        )
    answers, samples = _answers(given), _whole(given["num_generations"])
    if samples < 1 or answers % samples:
        raise Differs(f"{answers} answers per rollout are not a multiple of num_generations {samples}; give `prompts`")
    return {"prompts": answers // samples}


def _device_batch(value: Any, given: Settings) -> Settings:
    return {} if given.get("generation_batch_size") is not None else _prompts(value, given)


def _accumulation(value: Any, given: Settings) -> Settings:
    if not {"per_device_train_batch_size", "generation_batch_size"} & set(given):
        raise Differs(
            "it says how often per_device_train_batch_size goes into a step: give that beside it, or `prompts`, and "
            "`optim.token_budget` for memory"
        )
    return {}  # part of what `prompts` is computed from


def _minibatches(value: Any, given: Settings) -> Settings:
    each = _whole(given.get("gradient_accumulation_steps", 1))
    if each < 1 or _whole(value) % each:
        raise Differs(f"{value} is not a multiple of gradient_accumulation_steps {each}; give `algorithm.minibatches`")
    return {"algorithm.minibatches": _whole(value) // each}


def _rows_batch(value: Any, given: Settings) -> Settings:
    ranks = processes()
    return {"batch": _whole(value) * _whole(given.get("gradient_accumulation_steps", 1)) * ranks}


def _epsilon(value: Any, given: Settings) -> Settings:
    high = {} if given.get("epsilon_high") is not None else {"algorithm.clip_high": value}
    return {"algorithm.clip_low": value, **high}


def _beta(value: Any, _: Settings) -> Settings:
    where = {"algorithm.kl_in": "loss", "algorithm.kl_kind": "k3"} if value else {}
    return {"algorithm.kl_coef": value, **where}


def _sync(value: Any, given: Settings) -> Settings:
    if not value:
        return {}
    if given.get("ref_model_mixup_alpha") not in (1, 1.0):
        raise Differs(
            "TRL mixes policy and reference (ref_model_mixup_alpha, 0.6 unless set), `algorithm.reference_every` makes "
            "the policy the new reference: give that, or ref_model_mixup_alpha 1 beside it"
        )
    return {"algorithm.reference_every": given.get("ref_model_sync_steps", 512)}


def _steps(value: Any, _: Settings) -> Settings:
    return {} if _whole(value) <= 0 else {"steps": value}  # -1: as many as the epochs take


def _epochs(value: Any, given: Settings) -> Settings:
    return {} if _whole(given.get("max_steps", -1)) > 0 else {"epochs": value}


def _trackers(value: Any, _: Settings) -> Settings:
    names = [value] if isinstance(value, str) else list(value)
    if "all" in names:
        raise Differs("`save.trackers` takes its place and wants names: tensorboard, trackio, wandb")
    return {"save.trackers": tuple(name for name in names if name != "none")}


_SCHEDULES = {**{name: name for name in ("linear", "cosine", "constant")}, "constant_with_warmup": "constant"}


def _strategy(name: str, key: str) -> Foreign:
    epoch = Differs(f"`{key}` takes its place and counts steps: there are none per epoch")
    return choice(name, key, {"no": {key: 0}, "steps": {}, "epoch": epoch})


TRAINER = (
    same("train_dataset", "rows"),
    same("eval_dataset", "eval.data"),
    same("output_dir", "out"),
    same("seed", "seed", learned=True),
    made("max_steps", ("steps",), _steps, counts_updates=True, learned=True),
    made("num_train_epochs", ("epochs",), _epochs),
    same("learning_rate", "optim.lr", learned=True),
    choice("lr_scheduler_type", "optim.schedule", _SCHEDULES, learned=True),
    same("warmup_steps", "optim.warmup_steps", counts_updates=True, learned=True),
    differs("warmup_ratio", ["optim.warmup_steps"], "`optim.warmup_steps` takes its place: ratio x `steps`", off=(0,)),
    same("weight_decay", "optim.weight_decay", learned=True),
    same("adam_beta1", "optim.beta1", learned=True),
    same("adam_beta2", "optim.beta2", learned=True),
    same("max_grad_norm", "optim.max_grad_norm", learned=True),
    choice("bf16", "policy.mixed_precision", {True: "bf16", False: "no"}),
    differs("fp16", ["policy.mixed_precision"], "there is no float16: give `policy.mixed_precision` bf16"),
    same("gradient_checkpointing", "policy.gradient_checkpointing"),
    made("peft_config", ("policy.lora_rank", "policy.lora_alpha"), from_peft),
    same("save_steps", "save.every", counts_updates=True),
    _strategy("save_strategy", "save.every"),
    same("save_total_limit", "save.keep"),
    same("eval_steps", "eval.every", counts_updates=True),
    _strategy("eval_strategy", "eval.every"),
    made("report_to", ("save.trackers",), _trackers),
    unused("logging_steps", "every step is logged"),
    differs(
        "resume_from_checkpoint",
        ["out", "resume"],
        "`resume` takes its place and continues the run in `out` from its last good checkpoint",
    ),
    differs(
        "model_init_kwargs",
        ["policy.dtype"],
        "models are loaded by `model` alone; `policy.dtype` is what it is held in",
        off=({},),
    ),
    differs(
        "optimizers", ["optim.lr"], "the optimiser is AdamW, set by `optim.lr` and its neighbours", off=((None, None),)
    ),
)
"""What all of TRL's trainers take."""

TRL_ROWS = (
    *TRAINER,
    made("per_device_train_batch_size", ("batch",), _rows_batch, learned=True),
    made("gradient_accumulation_steps", ("batch",), lambda value, given: _each(given), learned=True),
)
"""For training on rows as they are: sft, rm, dpo."""


def _each(given: Settings) -> Settings:
    if "per_device_train_batch_size" not in given:
        raise Differs(
            "`batch` takes its place: per_device_train_batch_size x gradient_accumulation_steps rows per step"
        )
    return {}


TRL = (
    *TRAINER,
    same("reward_funcs", "reward"),
    same("reward_weights", "reward_weights", learned=True),
    same("environment_factory", "env"),
    differs(
        "tools",
        ["env"],
        "functions can be given from Python only (rolecall.rl(tools=[f])); here give `env` file.py:Class, whose public "
        "methods are the tools",
        off=((), []),
    ),
    made("max_tool_calling_iterations", ("agent.max_turns",), lambda v, _: {"agent.max_turns": _whole(v) + 1}),
    same("num_generations", "samples", learned=True),
    differs(
        "num_generations_eval",
        ["eval.samples"],
        "`eval.samples` takes its place, in addition to a greedy answer to each row, which TRL does not ask for",
        off=(),
    ),
    made("generation_batch_size", ("prompts",), _prompts, learned=True),
    made("per_device_train_batch_size", ("prompts", "optim.token_budget"), _device_batch, learned=True),
    made("gradient_accumulation_steps", ("prompts", "optim.token_budget"), _accumulation, learned=True),
    made("steps_per_generation", ("algorithm.minibatches",), _minibatches, learned=True),
    same("num_iterations", "algorithm.epochs", learned=True),
    same("max_completion_length", "sampling.max_new_tokens", learned=True),
    differs(
        "max_prompt_length",
        ["agent.context_tokens"],
        "prompts are never cut: one that leaves no room for an answer is an error before training",
        off=(),
    ),
    same("temperature", "sampling.temperature", learned=True),
    same("top_p", "sampling.top_p", learned=True),
    made("top_k", ("sampling.top_k",), lambda v, _: {"sampling.top_k": v or None}, learned=True),
    same("min_p", "sampling.min_p", learned=True),
    differs("repetition_penalty", ["sampling.temperature"], "answers are drawn without penalties", off=(1, 1.0)),
    differs("generation_kwargs", ["sampling.temperature"], "`sampling` has all there is to set", off=({},)),
    same("chat_template_kwargs", "chat.chat_template_kwargs"),
    made("beta", ("algorithm.kl_coef", "algorithm.kl_in", "algorithm.kl_kind"), _beta, learned=True),
    made("epsilon", ("algorithm.clip_low", "algorithm.clip_high"), _epsilon, learned=True),
    same("epsilon_high", "algorithm.clip_high", learned=True),
    same("delta", "algorithm.dual_clip", learned=True),
    choice(
        "loss_type",
        "algorithm.aggregate",
        {
            "grpo": "seq-mean-token-mean",
            "dapo": "token-mean",
            "dr_grpo": "seq-mean-token-sum-norm",
            "bnpo": Differs(
                "it divides by the tokens of one device's micro-batch; `algorithm.aggregate` token-mean (loss_type dapo) by "
                "those of the whole mini-batch"
            ),
            "cispo": Differs(
                "give `algorithm.loss` cispo (or the preset cispo): TRL's epsilon_high is the largest ratio itself, here "
                "that is 1 + `algorithm.clip_high`"
            ),
        },
        learned=True,
    ),
    choice("importance_sampling_level", "algorithm.loss", {"token": {}, "sequence": "gspo"}, learned=True),
    choice(
        "scale_rewards",
        "algorithm.scale",
        {True: "group", "group": "group", "batch": "batch", False: "none", "none": "none"},
        learned=True,
    ),
    same("mask_truncated_completions", "algorithm.drop_truncated", learned=True),
    same("entropy_coef", "algorithm.entropy_coef", learned=True),
    differs(
        "use_adaptive_entropy",
        ["algorithm.entropy_target"],
        "`algorithm.entropy_target` takes its place, and moves entropy_coef in proportion to the gap, not in fixed steps",
    ),
    made("sync_ref_model", ("algorithm.reference_every",), _sync, counts_updates=True, learned=True),
    made("ref_model_sync_steps", ("algorithm.reference_every",), lambda v, _: {}),
    made("ref_model_mixup_alpha", ("algorithm.reference_every",), lambda v, _: {}),
    differs(
        "use_vllm",
        ["engine.servers"],
        "vLLM is a server here: start `rolecall serve MODEL --vllm`, give `engine.servers`",
    ),
    differs("shuffle_dataset", ["seed"], "rows are always shuffled, by `seed`", off=(True,)),
    unused("log_completions", "all answers are kept, in rollouts/ of the run", "save.rollouts"),
)
"""For `rolecall rl`."""

_ROUNDS = (
    differs(
        "num_train_epochs",
        ["steps"],
        "`steps` takes its place and counts rounds, rows x epochs / `prompts` of them; `epochs` are passes over the "
        "answers that a round keeps",
        off=(),
    ),
    differs(
        "max_steps",
        ["steps"],
        "it counts optimiser steps, `steps` rounds, which take as many as the kept answers fill: give `steps`",
        off=(-1,),
    ),
    differs(
        "per_device_train_batch_size",
        ["prompts", "batch"],
        "`prompts` (per round) and `batch` (kept answers per optimiser step) take its place",
        off=(),
    ),
    *(
        differs(name, [key], f"it counts optimiser steps, `{key}` rounds: give `{key}`", off=())
        for name, key in (
            ("warmup_steps", "optim.warmup_steps"),
            ("save_steps", "save.every"),
            ("eval_steps", "eval.every"),
        )
    ),
)
_BATCHES = {"generation_batch_size", "gradient_accumulation_steps"}
TRL_ROUNDS = (*(f for f in TRL if f.name not in _BATCHES | {g.name for g in _ROUNDS}), *_ROUNDS)
"""For `rolecall expert-iteration`, which counts rounds."""
