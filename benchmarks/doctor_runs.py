"""The runs of benchmarks/doctor.py: faults, what treats each of them, and healthy controls."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import doctor_planted as planted

HERE = Path(__file__).parent
STARTS = {
    "sorting": {"rows": "sorting:length=3", "steps": 70},
    "guessing": {"rows": "guessing", "steps": 60},
    "kuhn": {"rows": "kuhn", "steps": 80},
    "calculator": {"rows": "calculator:digits=1", "steps": 300},
}
"""Short imitation, so that runs begin with a model that gets some answers right."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run: its command, its settings, and for a fault the one setting that treats it."""

    job: str = "rl"
    start: str | None = "sorting"
    settings: dict[str, Any] = field(default_factory=dict)
    treated: dict[str, Any] = field(default_factory=dict)
    """Left out: what the doctor itself says to try first."""
    shows: tuple[str, ...] = ()
    """Numbers that say what the treatment did."""
    planted: Any = nullcontext


BASE: dict[str, Any] = {
    "rows": "sorting:length=3",
    "prompts": 8,
    "samples": 4,
    "steps": 16,
    "sampling.max_new_tokens": 8,
    "optim.lr": 1e-4,
    "save.rollouts": 20,
}
AGENT: dict[str, Any] = {
    "prompts": 8,
    "samples": 4,
    "steps": 14,
    "sampling.max_new_tokens": 4,
    "optim.lr": 1e-4,
    "algorithm.aggregate": "token-mean",
}
GAME: dict[str, Any] = {"steps": 24, "episodes": 16, "record.every": 4, "eval.every": 12, "q.epsilon_steps": 4000}
IMITATION: dict[str, Any] = {"rows": "sorting:length=3", "steps": 40}
LEARNS: dict[str, Any] = BASE | {"prompts": 16, "samples": 8, "steps": 40, "optim.lr": 3e-4}
"""Long and quick enough to get much better at the task, so that numbers move for good reasons."""
BOARD: dict[str, Any] = GAME | {"env": "lbf:5x5-2p-2f", "limit": 25}


def reward(*names: str) -> list[str]:
    """Planted rewards by name; `task` is the task's own."""
    return [name if name == "task" else f"{HERE / 'doctor_planted.py'}:{name}" for name in names]


def _rl(*shows: str, treated: dict[str, Any] | None = None, **settings: Any) -> Plan:
    kept = {name.replace("__", "."): value for name, value in settings.items()}
    where = kept.pop("planted", nullcontext)
    base = BASE if "env" not in kept else AGENT
    start = kept["env"].partition(":")[0] if "env" in kept else "sorting"
    return Plan(start=start, settings=base | kept, treated=treated or {}, shows=shows, planted=where)


def _marl(*shows: str, **settings: Any) -> Plan:
    kept = {name.replace("__", "."): value for name, value in settings.items()}
    where = kept.pop("planted", nullcontext)
    return Plan(job="marl", start=None, settings=BOARD | kept, shows=shows, planted=where)


OLD = {"replay.share": 0.6, "replay.max_staleness": 50, "replay.max_uses": 50, "replay.sampler": "random"}
HELD_OUT = {"eval.every": 4, "eval.rows": 32}
LONG = {"optim__lr": 1e-3, "sampling__max_new_tokens": 24, "steps": 20}
PPO = {"preset": "ppo", "prompts": 32, "samples": 1}
FAULTS: dict[str, Plan] = {
    "entropy-collapse": _rl("entropy", reward=reward("coin"), algorithm__entropy_coef=-1.0, optim__lr=2e-3, steps=24),
    "entropy-explosion": _rl("entropy", algorithm__entropy_coef=0.5, optim__lr=1e-3),
    "entropy-explosion+ppo": _rl(**PPO, algorithm__entropy_coef=0.5, optim__lr=1e-3),
    "kl-blow-up": _rl("kl", reward=reward("letter"), algorithm__kl_coef=1e-4, optim__lr=1e-3),
    "length-hacking": _rl("completions/mean_length", reward=reward("length"), **LONG),
    "length-hacking+rloo": _rl(preset="rloo", reward=reward("length"), **LONG),
    "repetition": _rl(
        "completions/mean_length", reward=reward("letter"), optim__lr=1e-3, sampling__max_new_tokens=20, steps=20
    ),
    "reward-saturated": _rl(
        "frac_reward_zero_std", treated={"reward": ["task"]}, reward=reward("easy"), algorithm__entropy_coef=0.01
    ),
    "over-optimised": _rl(
        "eval_reward", "eval_train_reward", reward=reward("letter"), **HELD_OUT, eval__reward=["task"], optim__lr=5e-4
    ),
    "flat-groups": _rl("frac_reward_zero_std", reward=reward("rare")),
    "flat-groups+rloo": _rl(preset="rloo", reward=reward("rare")),
    "phantom-advantages": _rl("policy/advantage_abs", reward=reward("noise")),
    "useless-critic": _rl(
        "critic/explained_variance", **PPO, algorithm__critic="separate", optim__critic_lr=0.0, steps=20
    ),
    "mismatch": _rl(
        "sampling/sampling_logp_difference/mean", engine__dtype="bfloat16", planted=planted.drifting_engine
    ),
    "degenerate-weights": _rl("replay/ess", **OLD, optim__lr=2e-3),
    "lost-stop": _rl("completions/clipped_ratio", reward=reward("length"), optim__lr=1e-3),
    "truncation-wall": _rl("completions/clipped_ratio", sampling__max_new_tokens=3),
    "stale-replay": _rl("replay/age", "replay/ess", **OLD, optim__lr=1e-3, steps=24),
    "dominating-part": _rl("rewards/task/mean", reward=reward("task", "many"), optim__lr=3e-4),
    "rounded-away": _rl("rounded_away", policy__dtype="bfloat16", optim__lr=1e-6),
    "lr-too-small": _rl("kl", optim__lr=1e-9, algorithm__kl_coef=0.01, algorithm__epochs=2),
    "lr-too-small+plain": _rl(optim__lr=1e-9),
    "lr-too-small+sft": Plan(job="sft", start=None, settings=IMITATION | {"optim.lr": 1e-9}),
    "lr-too-large": _rl("reward", optim__lr=5e-3, algorithm__epochs=2),
    "lr-too-large+plain": _rl(optim__lr=5e-3),
    "lr-too-large+sft": Plan(job="sft", start=None, settings=IMITATION | {"optim.lr": 3.0}),
    "evaluation-falls": _rl(
        "eval_reward",
        "reward",
        rows="mislabelled",
        eval__data="labelled",
        reward=reward("matches"),
        **HELD_OUT,
        optim__lr=5e-4,
    ),
    "no-tool-calls": _rl(
        "agents/tool_calls",
        env="calculator:digits=1",
        reward=reward("no_calls"),
        optim__lr=1e-3,
        samples=8,
        steps=20,
        sampling__max_new_tokens=16,
    ),
    "illegal-actions": _rl("agents/not_numbers", env="guessing", algorithm__entropy_coef=0.5, optim__lr=1e-3),
    "turn-limit": _rl("agents/finish/max_turns", env="guessing", agent__max_turns=2),
    "epsilon-stuck": _marl("epsilon", "eval_return", algo="iql", q__epsilon_steps=10_000_000),
    "stale-target": _marl("q/target", "eval_return", algo="vdn", q__tau=None, q__target_every=100_000),
    "idle-agent": _marl("return", algo="ippo", rewards="individual", steps=80, planted=planted.costly_moves),
}
"""By the name of the check that must find it; after a plus, another kind of run with the same fault."""

_RL = {
    name: Plan(settings=BASE | {"preset": name} | more)
    for name, more in {
        "grpo": {},
        "dr-grpo": {},
        "dapo": {},
        "gspo": {},
        "cispo": {},
        "rloo": {},
        "opo": {},
        "remax": {"prompts": 24, "samples": 1},
        "reinforce": {},
        "reinforce++": {"prompts": 24, "samples": 1},
        "reinforce++-baseline": {},
        "ppo": {"prompts": 48, "samples": 1, "steps": 30, "algorithm.critic": "separate", "optim.critic_lr": 1e-3},
        "alpacafarm-ppo": {
            "prompts": 32,
            "samples": 1,
            "steps": 20,
            "optim.critic_lr": 1e-3,
            "sampling.max_new_tokens": 8,
        },
    }.items()
}
CONTROLS: dict[str, Plan] = _RL | {
    **{f"learns-{name}": Plan(settings=LEARNS | {"preset": name}) for name in ("grpo", "rloo", "dapo", "reinforce")},
    "learns-kl": Plan(settings=LEARNS | {"algorithm.kl_coef": 0.02, **HELD_OUT, "eval.every": 10}),
    "learns-replay": Plan(settings=LEARNS | {"replay.share": 0.3}),
    "learns-guessing": Plan(
        start="guessing", settings=AGENT | {"env": "guessing", "samples": 8, "steps": 24, "optim.lr": 5e-4}
    ),
    "learns-calculator": Plan(
        start="calculator",
        settings=AGENT
        | {"env": "calculator:digits=1", "samples": 8, "sampling.max_new_tokens": 16, "steps": 40, "optim.lr": 5e-4},
    ),
    "learns-ippo": Plan(job="marl", start=None, settings=BOARD | {"algo": "ippo", "steps": 150, "record.every": 30}),
    "learns-vdn": Plan(job="marl", start=None, settings=BOARD | {"algo": "vdn", "steps": 120, "record.every": 30}),
    "grpo-kl": Plan(settings=BASE | {"algorithm.kl_coef": 0.05, "algorithm.epochs": 2}),
    "grpo-entropy": Plan(settings=BASE | {"algorithm.entropy_coef": 0.01, **HELD_OUT}),
    "grpo-evaluated": Plan(settings=BASE | {**HELD_OUT, "optim.lr": 2e-4}),
    "grpo-two-parts": Plan(settings=BASE | {"reward": reward("task", "letter"), "reward_weights": [1.0, 4.0]}),
    "grpo-bf16-engine": Plan(settings=BASE | {"engine.dtype": "bfloat16"}),
    "grpo-mixed-precision": Plan(settings=BASE | {"policy.mixed_precision": "bf16"}),
    "grpo-bf16": Plan(settings=BASE | {"policy.dtype": "bfloat16", "optim.lr": 5e-4}),
    "grpo-lora": Plan(settings=BASE | {"policy.lora_rank": 4, "optim.lr": 1e-3}),
    "grpo-matches": Plan(settings=BASE | {"reward": reward("matches")}),
    "replay": Plan(settings=BASE | {"replay.share": 0.5}),
    "replay-shaped": Plan(settings=BASE | {"replay.share": 0.3, "replay.mode": "shaped"}),
    "replay-flat": Plan(settings=BASE | {"replay.replace_flat": True}),
    "guessing": Plan(start="guessing", settings=AGENT | {"env": "guessing", "samples": 8}),
    "kuhn": Plan(
        start="kuhn", settings=AGENT | {"env": "kuhn", "sampling.max_new_tokens": 6, "algorithm.scale": "none"}
    ),
    "calculator": Plan(
        start="calculator", settings=AGENT | {"env": "calculator:digits=1", "sampling.max_new_tokens": 16}
    ),
    "iql": Plan(job="marl", start=None, settings=BOARD | {"algo": "iql"}),
    "vdn": Plan(job="marl", start=None, settings=BOARD | {"algo": "vdn"}),
    "qmix": Plan(job="marl", start=None, settings=BOARD | {"algo": "qmix"}),
    "ippo": Plan(job="marl", start=None, settings=BOARD | {"algo": "ippo"}),
    "mappo": Plan(job="marl", start=None, settings=BOARD | {"algo": "mappo"}),
    "climbing": Plan(job="marl", start=None, settings=GAME | {"env": "climbing", "algo": "iql"}),
    "sft": Plan(
        job="sft", start=None, settings={"rows": "sorting:length=3", "steps": 60, "optim.lr": 2e-3, "eval.every": 20}
    ),
    "dpo": Plan(job="dpo", settings={"rows": "sorting:length=3", "steps": 30, "optim.lr": 1e-4}),
    "rm": Plan(job="rm", settings={"rows": "sorting:length=3", "steps": 30, "optim.lr": 5e-4}),
    "expert-iteration": Plan(
        job="expert_iteration",
        settings={
            "rows": "sorting:length=3",
            "steps": 4,
            "prompts": 24,
            "sampling.max_new_tokens": 8,
            "optim.lr": 1e-4,
        },
    ),
    "best-of-n": Plan(
        job="best_of_n", settings={"rows": "sorting:length=3", "count": 64, "n": 4, "sampling.max_new_tokens": 8}
    ),
}
"""Runs in which nothing is wrong."""
FAULT_SEEDS, CONTROL_SEEDS = (0, 11, 13, 15, 2, 1), (0, 11, 13, 1)
"""Thresholds were set on the even seeds. Of the odd ones, those above 10 were first looked at for the page as it is now."""
FIRST_UNSEEN = 11
TREATED_SEED = 13
"""One of the unseen seeds, at which every fault is found, so that there is a setting to try."""
