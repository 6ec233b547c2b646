"""Your own reward: a function of the answers and of any column of your rows."""

import tempfile

from steps import steps

import rolecall

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def my_reward(completions, answer, **kwargs):
    """1 for the right answer, else up to 0.1 for digits: answers that all score 0 say nothing about which is better."""
    digits = [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]
    return [
        1.0 if text.strip() == right else 0.1 * share
        for text, right, share in zip(completions, answer, digits, strict=True)
    ]


if __name__ == "__main__":
    run = rolecall.rl(
        model="tiny",
        rows=rows,
        reward=my_reward,
        preset="grpo",
        steps=steps(50),
        prompts=8,
        sampling={"max_new_tokens": 4},
        optim={"lr": 3e-4},
        out=f"{tempfile.mkdtemp()}/own-reward",
    )
    print("reward by step:", [round(line["reward"], 3) for line in run.metrics])
    print("the model:", run.model)
