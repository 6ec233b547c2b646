"""A reward function written for TRL, unchanged: lists in, a list out, columns by name, its own metric."""

import tempfile

from steps import steps

import rolecall


def format_and_answer(prompts, completions, completion_ids, solution, log_metric=None, **kwargs):
    rewards = []
    for completion, right in zip(completions, solution, strict=True):
        text = completion[-1]["content"]  # prompts are conversations, so completions are messages too
        digits = sum(map(str.isdigit, text))
        rewards.append(1.0 if right in text else None if not text else 0.1 * digits / len(text))  # None: does not apply
    if log_metric:
        log_metric("answers/characters", sum(len(c[-1]["content"]) for c in completions) / len(completions))
    return rewards


rows = [{"prompt": [{"role": "user", "content": f"What is {n} plus one?"}], "solution": str(n + 1)} for n in range(32)]

if __name__ == "__main__":
    run = rolecall.rl(
        model="tiny",
        rows=rows,
        reward=format_and_answer,
        steps=steps(20),
        prompts=4,
        samples=4,
        sampling={"max_new_tokens": 8},
        out=f"{tempfile.mkdtemp()}/trl",
    )
    last = run.metrics[-1]
    print({name: last[name] for name in ("reward", "rewards/format_and_answer/mean", "answers/characters")})
