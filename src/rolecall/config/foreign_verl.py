"""verl's names, without the leading `actor_rollout_ref.`, which may be written or left out."""

from typing import Any

from rolecall.config.foreign import Differs, Settings, choice, differs, made, same, unused

_ESTIMATORS = {
    "grpo": "grpo",
    "gae": {"algorithm.name": "ppo", "algorithm.critic": "separate"},
    "rloo": "rloo",
    "remax": "remax",
    "opo": "opo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
}
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "full": "exact"}
_KINDS = {**_KL, **{f"{name}+": kind for name, kind in _KL.items()}}
_AGGREGATES = {
    **{mode: mode for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")},
    "seq-mean-token-sum-norm": Differs(
        "what verl divides by under this name is loss_scale_factor or the width of the batch, and before February 2026 it "
        "did not divide by answers: give `algorithm.aggregate` and `algorithm.norm`, the constant length"
    ),
}

_ADAPTIVE = Differs("`algorithm.kl_target` takes its place and is the KL per answer, where target_kl is that per token")


def _file(key: str) -> Any:
    def convert(value: Any, _: Settings) -> Settings:
        files = [value] if isinstance(value, str) else list(value)
        if len(files) != 1:
            raise Differs(f"`{key}` takes one file, got {len(files)}: join them")
        return {key: files[0]}

    return convert


def _reward(value: Any, given: Settings) -> Settings:
    return {"reward": (f"{value}:{given.get('custom_reward_function.name', 'compute_score')}",)}


def _reward_name(value: Any, given: Settings) -> Settings:
    if "custom_reward_function.path" not in given:
        raise Differs(
            "`reward` takes its place, as file.py:function: give custom_reward_function.path beside it, or that"
        )
    return {}  # part of `custom_reward_function.path`


def _minibatches(value: Any, given: Settings) -> Settings:
    whole, each = given.get("data.train_batch_size"), int(value)
    if whole is None:
        raise Differs(
            "it says how many prompts a mini-batch has, `algorithm.minibatches` how many mini-batches there are: give "
            "data.train_batch_size beside it, or `algorithm.minibatches`"
        )
    if each < 1 or int(whole) % each:
        raise Differs(f"data.train_batch_size {whole} is not a multiple of it ({each}); give `algorithm.minibatches`")
    return {"algorithm.minibatches": int(whole) // each}


def _clip(value: Any, given: Settings) -> Settings:
    sides = {"actor.clip_ratio_low": "algorithm.clip_low", "actor.clip_ratio_high": "algorithm.clip_high"}
    return {key: value for name, key in sides.items() if given.get(name) is None}


def _kl_in(place: str, coefficient: str) -> Any:
    other = "actor.use_kl_loss" if place == "reward" else "algorithm.use_kl_in_reward"

    def convert(value: Any, given: Settings) -> Settings:
        if value and given.get(other):
            raise Differs(f"the KL has one place, `algorithm.kl_in`: leave out this or {other}")
        # Without a coefficient verl has this one.
        missing = {} if coefficient in given else {"algorithm.kl_coef": 0.001}
        return {"algorithm.kl_in": place, **missing} if value else {}

    return convert


def _kl_coef(switch: str) -> Any:
    def convert(value: Any, given: Settings) -> Settings:
        if not given.get(switch):
            raise Differs(
                f"verl uses it with {switch} only: give that too, or `algorithm.kl_coef` and `algorithm.kl_in`"
            )
        return {"algorithm.kl_coef": value}

    return convert


def _kl_kind(switch: str) -> Any:
    def convert(value: Any, given: Settings) -> Settings:
        if value not in _KINDS:
            raise Differs(f"`algorithm.kl_kind` takes its place; of verl's values there are {', '.join(_KL)}")
        return {"algorithm.kl_kind": _KINDS[value]} if given.get(switch, True) else {}

    return convert


def _or_never(key: str) -> Any:
    return lambda value, _: {key: max(0, int(value))}


def _logger(value: Any, _: Settings) -> Settings:
    names = [value] if isinstance(value, str) else list(value)
    known = ("tensorboard", "trackio", "wandb")
    for name in names:
        if name not in (*known, "console"):
            raise Differs(
                f"there is no {name}: `save.trackers` takes {', '.join(known)}; metrics.jsonl is always written"
            )
    return {"save.trackers": tuple(name for name in names if name in known)}


def _warmup(value: Any, _: Settings) -> Settings:
    return {"optim.warmup_steps": value} if int(value) > 0 else {}


def _targets(value: Any, _: Settings) -> Settings:
    every = value in ("all-linear", ["all-linear"])
    return {} if every else {"policy.lora_targets": (value,) if isinstance(value, str) else tuple(value)}


_PLACEMENT = "it places work on GPUs, and the result does not depend on it"

VERL = (
    made("data.train_files", ("rows",), _file("rows")),
    made("data.val_files", ("eval.data",), _file("eval.data")),
    same("data.train_batch_size", "prompts"),
    same("data.max_response_length", "sampling.max_new_tokens"),
    unused("data.max_prompt_length", "prompts are never cut: one that leaves no room for an answer is an error"),
    differs("data.prompt_key", ["rows"], "the column must be called `prompt`: rename it in `rows`", off=("prompt",)),
    differs("data.shuffle", ["seed"], "rows are always shuffled, by `seed`", off=(True,)),
    same("data.seed", "seed"),
    same("data.apply_chat_template_kwargs", "chat.chat_template_kwargs"),
    made("custom_reward_function.path", ("reward",), _reward),
    made("custom_reward_function.name", ("reward",), _reward_name),
    differs(
        "custom_reward_function.reward_kwargs",
        ["reward"],
        "write `mine = functools.partial(compute_score, …)` into the file and give `reward` file.py:mine, or the partial "
        "itself in Python",
        off=({},),
    ),
    choice("algorithm.adv_estimator", "algorithm.name", _ESTIMATORS),
    choice("algorithm.norm_adv_by_std_in_grpo", "algorithm.scale", {True: "group", False: "none"}),
    made("algorithm.use_kl_in_reward", ("algorithm.kl_in",), _kl_in("reward", "algorithm.kl_ctrl.kl_coef")),
    made("algorithm.kl_penalty", ("algorithm.kl_kind",), _kl_kind("algorithm.use_kl_in_reward")),
    made("algorithm.kl_ctrl.kl_coef", ("algorithm.kl_coef",), _kl_coef("algorithm.use_kl_in_reward")),
    choice("algorithm.kl_ctrl.type", "algorithm.kl_target", {"fixed": {}, "adaptive": _ADAPTIVE}),
    made("algorithm.kl_ctrl.target_kl", ("algorithm.kl_target",), lambda value, _: {}),  # verl's adaptive type only
    made("algorithm.kl_ctrl.horizon", ("algorithm.kl_horizon",), lambda value, _: {}),
    differs(
        "algorithm.filter_groups.enable",
        ["algorithm.resample", "algorithm.drop_flat"],
        "`algorithm.resample` takes its place: rounds of sampling that replace groups whose answers all score the same",
    ),
    same("model.path", "model"),
    same("model.enable_gradient_checkpointing", "policy.gradient_checkpointing"),
    made("model.lora_rank", ("policy.lora_rank",), lambda value, _: {"policy.lora_rank": value or None}),
    same("model.lora_alpha", "policy.lora_alpha"),
    made("model.target_modules", ("policy.lora_targets",), _targets),
    unused("model.use_remove_padding", "padding is never computed"),
    made("actor.use_kl_loss", ("algorithm.kl_in",), _kl_in("loss", "actor.kl_loss_coef")),
    made("actor.kl_loss_coef", ("algorithm.kl_coef",), _kl_coef("actor.use_kl_loss")),
    made("actor.kl_loss_type", ("algorithm.kl_kind",), _kl_kind("actor.use_kl_loss")),
    made("actor.clip_ratio", ("algorithm.clip_low", "algorithm.clip_high"), _clip),
    same("actor.clip_ratio_low", "algorithm.clip_low"),
    same("actor.clip_ratio_high", "algorithm.clip_high"),
    same("actor.clip_ratio_c", "algorithm.dual_clip"),
    choice("actor.loss_agg_mode", "algorithm.aggregate", _AGGREGATES),
    choice("actor.policy_loss.loss_mode", "algorithm.loss", {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}),
    same("actor.ppo_epochs", "algorithm.epochs"),
    made("actor.ppo_mini_batch_size", ("algorithm.minibatches",), _minibatches),
    same("actor.ppo_max_token_len_per_gpu", "optim.token_budget"),
    unused(
        "actor.ppo_micro_batch_size_per_gpu", f"{_PLACEMENT}: `optim.token_budget` is the limit", "optim.token_budget"
    ),
    unused("actor.use_dynamic_bsz", "micro-batches are always filled by tokens", "optim.token_budget"),
    same("actor.entropy_coeff", "algorithm.entropy_coef"),
    same("actor.grad_clip", "optim.max_grad_norm"),
    same("actor.optim.lr", "optim.lr"),
    same("actor.optim.weight_decay", "optim.weight_decay"),
    made("actor.optim.lr_warmup_steps", ("optim.warmup_steps",), _warmup),
    choice("actor.optim.lr_scheduler_type", "optim.schedule", {"constant": "constant", "cosine": "cosine"}),
    same("critic.optim.lr", "optim.critic_lr"),
    same("critic.cliprange_value", "algorithm.value_clip"),
    same("rollout.n", "samples"),
    same("rollout.temperature", "sampling.temperature"),
    same("rollout.top_p", "sampling.top_p"),
    made("rollout.top_k", ("sampling.top_k",), lambda v, _: {"sampling.top_k": int(v) if int(v) > 0 else None}),
    choice(
        "rollout.name",
        "engine.name",
        {"hf": "hf"}
        | {
            "vllm": Differs("vLLM is a server here: start `rolecall serve MODEL --vllm`, give `engine.servers`"),
            "sglang": Differs("there is no sglang engine: leave it out, `engine.name` auto chooses"),
        },
    ),
    unused("rollout.tensor_model_parallel_size", _PLACEMENT),
    unused("rollout.gpu_memory_utilization", _PLACEMENT),
    unused("rollout.log_prob_micro_batch_size_per_gpu", _PLACEMENT, "optim.token_budget"),
    differs(
        "rollout.val_kwargs.n",
        ["eval.samples"],
        "`eval.samples` takes its place, at the temperature of training and in addition to a greedy answer to each row",
        off=(1,),
    ),
    made("rollout.multi_turn.max_assistant_turns", ("agent.max_turns",), lambda v, _: {"agent.max_turns": v}),
    same("trainer.total_epochs", "epochs"),
    same("trainer.total_training_steps", "steps"),
    made("trainer.save_freq", ("save.every",), _or_never("save.every")),
    made("trainer.test_freq", ("eval.every",), _or_never("eval.every")),
    made("trainer.logger", ("save.trackers",), _logger),
    same("trainer.default_local_dir", "out"),
    unused("trainer.project_name", "a run is called by its directory, `out`", "out"),
    unused("trainer.experiment_name", "a run is called by its directory, `out`", "out"),
    same("trainer.max_actor_ckpt_to_keep", "save.keep"),
    unused("trainer.n_gpus_per_node", f"{_PLACEMENT}; processes are started by `torchrun`"),
    unused("trainer.nnodes", f"{_PLACEMENT}; processes are started by `torchrun`"),
    unused("trainer.val_before_train", "with `eval.every` the first evaluation is before the first step", "eval.every"),
    differs(
        "trainer.critic_warmup", ["algorithm.critic_from"], "the critic starts from `algorithm.critic_from`", off=(0,)
    ),
    choice(
        "trainer.resume_mode",
        "resume",
        {
            "disable": {},
            "auto": Differs("a run is resumed by `resume` and its directory, `out`"),
            "resume_path": Differs("a run is resumed by `resume` and its directory, `out`"),
        },
    ),
)
"""For `rolecall rl`."""
