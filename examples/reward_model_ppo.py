"""The RLHF pipeline: SFT, a reward model from preference pairs, PPO against it with a KL penalty in the reward."""

import json
import tempfile
from pathlib import Path

from steps import steps

import rolecall

if __name__ == "__main__":
    place = Path(tempfile.mkdtemp())
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1 + a % 3)}
        for a in range(10)
        for b in range(10)
    ]
    (place / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    start = rolecall.sft(
        model="tiny", rows="addition:digits=1", steps=steps(60), optim={"lr": 2e-3}, out=str(place / "sft")
    )
    judge = rolecall.rm(
        model=str(start.path),
        rows=str(place / "pairs.jsonl"),
        steps=steps(40),
        optim={"lr": 1e-3},
        out=str(place / "judge"),
    )
    print("pairs ranked right:", judge.metrics[-1]["accuracy"])
    run = rolecall.rl(
        preset="ppo",
        model=str(start.path),
        rows="addition:digits=1",
        reward=str(judge.path),
        steps=steps(20),
        prompts=32,
        sampling={"max_new_tokens": 4},
        algorithm={"kl_coef": 0.05},
        optim={"lr": 1e-4},
        out=str(place / "ppo"),
    )
    last = run.metrics[-1]
    print({name: round(last[name], 3) for name in ("reward", "kl", "critic/explained_variance")})
