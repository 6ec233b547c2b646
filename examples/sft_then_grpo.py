"""Imitate first, then improve: SFT on demonstrations, GRPO with the task's exact verifier, both evaluated."""

import tempfile

from steps import steps

import rolecall

TASK = "sorting:length=3"

if __name__ == "__main__":
    place = tempfile.mkdtemp()
    start = rolecall.sft(
        model="tiny",
        rows=TASK,
        steps=steps(60),
        batch=32,
        optim={"lr": 2e-3},
        out=f"{place}/sft",
    )
    run = rolecall.rl(
        model=str(start.path),
        rows=TASK,
        preset="grpo",
        steps=steps(40),
        sampling={"max_new_tokens": 6},
        algorithm={"entropy_coef": 1e-3},  # answers that stay different can be compared
        optim={"lr": 2e-4},
        eval={"every": 20, "rows": 64},
        out=f"{place}/grpo",
    )
    for line in run.evaluations:
        print(f"step {line['step']}: {line['eval_accuracy']:.1%} of held-out problems right")
