"""Settings under the names that TRL and verl have for them."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from transformers import TrainingArguments

from rolecall.config.flags import parse
from rolecall.config.foreign_trl import TRL, TRL_ROWS
from rolecall.config.foreign_verl import VERL
from rolecall.config.merge import FLAGS, ConfigError, make, resolve
from rolecall.config.rl import RLOptions
from rolecall.config.schema import nearest, schema
from rolecall.config.show import resolved_yaml
from rolecall.config.training import ExpertIterationOptions, SFTOptions
from rolecall.errors import UserError


def settings(options, *keys):
    """The values at dotted keys."""
    found = {}
    for key in keys:
        value = options
        for part in key.split("."):
            value = getattr(value, part)
        found[key] = value
    return found


def from_flags(*words):
    return resolve(RLOptions, [(FLAGS, parse(words, schema(RLOptions)).given)])


SAME = [
    ("num_train_epochs", 2, {"epochs": 2}),
    ("num_generations", 4, {"samples": 4}),
    ("max_completion_length", 64, {"sampling.max_new_tokens": 64}),
    ("learning_rate", 1e-4, {"optim.lr": 1e-4}),
    ("beta", 0.04, {"algorithm.kl_coef": 0.04, "algorithm.kl_in": "loss", "algorithm.kl_kind": "k3"}),
    ("epsilon", 0.1, {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1}),
    ("epsilon_high", 0.28, {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28}),
    ("delta", 4.0, {"algorithm.dual_clip": 4.0}),
    ("reward_funcs", ["exact"], {"reward": ("exact",)}),
    ("train_dataset", "rows.jsonl", {"rows": "rows.jsonl"}),
    ("environment_factory", "envs.py:Env", {"env": "envs.py:Env"}),
    ("max_tool_calling_iterations", 3, {"agent.max_turns": 4}),
    ("num_iterations", 2, {"algorithm.epochs": 2}),
    ("steps_per_generation", 4, {"algorithm.minibatches": 4}),
    ("temperature", 0.7, {"sampling.temperature": 0.7}),
    ("top_p", 0.9, {"sampling.top_p": 0.9}),
    ("top_k", 0, {"sampling.top_k": None}),
    ("loss_type", "grpo", {"algorithm.aggregate": "seq-mean-token-mean"}),
    ("loss_type", "dapo", {"algorithm.aggregate": "token-mean"}),
    ("loss_type", "dr_grpo", {"algorithm.aggregate": "seq-mean-token-sum-norm"}),
    ("scale_rewards", True, {"algorithm.scale": "group"}),
    ("scale_rewards", "batch", {"algorithm.scale": "batch"}),
    ("scale_rewards", False, {"algorithm.scale": "none"}),
    ("importance_sampling_level", "sequence", {"algorithm.loss": "gspo"}),
    ("mask_truncated_completions", True, {"algorithm.drop_truncated": True}),
    ("max_steps", 30, {"steps": 30}),
    ("max_steps", -1, {"steps": 100}),
    ("output_dir", "runs/x", {"out": "runs/x"}),
    ("report_to", "wandb", {"save.trackers": ("wandb",)}),
    ("report_to", "none", {"save.trackers": ()}),
    ("save_steps", 20, {"save.every": 20}),
    ("eval_steps", 5, {"eval.every": 5}),
    ("save_strategy", "no", {"save.every": 0}),
    ("bf16", True, {"policy.mixed_precision": "bf16"}),
    ("gradient_checkpointing", True, {"policy.gradient_checkpointing": True}),
    ("use_vllm", False, {}),
    ("lr_scheduler_type", "constant_with_warmup", {"optim.schedule": "constant"}),
    ("warmup_steps", 10, {"optim.warmup_steps": 10}),
    ("max_grad_norm", 0.5, {"optim.max_grad_norm": 0.5}),
    ("adam_beta2", 0.95, {"optim.beta2": 0.95}),
    ("algorithm.adv_estimator", "rloo", {"algorithm.name": "rloo"}),
    ("algorithm.adv_estimator", "gae", {"algorithm.name": "ppo", "algorithm.critic": "separate"}),
    ("algorithm.norm_adv_by_std_in_grpo", False, {"algorithm.scale": "none"}),
    ("actor_rollout_ref.rollout.n", 4, {"samples": 4}),
    ("rollout.temperature", 0.6, {"sampling.temperature": 0.6}),
    ("actor_rollout_ref.rollout.top_k", -1, {"sampling.top_k": None}),
    ("actor_rollout_ref.actor.clip_ratio_low", 0.1, {"algorithm.clip_low": 0.1}),
    ("actor_rollout_ref.actor.clip_ratio", 0.3, {"algorithm.clip_low": 0.3, "algorithm.clip_high": 0.3}),
    ("actor_rollout_ref.actor.clip_ratio_c", 3.0, {"algorithm.dual_clip": 3.0}),
    ("actor_rollout_ref.actor.loss_agg_mode", "token-mean", {"algorithm.aggregate": "token-mean"}),
    ("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla", {"algorithm.loss": "clip"}),
    ("actor_rollout_ref.actor.use_kl_loss", True, {"algorithm.kl_in": "loss", "algorithm.kl_coef": 0.001}),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 100, {"optim.token_budget": 100}),
    ("actor_rollout_ref.model.path", "tiny", {"model": "tiny"}),
    ("actor_rollout_ref.model.lora_rank", 8, {"policy.lora_rank": 8}),
    ("actor_rollout_ref.model.lora_rank", 0, {"policy.lora_rank": None}),
    ("algorithm.kl_penalty", "full", {"algorithm.kl_kind": "exact"}),
    ("actor_rollout_ref.actor.kl_loss_type", "low_var_kl+", {"algorithm.kl_kind": "k3"}),
    ("data.train_files", ["a.parquet"], {"rows": "a.parquet"}),
    ("data.train_batch_size", 32, {"prompts": 32}),
    ("data.max_response_length", 99, {"sampling.max_new_tokens": 99}),
    ("trainer.total_training_steps", 7, {"steps": 7}),
    ("trainer.logger", ["console", "wandb"], {"save.trackers": ("wandb",)}),
    ("trainer.save_freq", -1, {"save.every": 0}),
    ("trainer.test_freq", 5, {"eval.every": 5}),
    ("custom_reward_function.path", "r.py", {"reward": ("r.py:compute_score",)}),
    ("critic.cliprange_value", 0.5, {"algorithm.value_clip": 0.5}),
]


@pytest.mark.parametrize(("name", "value", "ours"), SAME)
def test_a_name_of_the_same_meaning_sets_ours(name, value, ours):
    beside = {"samples": 8} if "samples" not in ours else {}
    found = resolve(RLOptions, [("run.yaml", {name: value, **beside})])
    assert settings(found.options, *ours) == ours
    default = resolve(RLOptions, [("run.yaml", {"samples": 8})]).options
    short = name.removeprefix("actor_rollout_ref.")
    for key in ours:
        if key in found.sources and key != "samples":
            assert found.sources[key] == f"run.yaml ({short})"
        elif key != "samples":
            assert settings(default, key) == {key: ours[key]}
    nested = value
    for part in reversed(name.split(".")):
        nested = {part: nested}
    assert make(RLOptions, {**nested, **beside}) == found.options


@pytest.mark.parametrize(("name", "value", "ours"), SAME)
def test_the_command_line_takes_it_too(name, value, ours):
    text = (
        ",".join(value) if name == "reward_funcs" else str(value) if not isinstance(value, bool) else str(value).lower()
    )
    assert settings(from_flags(f"--{name.replace('_', '-')}={text}").options, *ours) == ours


def test_names_that_belong_together():
    trl = make(RLOptions, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_generations": 16})
    assert (trl.prompts, trl.samples, trl.algorithm.minibatches) == (2, 16, 1)
    assert make(RLOptions, {"generation_batch_size": 64, "num_generations": 8}).prompts == 8
    both = make(RLOptions, {"epsilon": 0.2, "epsilon_high": 0.28}).algorithm
    assert (both.clip_low, both.clip_high) == (0.2, 0.28)
    verl = make(
        RLOptions,
        {
            "data": {"train_batch_size": 64},
            "algorithm": {"use_kl_in_reward": True, "kl_penalty": "kl", "gamma": 0.9, "kl_ctrl": {"kl_coef": 0.01}},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 16, "optim": {"lr": 1e-6}}, "rollout": {"n": 4}},
            "custom_reward_function": {"path": "r.py", "name": "mine"},
        },
    )
    assert (verl.prompts, verl.samples, verl.algorithm.minibatches, verl.optim.lr) == (64, 4, 4, 1e-6)
    assert (verl.algorithm.kl_in, verl.algorithm.kl_kind, verl.algorithm.kl_coef) == ("reward", "k1", 0.01)
    assert (verl.algorithm.gamma, verl.reward) == (0.9, ("r.py:mine",))


REFUSED = [
    ({"per_device_train_batch_size": 8}, "it counts answers, `prompts` counts prompts per rollout"),
    ({"per_device_train_batch_size": 9, "num_generations": 2}, "9 answers per rollout are not a multiple"),
    ({"gradient_accumulation_steps": 8}, "`prompts`, and `optim.token_budget` for memory"),
    ({"loss_type": "bnpo"}, "`algorithm.aggregate` token-mean"),
    ({"loss_type": "cispo"}, "epsilon_high is the largest ratio itself"),
    ({"loss_type": "sapo"}, "of loss_type's values there are grpo, dapo, dr_grpo"),
    ({"sync_ref_model": True}, "`algorithm.reference_every` makes the policy the new reference"),
    ({"use_vllm": True}, "vLLM is a server here"),
    ({"tools": ["f"]}, "functions can be given from Python only"),
    ({"fp16": True}, "give `policy.mixed_precision` bf16"),
    ({"report_to": "all"}, "`save.trackers` takes its place and wants names"),
    ({"report_to": "mlflow"}, "`report_to` must be a list of one of tensorboard, trackio, wandb"),
    ({"resume_from_checkpoint": True}, "`resume` takes its place"),
    ({"warmup_ratio": 0.1}, "`optim.warmup_steps` takes its place"),
    ({"eval_strategy": "epoch"}, "`eval.every` takes its place and counts steps"),
    ({"num_generations_eval": 2}, "`eval.samples` takes its place"),
    ({"max_prompt_length": 100}, "prompts are never cut"),
    ({"num_generations": 4, "samples": 4}, "`num_generations` sets `samples`, and so does `samples`; keep one"),
    ({"num_generations": 4, "rollout.n": 4}, "`rollout.n` sets `samples`, and so does `num_generations`; keep one"),
    ({"num_generations": "x"}, "`num_generations` must be a whole number, got 'x'"),
    ({"max_steps": 100, "num_iterations": 2}, "`max_steps` counts optimiser steps, `steps` rollouts, which take 2"),
    ({"actor.ppo_mini_batch_size": 64}, "`algorithm.minibatches` how many mini-batches there are"),
    ({"actor.loss_agg_mode": "seq-mean-token-sum-norm"}, "give `algorithm.aggregate` and `algorithm.norm`"),
    ({"actor.kl_loss_coef": 0.1}, "verl uses it with actor.use_kl_loss only"),
    ({"actor.use_kl_loss": True, "algorithm.use_kl_in_reward": True}, "the KL has one place, `algorithm.kl_in`"),
    ({"algorithm.adv_estimator": "gpg"}, "of algorithm.adv_estimator's values there are grpo, gae"),
    (
        {"algorithm": {"kl_ctrl": {"type": "adaptive", "target_kl": 0.1}}},
        "the KL per answer, where target_kl is that per",
    ),
    ({"rollout.name": "vllm"}, "vLLM is a server here"),
    ({"data.train_files": ["a", "b"]}, "`rows` takes one file, got 2"),
    ({"trainer.logger": ["mlflow"]}, "there is no mlflow: `save.trackers` takes tensorboard"),
    ({"custom_reward_function": {"path": "r.py", "reward_kwargs": {"a": 1}}}, "functools.partial(compute_score"),
    ({"actor_rollout_ref": {"actor": {"clip_ration": 1}}}, "unknown key `actor_rollout_ref.actor.clip_ration`"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_a_name_of_another_meaning_is_refused_with_ours(given, sentence):
    with pytest.raises(ConfigError) as caught:
        make(RLOptions, given)
    assert any(sentence in problem for problem in caught.value.problems), caught.value
    assert all("\n" not in problem for problem in caught.value.problems)


def test_what_has_no_effect_is_said(caplog):
    make(RLOptions, {"logging_steps": 10, "trainer": {"nnodes": 1}})
    assert [r.getMessage() for r in caplog.records] == [
        "`logging_steps` has no effect: every step is logged",
        "`trainer.nnodes` has no effect: it places work on GPUs, and the result does not depend on it; processes are "
        "started by `torchrun`",
    ]


def test_a_stronger_layer_wins_whatever_the_name():
    layers = [("run.yaml", {"num_generations": 4, "max_steps": 9}), (FLAGS, {"samples": "6"})]
    found = resolve(RLOptions, layers)
    assert (found.options.samples, found.sources["samples"]) == (6, FLAGS)
    assert "steps: 9                                            # run.yaml (max_steps)" in resolved_yaml(found)


# -- nearest names -----------------------------------------------------------------------------------------------

MEANT = {
    "sampling.max_tokens": "sampling.max_new_tokens",
    "sampling.max_length": "sampling.max_new_tokens",
    "sampling.temp": "sampling.temperature",
    "sampling.top-p_": "sampling.top_p",
    "optim.learning_rate": "optim.lr",
    "optim.weight_decy": "optim.weight_decay",
    "optim.grad_norm": "optim.max_grad_norm",
    "optim.warmup": "optim.warmup_steps",
    "optim.adam_beta1": "optim.beta1",
    "algorithm.epsilon": "algorithm.clip_low",
    "algorithm.beta": "algorithm.kl_coef",
    "algorithm.cliphigh": "algorithm.clip_high",
    "algorithm.kl": "algorithm.kl_in",
    "algorithm.epoch": "algorithm.epochs",
    "algorithm.lambda": "algorithm.lam",
    "algorithm.loss_type": "algorithm.aggregate",
    "algorithm.gama": "algorithm.gamma",
    "policy.lora_r": "policy.lora_rank",
    "policy.bf16": "policy.mixed_precision",
    "eval.eval_steps": "eval.every",
    "save.save_steps": "save.every",
    "save.report_to": "save.trackers",
    "agent.max_turn": "agent.max_turns",
    "chat.template_kwargs": "chat.chat_template_kwargs",
    "engine.max_row": "engine.max_rows",
    "replay.shares": "replay.share",
    "lr": "optim.lr",
    "model.lr": "optim.lr",
    "max_tokens": "agent.max_tokens",
    "max_new_token": "sampling.max_new_tokens",
    "prompt": "agent.prompt",
    "sample": "samples",
    "step": "steps",
    "rewards": "reward",
    "reward_weight": "reward_weights",
    "kl_coeff": "algorithm.kl_coef",
    "clip_ratio_low": "algorithm.clip_low",
    "entropy_coeff": "algorithm.entropy_coef",
    "mini_batches": "algorithm.minibatches",
    "sede": "seed",
    "num_generation": "num_generations",
    "max_completion_lenght": "max_completion_length",
    "qqqq": None,
}


def test_the_nearest_name_is_looked_for_in_the_section_first():
    whole = schema(RLOptions)
    assert {written: nearest(written, whole) for written in MEANT} == MEANT
    with pytest.raises(
        UserError, match=r"unknown option --sampling.max_tokens: did you mean --sampling.max_new_tokens\?"
    ):
        from_flags("--sampling.max_tokens", "5")


def test_commands_that_do_not_take_a_foreign_name_still_tell_ours():
    from rolecall.config.training import BestOfNOptions
    from rolecall.config.use import EvalOptions, GenerateOptions

    assert nearest("max_completion_length", schema(EvalOptions)) == "sampling.max_new_tokens"
    assert nearest("reward_funcs", schema(BestOfNOptions)) == "reward"
    assert nearest("num_generations", schema(GenerateOptions)) == "n"


# -- objects -----------------------------------------------------------------------------------------------------


@dataclass
class GRPOConfig(TrainingArguments):
    """The fields of TRL's class of this name that matter, with its defaults, and what it derives from them."""

    learning_rate: float = 1e-6
    num_generations: int | None = 8
    max_completion_length: int | None = 256
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    loss_type: str = "dapo"
    scale_rewards: str | bool = "group"
    num_iterations: int = 1
    use_vllm: bool = False
    vllm_mode: str = "server"
    reward_weights: list[float] | None = None
    chat_template_kwargs: dict | None = None
    model_init_kwargs: dict | None = field(default=None)

    def __post_init__(self):
        super().__post_init__()
        self.scale_rewards = {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards)
        if self.generation_batch_size is None:
            self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
            self.generation_batch_size = self.per_device_train_batch_size * self.steps_per_generation


def test_an_object_of_settings_means_what_it_means_there(caplog):
    args = GRPOConfig(
        output_dir="runs/x", num_generations=4, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=5,
        scale_rewards=False, beta=0.1, lr_scheduler_type="cosine",
    )  # fmt: skip
    found = resolve(RLOptions, [("preset grpo", RLOptions.presets["grpo"]), ("the call", {"args": args, "steps": 3})])
    o = found.options
    assert (o.out, o.samples, o.prompts, o.algorithm.minibatches, o.steps) == ("runs/x", 4, 4, 1, 3)
    assert (o.algorithm.scale, o.algorithm.kl_coef, o.optim.schedule) == ("none", 0.1, "cosine")
    # What TRL does unless told otherwise is part of what the object means, where it changes what is learned.
    assert (o.optim.lr, o.algorithm.aggregate, o.seed) == (1e-6, "token-mean", 42)
    assert o.save == RLOptions().save
    assert found.sources["samples"] == "args, GRPOConfig (num_generations)"
    assert found.sources["steps"] == "the call"
    assert not caplog.records


def test_what_an_object_sets_and_we_do_not_use_is_said(caplog):
    args = GRPOConfig(output_dir="x", dataloader_num_workers=2, vllm_mode="colocate")
    make(RLOptions, {"args": args})
    assert [r.getMessage() for r in caplog.records] == [
        "of GRPOConfig these are not used here: dataloader_num_workers, vllm_mode"
    ]
    with pytest.raises(ConfigError, match="`use_vllm` in args, GRPOConfig: vLLM is a server here"):
        make(RLOptions, {"args": GRPOConfig(output_dir="x", use_vllm=True)})
    with pytest.raises(ConfigError, match="unknown key `args`"):
        make(RLOptions, {"args": "x"})
    assert make(RLOptions, {"args": SimpleNamespace(num_generations=3)}).samples == 3
    assert make(SFTOptions, {"args": TrainingArguments(per_device_train_batch_size=4)}).batch == 4


def test_peft_config():
    peft = pytest.importorskip("peft")
    found = make(RLOptions, {"peft_config": peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")})
    assert (found.policy.lora_rank, found.policy.lora_alpha) == (4, 8)
    with pytest.raises(
        ConfigError, match=r"`peft_config`: its `use_dora` has no counterpart: there are policy.lora_rank"
    ):
        make(RLOptions, {"peft_config": peft.LoraConfig(use_dora=True)})
    with pytest.raises(ConfigError, match=r"only a peft\.LoraConfig is understood"):
        make(RLOptions, {"peft_config": "lora"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("num_train_epochs", "`steps` takes its place and counts rounds, rows x epochs / `prompts` of them"),
        ("max_steps", "it counts optimiser steps, `steps` rounds"),
        ("save_steps", "it counts optimiser steps, `save.every` rounds: give `save.every`"),
        ("per_device_train_batch_size", "`prompts` (per round) and `batch` (kept answers per optimiser step)"),
    ],
)
def test_names_that_count_something_else_in_expert_iteration_are_refused_with_ours(name, said):
    with pytest.raises(ConfigError) as raised:
        make(ExpertIterationOptions, {name: 2})
    assert f"`{name}`: " in str(raised.value)
    assert said in str(raised.value)


def test_names_that_mean_the_same_in_expert_iteration_are_taken():
    names = {"num_generations": 3, "learning_rate": 1e-4, "max_completion_length": 7}
    found = make(ExpertIterationOptions, {**names, "temperature": 0.5, "max_steps": -1})
    assert (found.samples, found.optim.lr, found.sampling.max_new_tokens) == (3, 1e-4, 7)
    assert (found.sampling.temperature, found.steps, found.epochs) == (0.5, 5, 2)


def test_the_tables_are_in_order():
    known = {option.key for option in schema(RLOptions).options()} | {"eval.data", "epochs", "policy.lora_targets"}
    for table in (TRL, VERL):
        names = [entry.name for entry in table]
        assert len(names) == len(set(names))
        for entry in table:
            assert set(entry.keys) <= known, entry.name
    own = {option.key for option in schema(RLOptions).options()}
    assert {e.name for e in (*TRL, *VERL)} & own == {"seed", "reward_weights"}  # the same setting in both
    assert {"batch"} == {k for e in TRL_ROWS for k in e.keys} - known
    assert {"eval_dataset": ("eval.data",), "num_train_epochs": ("epochs",)}.items() <= {
        e.name: e.keys for e in TRL
    }.items()
    assert {"data.val_files": ("eval.data",), "trainer.total_epochs": ("epochs",)}.items() <= {
        e.name: e.keys for e in VERL
    }.items()
