"""A served model as the reward: what it reads, what is read from its reply, and what a server that fails or is slow costs."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from served import KEY, app_of, serving

import rolecall
from rolecall.errors import UserError
from rolecall.remote.judge import Judge, JudgeSource
from rolecall.rewards import Sample, Scored
from rolecall.rewards.joined import joined
from rolecall.rewards.scoring import scorer
from rolecall.serving.app import App
from rolecall.serving.http import HttpError


class Verdicts(App):
    """Gives a judge's reply by what it reads: the number of vowels in the answer that stands in brackets."""

    delay, fails, asked, most = 0.0, (), 0, 0
    growing = 0

    async def _chat(self, request):
        text = json.loads(request.body)["messages"][-1]["content"]
        self.asked, self.growing = self.asked + 1, self.growing + 1
        self.most = max(self.most, self.growing)
        try:
            await asyncio.sleep(self.delay)
        finally:
            self.growing -= 1
        if self.asked in self.fails:
            raise HttpError(500, "come again")
        inside = text.partition("[")[2].rpartition("]")[0]
        reply = "I cannot say." if "?" in inside else f"3 reasons. Score: {sum(c in 'aeiou' for c in inside)}/10"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}
        return {"choices": [choice], "usage": {"completion_tokens": 3}}


@pytest.fixture(scope="module")
def app():
    return app_of(kind=Verdicts)


@pytest.fixture(scope="module")
def url(app):
    with serving(app) as address:
        yield f"{address}/v1"


@pytest.fixture
def source(app, url, tmp_path):
    app.delay, app.fails, app.asked, app.most = 0.0, (), 0, 0
    (tmp_path / "judge.txt").write_text("{prompt} should be like {answer}, {x}: [{completion}] {}")
    return f"judge:{url}?prompt={tmp_path / 'judge.txt'}&score=Score: (\\d+)"


def sample(text, **row):
    return Sample(prompt="q", completion=text, row=row)


def opened(source, **how):
    return Judge(source, **{"seconds": 30.0} | how)


def test_what_the_judge_reads_and_what_is_read_from_its_reply(source):
    judge = opened(source, weight=0.5)
    messages = [{"role": "assistant", "content": "{answer} aa"}]
    asked = judge.asks(Sample(prompt=[{"role": "user", "content": "why"}], completion=messages, row={"answer": "gold"}))
    assert asked == "why should be like gold, {x}: [{answer} aa] {}"
    long = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert "user: a\nassistant: b should" in judge.asks(Sample(prompt=long, completion="c"))
    right, none = judge.score([sample("aei"), sample("?")])
    assert (right.scores, right.total) == ({"judge": 3.0}, 1.5)
    assert right.extras == {"judge/reply": "3 reasons. Score: 3/10"}
    assert none.total is None
    assert "reward `judge` failed on prompt 0 sample 0: no score can be read from its reply" in none.failure
    assert judge.take_metrics() == {"rewards/judge/failed": 1.0}
    judge.close()


def test_without_a_pattern_the_last_number_counts(url):
    judge = opened(f"judge:{url}")
    assert [s.total for s in judge.score([sample("[aa]")])] == [10.0]
    judge.close()


def test_a_slow_judge_is_asked_for_all_answers_at_once(app, source):
    app.delay = 0.3
    judge, begun = opened(source), time.monotonic()
    assert all(s.total == 1.0 for s in judge.score([sample("a")] * 48))
    assert app.most > 24
    assert time.monotonic() - begun < 48 * 0.3 / 2
    judge.close()


class Length:
    """Takes all answers together."""

    names = ("length",)

    def score(self, samples, *, state=None):
        return [Scored(scores={"length": float(len(s.completion))}, total=float(len(samples))) for s in samples]

    def take_metrics(self):
        return {}


def test_it_is_asked_about_answers_as_they_come_beside_a_reward_that_is_not(app, source):
    judge = opened(source)
    with scorer(joined([judge, Length()]), {}) as scoring:
        scoring.add({1: sample("ae")})
        until = time.monotonic() + 30
        while not app.asked and time.monotonic() < until:
            scoring.poll()
            time.sleep(0.01)
        assert app.asked == 1
        scoring.add({0: sample("abc")})
        found = scoring.finish()
    assert [s.scores for s in found] == [{"judge": 1.0, "length": 3.0}, {"judge": 2.0, "length": 2.0}]
    assert [s.total for s in found] == [3.0, 4.0]
    judge.close()


def test_one_that_fails_is_asked_again_and_one_that_hangs_has_failed(app, source):
    app.fails = (1, 2)
    judge = opened(source)
    assert [s.total for s in judge.score([sample("ae")])] == [2.0]
    assert app.asked == 3
    app.delay, judge.seconds = 30.0, 0.2
    (scored,) = judge.score([sample("ae")])
    assert "no answer within 0.2 s" in scored.failure
    judge.close()


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("?promt=x", "'promt' is not known; a judge has model, prompt"),
        ("?prompt=nowhere.txt", "No such file or directory"),
        ("?score=Score", "score has no group in parentheses"),
        ("?score=(", "reward"),
        ("?tokens=0", "at least 1"),
    ],
)
def test_what_a_judge_cannot_be_is_a_sentence(query, sentence):
    with pytest.raises(UserError, match=sentence):
        JudgeSource.read(f"judge:http://a/v1{query}")


def test_no_judge_there_is_said_before_any_work(monkeypatch, url, source, tmp_path):
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/v1: nothing answers there"):
        rolecall.rl(model="tiny", reward="judge:http://127.0.0.1:9/v1", out=str(tmp_path / "run"), quiet=True)
    with pytest.raises(UserError, match="give an address, such as judge:http"):
        rolecall.rl(model="tiny", reward="judge:127.0.0.1:9", out=str(tmp_path / "run"), quiet=True)
    with pytest.raises(UserError, match="reward `judge` asks for `x`, but the rows have no such column"):
        rolecall.eval(model="tiny", rows="addition", n=2, reward=source)
    monkeypatch.setenv("ROLECALL_SERVER_KEY", "another")
    with pytest.raises(UserError, match="the environment variable ROLECALL_SERVER_KEY or OPENAI_API_KEY"):
        rolecall.eval(model="tiny", rows="addition", n=2, reward=f"judge:{url}")
    assert not (tmp_path / "run").exists()


def test_a_run_learns_from_judges_beside_a_function(source, tmp_path):
    reward = f"{Path(__file__).parent / 'light_rewards.py'}:vowels"
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "x": "!"} for i in range(4)]
    run = rolecall.rl(
        model="tiny",
        rows=rows,
        reward=[source, reward, source + "&tokens=8"],
        reward_weights=[1.0, 0.5, 2.0],
        steps=1,
        prompts=2,
        samples=3,
        sampling={"max_new_tokens": 8, "temperature": 0.7},
        out=str(tmp_path / "run"),
        quiet=True,
    )
    line = run.metrics[-1]
    assert line["rewards/judge_1/mean"] == line["rewards/judge_2/mean"]
    total = 3 * line["rewards/judge_1/mean"] + 0.5 * line["rewards/vowels/mean"]
    assert line["reward"] == pytest.approx(total)
    assert not [name for name in ("key", KEY) if name in (run.path / "config.json").read_text()]
