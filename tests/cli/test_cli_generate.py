"""`rolecall generate` and `rolecall.generate`."""

import json
import logging
import math

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

import rolecall
from rolecall.cli import main
from rolecall.errors import UserError
from rolecall.maths.roles import Role
from rolecall.policy.tiny import TURN_END_ID, tiny_model, tiny_tokenizer
from rolecall.policy.token_text import token_texts
from rolecall.types import Finish, Sampling
from rolecall.visible import visible_text, visible_token

SHORT = ["--sampling.max_new_tokens", "4"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model of another architecture, without a chat template."""
    directory = tmp_path_factory.mktemp("plain")
    config = GPT2Config(vocab_size=259, n_positions=32, n_embd=16, n_layer=1, n_head=2, eos_token_id=TURN_END_ID)
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(directory)
    return str(directory)


def refused(capsys, *words):
    assert main(["generate", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err.removeprefix("rolecall generate: ").rstrip("\n")


def test_answers_have_every_token_with_its_role():
    answers = rolecall.generate(model="tiny", prompts=["12+34=", "é"], n=3, sampling={"max_new_tokens": 5}, chat=False)
    assert [(a.trajectory.group, a.trajectory.episode) for a in answers] == [(p, s) for p in (0, 1) for s in range(3)]
    for answer in answers:
        given = tuple(str(answer.prompt).encode())
        assert answer.trajectory.ids == (*given, *answer.ids)
        assert answer.start == len(given)
        assert len(answer.ids) <= 5
        roles = [Role(role) for role in answer.trajectory.roles]
        assert roles[: len(given)] == [Role.PROMPT] * len(given)
        assert (roles[-1] is Role.STOP) == (answer.finish is Finish.STOP)
        assert all(role is Role.CONTENT for role in roles[len(given) : -1])
        assert [math.isnan(x) for x in answer.trajectory.behaviour_logprobs] == [r is Role.PROMPT for r in roles]
        assert all(x < 0 for x in answer.logprobs)
        assert len(answer.tokens) == len(answer.trajectory.ids)


def test_the_stop_token_is_not_in_the_text(monkeypatch):
    model = tiny_model()
    head = model.get_output_embeddings().weight.data
    head.zero_()
    model.model.norm.weight.data.zero_()  # every logit 0: greedy picks id 0, which is made the stop id
    monkeypatch.setattr("rolecall.policy.load.tiny_model", lambda: model)
    (answer,) = rolecall.generate(
        model="tiny", prompts=["a"], sampling=Sampling(temperature=0.0, stop_ids=(0,), max_new_tokens=4)
    )
    assert (answer.finish, answer.ids, answer.text) == (Finish.STOP, (0,), "")
    assert answer.trajectory.roles[-1] == Role.STOP
    (cut,) = rolecall.generate(model="tiny", prompts=["a"], sampling=Sampling(temperature=0.0, max_new_tokens=4))
    assert (cut.finish, cut.text) == (Finish.LENGTH, "\0" * 4)


def test_the_same_seed_draws_the_same_answers():
    def ids(**settings):
        return [
            a.ids
            for a in rolecall.generate(model="tiny", prompts=["x"], n=2, sampling={"max_new_tokens": 6}, **settings)
        ]

    assert ids(seed=1) == ids(seed=1) == ids(seed=1, engine="hf")
    assert ids(seed=1) != ids(seed=2)


def test_chat_is_the_default_where_there_is_a_template(plain):
    (chat,) = rolecall.generate(model="tiny", prompts=["hi"], system="be brief", sampling={"max_new_tokens": 1})
    rendered = bytes(i for i in chat.trajectory.ids[: chat.start] if i < 256).decode()
    assert rendered == "system\nbe brief\nuser\nhi\nassistant\n"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    (same,) = rolecall.generate(model="tiny", prompts=[messages], sampling={"max_new_tokens": 1})
    assert same.trajectory.ids == chat.trajectory.ids
    (bare,) = rolecall.generate(model=plain, prompts=["hi"], sampling={"max_new_tokens": 1})
    assert bare.trajectory.ids[: bare.start] == tuple(b"hi")


def test_text_on_stdout_and_a_summary_on_stderr(capsys):
    assert main(["generate", "--model", "tiny", "--prompt", "a", "--prompt", "b", "--n", "2", *SHORT]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line for line in lines if line.startswith("> ")] == ["> a", "> b"]
    assert sum(line.startswith("--- answer ") for line in lines) == 4
    assert captured.err.startswith("4 answers (")
    assert captured.err.rstrip().endswith("tokens/s (native engine, float32)")


def test_the_token_table(capsys):
    words = ["generate", "--model", "tiny", "--prompt", "é\x1b\u202e", "--no-chat", "--show", "tokens", *SHORT]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert shown.splitlines()[0] == "> é\\x1b\\u202e"
    rows = [line.split() for line in shown.splitlines()[3:]]
    assert [row[1] for row in rows[:6]] == ["prompt"] * 6
    assert [row[4] for row in rows[:6]] == [r"'\xc3'", r"'\xa9'", r"'\x1b'", r"'\xe2'", r"'\x80'", r"'\xae'"]
    assert {row[2] for row in rows[:6]} == {"-"}
    assert all(float(row[2]) < 0 and row[1] in ("content", "stop") for row in rows[6:])


def test_json_lines(capsys):
    assert main(["generate", "--model", "tiny", "--prompt", "a", "--n", "2", "--json", *SHORT]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["sample"] for row in rows] == [0, 1]
    for row in rows:
        assert row["prompt"] == "a"
        assert len(row["ids"]) == len(row["roles"]) == len(row["logprobs"])
        assert row["logprobs"][0] is None
        assert row["finish"] in ("stop", "length")


def test_prompts_from_files(tmp_path, capsys):
    rows, lines = tmp_path / "p.jsonl", tmp_path / "p.txt"
    rows.write_text('{"prompt": "a\\u2028b"}\n\n{"messages": [{"role": "user", "content": "c"}]}\n')
    lines.write_bytes(b"d\x0ce\r\n\n  f\n")
    for path, prompts in ((rows, ["a\u2028b", [{"role": "user", "content": "c"}]]), (lines, ["d\x0ce", "  f"])):
        words = ["generate", "--model", "tiny", "--prompt", "z", "--prompts-file", str(path), "--json", *SHORT]
        assert main(words) == 0
        assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.split("\n")[:-1]] == ["z", *prompts]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.csv", "a", "must end in .txt or .jsonl"),
        ("p.txt", "\n \n", "holds no prompts"),
        ("p.jsonl", '{"prompt": "a"}\nb\n', "line 2 is not a JSON object"),
        ("p.jsonl", '{"question": "a"}\n', "line 1 needs `prompt`"),
        ("p.jsonl", '{"prompt": ""}\n', "line 1 needs `prompt`"),
        ("p.jsonl", "[1]\n", "line 1 needs `prompt`"),
    ],
)
def test_a_bad_prompts_file(tmp_path, capsys, name, content, sentence):
    (tmp_path / name).write_text(content)
    assert sentence in refused(capsys, "--model", "tiny", "--prompts_file", str(tmp_path / name))


def test_what_cannot_be_answered_is_said_before_work_starts(capsys, tmp_path, plain):
    tiny = ("--model", "tiny")
    assert refused(capsys, "--prompt", "a") == "`model` is missing: give --model, or `model` in a config file"
    assert "nothing to answer" in refused(capsys, *tiny)
    assert "prompt 1 is empty" in refused(capsys, *tiny, "--prompt", "a", "--prompt", "")
    assert "max_new_tokens must be at least 1" in refused(capsys, *tiny, "--prompt", "a", "--sampling.max_new_tokens=0")
    assert "n must be at least 1" in refused(capsys, *tiny, "--prompt", "a", "--n", "0")
    assert "context is 1024" in refused(capsys, *tiny, "--prompt", "a" * 2000)
    assert "not valid Unicode" in refused(capsys, *tiny, "--prompt", "a\udcff")
    assert "cannot be read: embedded null" in refused(capsys, *tiny, "--prompts_file", "a\0.txt")
    assert "cannot be read: embedded null" in refused(capsys, "--config", "a\0")
    assert "no such directory" in refused(capsys, "--model", str(tmp_path / "none"), "--prompt", "a")
    assert "config.json is missing" in refused(capsys, "--model", str(tmp_path), "--prompt", "a")
    assert "cannot be read: No such file" in refused(capsys, *tiny, "--prompts_file", str(tmp_path / "x.txt"))
    assert "leave out --no-chat" in refused(capsys, *tiny, "--prompt", "a", "--no-chat", "--system", "b")
    assert "no chat template, which --chat" in refused(capsys, "--model", plain, "--prompt", "a", "--chat")
    assert "no chat template, which a system" in refused(capsys, "--model", plain, "--prompt", "a", "--system", "b")
    assert "use the hf engine" in refused(capsys, "--model", plain, "--prompt", "a", "--engine", "native")


def test_a_prompt_that_is_too_long_is_said_once(capsys):
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = told.append
    logging.getLogger("transformers").addHandler(handler)
    try:
        for chat in ("--chat", "--no-chat"):
            assert "context is 1024" in refused(capsys, "--model", "tiny", "--prompt", "a" * 2000, chat)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert not told


def test_a_template_that_refuses_is_one_sentence(monkeypatch):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system\nmessages') }}"
    monkeypatch.setattr("rolecall.policy.load.tiny_tokenizer", lambda: tokenizer)
    with pytest.raises(UserError, match="refuses the prompt: no system messages"):
        rolecall.generate(model="tiny", prompts=["a"])


def test_a_misspelt_argument_in_python():
    with pytest.raises(UserError, match="unknown key `promts`: did you mean `prompts`"):
        rolecall.generate(model="tiny", promts=["a"])
    with pytest.raises(AttributeError, match="nonsense"):
        rolecall.nonsense  # noqa: B018


def test_token_texts():
    tokenizer = tiny_tokenizer()
    assert token_texts(tokenizer, [65, 32, 0xC3, 255, 258]) == ["A", " ", "\\xc3", "\\xff", "<|im_end|>"]
    assert token_texts(tokenizer, [400]) == ["<unused 400>"]


def test_text_for_the_terminal():
    assert (
        visible_text("a\n\tb\x1b[31m\u202e\r\x00é👩\u200d🚀\ud800")
        == "a\n\tb\\x1b[31m\\u202e\\r\\x00é👩\u200d🚀\\ud800"
    )
    assert visible_token(" a\n\u00a0\u200d\U000e0041") == "' a\\n\\xa0\\u200d\\U000e0041'"
