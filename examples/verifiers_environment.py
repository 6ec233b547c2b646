"""An environment as the package verifiers has them, with its dataset and its rubric, and how to train on it.

    pip install 'rolecall[verifiers]'
    rolecall rl --env verifiers:examples/verifiers_environment.py:rows=100 --steps 50

An installed one is named by its id, `--env verifiers:wordle`. Nothing in it knows of rolecall.
"""

import verifiers as vf
from datasets import Dataset


class SecondTry(vf.MultiTurnEnv):
    """Says whether a sum is too small or too large, once."""

    async def env_response(self, messages, state, **kwargs):
        said, answer = str(messages[-1]["content"]).strip(), int(state["answer"])
        hint = "a number, please" if not said.isdigit() else "more" if int(said) < answer else "less"
        return [{"role": "user", "content": hint}]

    @vf.stop
    async def is_right(self, state):
        steps = state["trajectory"]
        return bool(steps) and str(steps[-1]["completion"][-1]["content"]).strip() == state["answer"]


def right(completion, answer):
    return float(str(completion[-1]["content"]).strip() == answer)


def tries(completion):
    return float(sum(message["role"] == "assistant" for message in completion))


def load_environment(rows=20):
    sums = [(i % 7, i // 7 % 7) for i in range(rows)]
    data = Dataset.from_list([{"question": f"{a}+{b}", "answer": str(a + b)} for a, b in sums])
    rubric = vf.Rubric(funcs=[right, tries], weights=[1.0, 0.0])
    return SecondTry(dataset=data, rubric=rubric, max_turns=2, system_prompt="Answer with the sum.")
