"""Your own agent, as it is: a function that calls OpenAI's API, here with the `openai` package."""

import tempfile

import openai
from steps import steps

import rolecall


def run(base_url, key, row):
    """Asks for a word, and asks again for another one."""
    client = openai.OpenAI(base_url=base_url, api_key=key)
    messages = [{"role": "user", "content": f"a word with {row['letter']}"}]
    right = 0
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        right += row["letter"] in answer.content
        messages += [answer, {"role": "user", "content": "another"}]
    return {"reward": right / 2, "messages": len(messages)}


if __name__ == "__main__":
    trained = rolecall.rl(
        model="tiny",
        agent=run,
        rows=[{"letter": letter} for letter in "aeio"],
        preset="grpo",
        steps=steps(20),
        prompts=4,
        samples=8,
        sampling={"max_new_tokens": 8},
        optim={"lr": 3e-4},
        out=f"{tempfile.mkdtemp()}/agent",
    )
    for line in trained.metrics:
        print(f"step {line['step']}: reward {line['reward']:.3f}, turns {line['agents/turns']:.1f}")
