"""Answers of a served model as demonstrations: what `rolecall generate --out` writes, `rolecall sft` learns from."""

import json

import pytest
from served import app_of, serving

import rolecall
from rolecall.cli import main
from rolecall.config.use import GenerateOptions
from rolecall.errors import UserError
from rolecall.serving.app import App
from rolecall.serving.http import HttpError


class Teacher(App):
    """Adds; refuses 3, says nothing to 4, and does not come to an end with 5."""

    async def _completions(self, request):
        return self._said(json.loads(request.body), "prompt", "text", lambda text: text)

    async def _chat(self, request):
        self.read = json.loads(request.body)["messages"]
        return self._said(json.loads(request.body), "messages", "message", lambda text: {"content": text})

    def _said(self, body, given, name, put):
        asked = body[given] if given == "prompt" else body[given][-1]["content"]
        left, right = map(int, asked.rstrip("=").split("+"))
        if left == 3:
            raise HttpError(400, "not this one")
        text = "" if left == 4 else str(left + right)
        finish = "length" if left == 5 else "stop"
        choices = [{"index": i, "finish_reason": finish, name: put(text)} for i in range(body["n"])]
        return {"choices": choices, "usage": {"completion_tokens": 2}}


@pytest.fixture(scope="module")
def app():
    return app_of(kind=Teacher)


@pytest.fixture(scope="module")
def url(app):
    with serving(app) as address:
        yield f"{address}/v1"


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "level": i}) + "\n" for i in range(1, 9)))
    return str(path)


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_whole_answers_become_demonstrations_that_sft_learns_from(url, rows, tmp_path, capsys, caplog):
    out = tmp_path / "demos.jsonl"
    assert main(["generate", "--model", url, "--rows", rows, "--count", "7", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == f"4 of 6 answers are in {out}\n"
    assert f"6 answers (5 stop, 1 length) (tiny at {url})" in said.err
    assert "1 of 7 prompts have no answer: " in caplog.text + said.err
    assert written(out) == [{"prompt": f"{i}+1=", "level": i, "completion": str(i + 1)} for i in (1, 2, 6, 7)]
    run = rolecall.sft(model="tiny", rows=str(out), steps=1, batch=2, out=str(tmp_path / "run"), quiet=True)
    assert run.metrics[-1]["step"] == 1


def test_conversations_are_written_as_the_teacher_read_them(app, url, rows, tmp_path):
    out = tmp_path / "demos.jsonl"
    rolecall.generate(model=url, rows=rows, count=1, chat=True, system="Add.", out=str(out))
    (row,) = written(out)
    assert row["prompt"] == app.read == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    assert row["completion"] == [{"role": "assistant", "content": "2"}]


def test_texts_are_printed_without_tokens(url, capsys):
    assert main(["generate", "--model", url, "--prompt", "20+3=", "--n", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == ["> 20+3=", "--- answer 0: stop", "23", "--- answer 1: stop", "23"]


def test_a_model_here_teaches_too(tmp_path):
    out = tmp_path / "demos.jsonl"
    how = {"sampling": {"max_new_tokens": 6, "stop_ids": list(range(128))}, "out": str(out)}
    found = rolecall.generate(model="tiny", rows="addition", count=4, chat=False, **how)
    whole = [answer for answer in found if answer.finish == "stop" and answer.text]
    assert [row["completion"] for row in written(out)] == [answer.text for answer in whole]
    assert all(isinstance(row["prompt"], str) and row["answer"] for row in written(out))


def test_nothing_to_write_is_an_error(url, tmp_path):
    out = tmp_path / "demos.jsonl"
    with pytest.raises(UserError, match="none of 1 answers is whole, so nothing was written"):
        rolecall.generate(model=url, prompts=["5+1="], out=str(out))
    with pytest.raises(UserError, match="not this one"):
        rolecall.generate(model=url, prompts=["3+1="], out=str(out))
    with pytest.raises(UserError, match="there is no such folder"):
        rolecall.generate(model=url, prompts=["1+1="], out=str(tmp_path / "no" / "demos.jsonl"))
    assert not out.exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"show": "tokens"}, "show needs the model itself"),
        ({"engine": "hf"}, "engine needs the model itself"),
        ({"out": "demos.txt"}, "out is a .jsonl file"),
        ({"out": "demos.jsonl", "json": True}, "leave out json and show"),
        ({"prompts": ()}, "give --prompt TEXT, --prompts_file FILE or --rows ROWS"),
    ],
)
def test_what_does_not_go_together(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        GenerateOptions(**{"model": "http://a/v1", "prompts": ("x",)} | given)
