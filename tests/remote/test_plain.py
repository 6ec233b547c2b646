"""`rolecall eval` of a model behind OpenAI's API: the numbers are those of the model itself."""

from pathlib import Path

import pytest
from served import app_of, serving

import rolecall
from rolecall.config.preflight import check_paths
from rolecall.config.rl import RLOptions
from rolecall.config.use import EvalOptions
from rolecall.errors import UserError
from rolecall.remote.plain import PlainServer, TextAnswer
from rolecall.serving.app import App
from rolecall.serving.http import HttpError


class Busy(App):
    """Has too much to do, at first."""

    asked = 0

    async def _completions(self, request):
        self.asked += 1
        if self.asked in (1, 3):
            raise HttpError(429 if self.asked == 1 else 500, "come again")
        return await super()._completions(request)


@pytest.fixture(scope="module")
def url():
    with serving(app_of(kind=Busy)) as address:
        yield f"{address}/v1"


HOW = {"rows": "sorting", "n": 12, "sampling": {"max_new_tokens": 6}}


@pytest.mark.parametrize("chat", [{}, {"template": True, "chat": {"system_prompt": "Sort."}}])
def test_the_numbers_are_those_of_the_model(url, chat):
    here = rolecall.eval(model="tiny", **HOW, **chat)
    there = rolecall.eval(model=url, samples=3, **HOW, **chat)
    assert there.answers == here.answers
    assert there.scores == here.scores
    assert {name: there.numbers[name] for name in here.numbers} == here.numbers
    assert there.numbers["avg@3"] <= there.numbers["pass@3"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"served_model": "gpt"}, "has no model 'gpt', but tiny"),
        ({"env": "guessing"}, "env needs the model itself"),
        ({"engine": {"name": "hf"}}, "engine needs the model itself"),
        ({"rows": None}, "which rows should"),
    ],
)
def test_what_text_alone_does_not_give_is_refused(url, given, sentence):
    with pytest.raises(ValueError, match=sentence):
        rolecall.eval(model=url, **HOW | given)


def test_addresses_that_do_not_answer_are_named(url, monkeypatch):
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/v1: nothing answers there; give the address of an API"):
        rolecall.eval(model="http://127.0.0.1:9/v1", **HOW)
    with pytest.raises(UserError, match=r"it answers 404 .*: give the address of an API, such as http://host:8000/v1"):
        rolecall.eval(model=url.removesuffix("/v1"), **HOW)
    monkeypatch.setenv("ROLECALL_SERVER_KEY", "another")
    with pytest.raises(UserError, match="the environment variable ROLECALL_SERVER_KEY or OPENAI_API_KEY"):
        rolecall.eval(model=url, **HOW)


def test_an_address_is_no_model_to_train():
    with pytest.raises(UserError, match="only `rolecall eval` and `generate` take a model behind one"):
        check_paths(RLOptions(model="http://127.0.0.1:9/v1"))
    with pytest.raises(ValueError, match="served_model is one of an API"):
        EvalOptions(model="tiny", served_model="x")


def test_lessons_are_distilled_by_a_model_at_an_address(url, tmp_path, monkeypatch):
    """The tiny model has nothing to say, so what it was asked is what is looked at, and another's answer is put there."""
    answers, asked = PlainServer.answers, []

    def spied(self, prompts, sampling, **how):
        asked.extend(answers(self, prompts, sampling, **how))
        return [[TextAnswer(text=f"lesson {'abcd'[i]}", tokens=2, truncated=False)] for i in range(len(prompts))]

    monkeypatch.setattr(PlainServer, "answers", spied)
    env = Path(__file__).parents[1] / "jobs" / "letters_env.py"
    run = rolecall.rl(
        env=f"{env}:Letters", steps=1, prompts=2, samples=4, sampling={"max_new_tokens": 4}, agent={"workers": 1},
        lessons={"share": 0.5, "by": url, "max_tokens": 24}, out=str(tmp_path / "run"), quiet=True,
    )  # fmt: skip
    assert [len(texts) for texts in asked] == [1] * 4
    assert run.metrics[0]["lessons/new"] == 4
    with pytest.raises(UserError, match="has no model 'gpt', but tiny"):
        rolecall.rl(
            env="guessing", steps=1, lessons={"share": 0.5, "by": url, "served_model": "gpt"}, out=str(tmp_path / "x")
        )
