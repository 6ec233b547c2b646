"""Prompts as conversations: messages go through the model's chat template, answers come back as messages."""

import tempfile

from steps import steps

import rolecall

rows = [
    {"prompt": [{"role": "system", "content": "Answer with one digit."}, {"role": "user", "content": f"{n}?"}], "n": n}
    for n in range(10)
]


def repeats_the_digit(completion, n):
    text = completion[-1]["content"].strip()
    return 1.0 if text == str(n) else 0.1 * any(map(str.isdigit, text))


if __name__ == "__main__":
    run = rolecall.rl(
        model="tiny",
        rows=rows,
        reward=repeats_the_digit,
        steps=steps(20),
        prompts=4,
        samples=4,
        sampling={"max_new_tokens": 3},
        out=f"{tempfile.mkdtemp()}/chat",
    )
    answer = rolecall.generate(model=str(run.model), prompts=[rows[0]["prompt"]], sampling={"max_new_tokens": 3})[0]
    print(repr(answer.text), answer.finish)
