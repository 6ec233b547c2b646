"""A whole RL step, ours against TRL's: the same model, prompts, answers' lengths, threads and allocator, in turns.

    python benchmarks/step.py [--repeats 3] [--only NAME]

TRL runs at its best: of its settings that matter on a CPU (gradient checkpointing, size of the micro-batches) a trial
picks the fastest. Ours samples and computes in bf16 with fp32 master weights wherever TRL's bf16 autocast is on; with one
optimiser step per rollout the trainer's own log-probs are the old ones, so nothing of the sampler's rounding enters the
ratio. Steps include everything: sampling, rewards, the update, new weights for the sampler, records on disk.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench_models
import peers
from turns import Side

OUT = bench_models.PLACE / "steps"


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step that both sides do."""

    title: str
    model: str
    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    must: float
    aim: float
    memory: float = 1.0
    """The share of the peer's peak memory that ours must not exceed."""
    lengths: tuple[int, int] | None = None
    """The shortest and longest answer; all run to `new_tokens` if not given."""
    token_budget: int = 8192
    """Tokens of our micro-batches, padding included."""
    trials: tuple[dict[str, Any], ...] = ()
    """TRL's settings that are tried."""


BF16 = {"policy": {"mixed_precision": "bf16"}, "engine": {"dtype": "bfloat16"}}
LARGE_TRIALS = ({"bf16": True, "checkpointing": True, "batch": 32}, {"bf16": True, "checkpointing": False, "batch": 8})
SMALL_TRIALS = (
    {"bf16": True, "checkpointing": False},
    {"bf16": True, "checkpointing": True},
    {"bf16": False, "checkpointing": False},
)
SMOLLM2 = Work(
    title="GRPO, SmolLM2-135M, 4 x 8 x 64 tokens",
    model="smollm2",
    prompts=4,
    samples=8,
    prompt_tokens=28,
    new_tokens=64,
    must=2,
    aim=3,
    memory=0.8,
    token_budget=1500,  # half the rows at a time, as TRL is fastest with a quarter of them
    trials=LARGE_TRIALS,
)
SMALL = Work(
    title="GRPO, 4 layers x 256, 8 x 8 x 128 tokens",
    model="small",
    prompts=8,
    samples=8,
    prompt_tokens=32,
    new_tokens=128,
    must=2,
    aim=3.5,
    trials=tuple({**trial, "batch": 64} for trial in SMALL_TRIALS),
)
WORKS = {
    "smollm2": SMOLLM2,
    "long-prompts": replace(
        SMOLLM2,
        title="GRPO, SmolLM2-135M, 4 x 8, prompts of 200, answers of 8 to 32 tokens",
        prompt_tokens=200,
        new_tokens=32,
        lengths=(8, 32),
        must=4,
        aim=8,
        memory=1.0,
        token_budget=8192,
    ),
    "small": SMALL,
    "ppo": replace(
        SMALL,
        title="PPO, 4 layers x 256, 32 x 64 tokens, 4 epochs, critic, reference and reward model of the same size",
        prompts=32,
        samples=1,
        new_tokens=64,
        must=2.5,
        aim=4,
        trials=SMALL_TRIALS,
    ),
}
EPOCHS = 4


def model_of(work: Work) -> str:
    """The directory of the work's model."""
    return bench_models.smollm2() if work.model == "smollm2" else bench_models.small()


def rows_of(work: Work) -> list[str]:
    """More prompts than one step takes, so that steps differ."""
    return bench_models.prompts(model_of(work), 4 * work.prompts, work.prompt_tokens)


def start_ours(name: str, work: Work) -> Side:
    """Our side."""
    settings: dict[str, Any] = {
        "model": model_of(work),
        "rows": [{"prompt": text} for text in rows_of(work)],
        "prompts": work.prompts,
        "samples": work.samples,
        "sampling": {"max_new_tokens": work.new_tokens},
        "optim": {"lr": 1e-6, "token_budget": work.token_budget},
        "lengths": work.lengths,
        "out": str(OUT / f"{name}-ours"),
        **BF16,
    }
    if name == "ppo":
        settings |= {
            "preset": "ppo",
            "reward": str(judge(work)),
            "algorithm": {"critic": "separate", "epochs": EPOCHS, "minibatches": 1, "kl_coef": 0.05, "kl_in": "reward"},
        }
    return Side("rolecall", sys.executable, "step_ours.py", settings)


def judge(work: Work) -> Path:
    """A reward model of the policy's size, made once."""
    import rolecall

    place = bench_models.PLACE / "models" / "judge"
    if not (place / "run.json").is_file():
        texts = rows_of(work)
        pairs = [{"prompt": a, "chosen": b, "rejected": a} for a, b in pairwise(texts)]
        rolecall.rm(model=model_of(work), rows=pairs, steps=1, batch=2, out=str(place), overwrite=True, quiet=True)
    return place


def start_theirs(name: str, work: Work, trial: dict[str, Any]) -> Side:
    """TRL's side."""
    common = {"model": model_of(work), "rows": rows_of(work), "out": str(OUT / f"{name}-trl")}
    common |= {"max_new_tokens": work.new_tokens, **trial}
    if name == "ppo":
        answers = {"answers": work.prompts * work.samples, "epochs": EPOCHS}
        return Side("TRL 1.12", peers.python(peers.TRL_PPO), "step_trl_ppo.py", common | answers)
    more = {"prompts": work.prompts, "samples": work.samples, "lengths": work.lengths}
    return Side("TRL 1.16", peers.python(peers.TRL), "step_trl.py", common | more)


def compare(name: str, repeats: int) -> dict[str, Any]:
    """Turns of both, after one step each that is not counted."""
    work = WORKS[name]
    tried = {}
    for i, trial in enumerate(work.trials if len(work.trials) > 1 else ()):
        side = start_theirs(name, work, trial)
        side.work()
        tried[i] = side.work()["seconds"]
        side.close()
        print(f"  TRL with {trial}: {tried[i]:.2f} s", flush=True)
    best = work.trials[min(tried, key=tried.__getitem__) if tried else 0]
    ours, theirs = start_ours(name, work), start_theirs(name, work, best)
    pairs = []
    for turn in range(repeats + 1):
        pair = ours.work(), theirs.work()
        print(f"  ours {pair[0]['seconds']:.2f} s, TRL {pair[1]['seconds']:.2f} s", flush=True)
        pairs += [pair] if turn else []
    ours.close()
    theirs.close()
    ratios = sorted(b["seconds"] / a["seconds"] for a, b in pairs)
    last = pairs[-1][0]["phases"]
    return {
        "title": work.title,
        "peer": theirs.name,
        "peer_settings": best,
        "tried": {json.dumps(work.trials[i]): seconds for i, seconds in tried.items()},
        "ours": statistics.median(a["seconds"] for a, _ in pairs),
        "theirs": statistics.median(b["seconds"] for _, b in pairs),
        "ratio": statistics.median(ratios),
        "range": (ratios[0], ratios[-1]),
        "ours_gb": max(a["peak_gb"] for a, _ in pairs),
        "theirs_gb": max(b["peak_gb"] for _, b in pairs),
        "start": (ours.start_seconds, theirs.start_seconds),
        "phases": {key: value for key, value in last.items() if key != "step"},
        "must": work.must,
        "aim": work.aim,
        "memory": work.memory,
        "repeats": repeats,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Print a row per comparison; write them all to runs/bench/step.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", action="append", choices=list(WORKS), default=[])
    given = parser.parse_args()
    table = bench_models.PLACE / "step.json"
    found = json.loads(table.read_text()) if table.is_file() else {}
    for name in given.only or WORKS:
        print(WORKS[name].title, flush=True)
        found[name] = compare(name, given.repeats)
        table.write_text(json.dumps(found, indent=1))
        row = found[name]
        print(
            f"| {row['title']} | {row['ours']:.2f} s, {row['ours_gb']:.1f} GB | {row['theirs']:.2f} s, "
            f"{row['theirs_gb']:.1f} GB | {row['ratio']:.2f} ({row['range'][0]:.2f}-{row['range'][1]:.2f}) "
            f"| {row['must']} | {row['aim']} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
