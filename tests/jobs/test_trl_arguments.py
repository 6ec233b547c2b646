"""The Python functions take what TRL's trainers take, under their names."""

import json
from pathlib import Path

import pytest

import rolecall
from rolecall.agents.adapters import ToolsEnv
from rolecall.config.given import resolve_source
from rolecall.config.rl import RLOptions
from rolecall.errors import UserError
from rolecall.jobs.arguments import options_of, settings_of

ROWS = [{"prompt": [{"role": "user", "content": f"{a}+1="}], "solution": str(a + 1)} for a in range(4)]
SMALL = {"model": "tiny", "quiet": True, "train_dataset": ROWS, "num_generations": 2, "max_completion_length": 4}
ONE = {"agent.workers": 1}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def accuracy(prompts, completions, solution, **kwargs):
    return [
        float(c[-1]["content"].strip() == s) + sum(c[-1]["content"].encode()) % 7
        for c, s in zip(completions, solution, strict=True)
    ]


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their sum.
    """
    return a + b


def spoken(completions, **kwargs):
    """A reward over the whole conversation, which sees who said what."""
    assert all(c[0]["role"] == "assistant" and {m["role"] for m in c} <= {"assistant", "tool"} for c in completions)
    return [1.0 + sum(sum(m["content"].encode()) for m in c) % 7 for c in completions]


def test_a_trainers_arguments_train():
    run = rolecall.rl(
        **SMALL,
        reward_funcs=[accuracy, lambda completions, **kwargs: [0.0 for _ in completions]],
        reward_weights=[1.0, 0.5],
        per_device_train_batch_size=4,
        max_steps=1,
        output_dir="out",
    )
    assert run.path.name == "out"
    config = json.loads((run.path / "config.json").read_text())
    assert (config["prompts"], config["samples"], config["steps"]) == (2, 2, 1)
    assert config["sampling"]["max_new_tokens"] == 4
    assert {"rewards/accuracy/mean", "rewards/lambda/mean"} <= set(run.metrics[-1])


@pytest.mark.filterwarnings("ignore:the rows or the environment bring tools")  # tiny's template shows none
def test_tools_are_an_environment():
    run = rolecall.rl(**SMALL, tools=[add], reward_funcs=spoken, max_steps=1, prompts=2, **ONE)
    config = json.loads((run.path / "config.json").read_text())
    assert config["env"] == "(given in Python) tools add"
    assert run.metrics[-1]["agents/turns"] >= 1
    assert run.metrics[-1]["rewards/failed"] == 0
    assert rolecall.eval(model=str(run.path), rows=ROWS, tools=[add], reward=spoken, n=2, **ONE).numbers["reward"] > 0


def test_the_policy_calls_tools_until_it_answers():
    env = ToolsEnv({"add": add})
    assert env.reset(ROWS[0], 0) == ROWS[0]["prompt"]
    assert env.tools[0]["function"]["name"] == "add"
    called = env.step(
        {"role": "assistant", "content": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'}
    )
    assert (called.messages, called.done) == ([{"role": "tool", "name": "add", "content": "3"}], False)
    assert called.counts == {"tool_calls": 1.0, "tool_failures": 0.0}
    ended = env.step({"role": "assistant", "content": "3"})
    assert (ended.done, ended.reward) == (True, None)


class Counter:
    """An environment of TRL's kind."""

    def reset(self, **row) -> str | None:
        self.told = 0

    def tell(self, number: int) -> str:
        """
        Tell a number.

        Args:
            number: The number.

        Returns:
            A word.
        """
        self.told = number
        return "good"

    def get_reward(self) -> float:
        return 1.0 + self.told


@pytest.mark.filterwarnings("ignore:the rows or the environment bring tools")  # tiny's template shows none
def test_an_environment_factory_is_an_environment():
    run = rolecall.rl(**SMALL, environment_factory=Counter, max_steps=1, prompts=2, entropy_coef=0.01, **ONE)
    assert run.metrics[-1]["rewards/env/mean"] >= 1


class Silent(Counter):
    def get_reward(self) -> float:
        return 0.0


@pytest.mark.filterwarnings("ignore:the rows or the environment bring tools")
def test_a_dictionary_of_environments_is_chosen_from_by_the_rows():
    rows = [{**row, "environment": name} for row, name in zip(ROWS, ["loud", "silent"] * 2, strict=True)]
    given = {**SMALL, "train_dataset": rows, "environment_factory": {"loud": Counter, "silent": Silent}}
    run = rolecall.rl(**given, max_steps=1, prompts=4, entropy_coef=0.01, **ONE)
    assert run.metrics[-1]["rewards/env/mean"] == 0.5
    assert json.loads((run.path / "config.json").read_text())["env"] == "(given in Python) environments loud, silent"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rows": "addition"}, "`train_dataset` is `rows` under another name; keep one"),
        ({"reward": "exact", "reward_funcs": accuracy}, "`reward_funcs` is `reward` under another name; keep one"),
        ({"tools": [add]}, "`tools` say nothing of what an episode is worth: give a `reward` function, too"),
        ({"tools": ["add"], "reward": spoken}, r"tools are functions, as in tools=\[add\], got 'add'"),
        ({"environment_factory": {"a": "b.py"}}, "several environments are classes by name, .* 'a' is none"),
        ({"environment_factory": {"a": Counter}, "train_dataset": None}, "several environments need rows whose"),
        ({"environment_factory": {"a": Counter}}, "a row's `environment` is None, and there are a: name one"),
        ({"samples": 4, "reward": accuracy}, "`num_generations` sets `samples`, and so does `samples`"),
        ({"reward": accuracy, "num_generaton": 4}, "unknown key `num_generaton`: did you mean"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(given, sentence):
    with pytest.raises(UserError, match=sentence):
        rolecall.rl(**{**SMALL, **given})


def test_sft_takes_them_too():
    rows = [{"prompt": "1+1=", "completion": "2"}] * 4
    run = rolecall.sft(model="tiny", train_dataset=rows, per_device_train_batch_size=2, max_steps=1, quiet=True)
    assert json.loads((run.path / "config.json").read_text())["batch"] == 2


def test_objects_travel_in_the_settings_under_what_config_json_says_of_them():
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    given = settings_of({"rows": rows, "eval_data": Path("eval.jsonl"), "reward": [accuracy, "exact"], "env": None})
    assert given == {
        "rows": "(given in Python) 2 rows",
        "eval.data": "eval.jsonl",
        "reward": ("(given in Python) accuracy", "exact"),
    }
    found = options_of(RLOptions, {"rows": rows, "reward": accuracy})
    assert resolve_source(found.rows, "rows") is rows
    assert [resolve_source(one, "reward") for one in found.reward] == [accuracy]
    with pytest.raises(UserError, match="this run's rows came from Python: resume it from Python too"):
        resolve_source(str(found.rows), "rows")
