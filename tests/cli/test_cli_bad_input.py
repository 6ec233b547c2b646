"""What a newcomer gets wrong: one sentence on stderr, exit code 2, and nothing written."""

import json
from pathlib import Path

import pytest

import rolecall
from rolecall.cli import main
from rolecall.errors import UserError

REWARDS = """
def right(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]

def levelled(completions, level):
    return [0.0 for _ in completions]

def one_levelled(completion, level):
    return 0.0

def unknown_signature(x, y):
    return 0.0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0

number = 3
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)
    Path("broken.py").write_text("def f(:\n")
    Path("lost.py").write_text("import no_such_module_anywhere\n")
    files = {
        "sums": [{"prompt": "1+2=", "answer": "3"}, {"prompt": "2+2=", "answer": "4"}],
        "bare": [{"prompt": "1+2="}],
        "questions": [{"question": "1+2=", "answer": "3"}],
        "long": [{"prompt": "1+2=", "answer": "3"}, {"prompt": "1+" * 600, "answer": "3"}],
        "long_chat": [{"prompt": [{"role": "user", "content": "x" * 1010}], "answer": "3"}],
        "number": [{"prompt": "1+2=", "answer": "3"}, {"prompt": 3, "answer": "3"}],
        "missing": [{"prompt": "1+2=", "answer": "3"}, {"answer": "3"}],
        "blank": [{"prompt": "", "answer": "3"}],
        "nobody": [{"prompt": [{"content": "hi"}], "answer": "3"}],
    }
    for name, rows in files.items():
        Path(f"{name}.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    Path("none.jsonl").write_text("")
    Path("torn.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "b"\n')
    Path("list.jsonl").write_text('{"prompt": "a", "answer": "b"}\n[1]\n')
    Path("rows.csv").write_text("prompt,answer\n")
    Path("unknown.yaml").write_text("stepz: 3\n")
    Path("torn.yaml").write_text("steps: [\n")


RL = ["rl", "--steps", "1", "--prompts", "1", "--samples", "2", "--sampling.max_new_tokens", "2"]
CALLS = [
    # rows
    ([*RL, "--rows", "nosuch.jsonl", "--reward", "exact"], "there is no file or folder nosuch.jsonl"),
    ([*RL, "--rows", "torn.jsonl", "--reward", "exact"], "torn.jsonl, line 2: not a JSON object"),
    ([*RL, "--rows", "list.jsonl", "--reward", "exact"], "list.jsonl, line 2: a row must be a JSON object"),
    ([*RL, "--rows", "none.jsonl", "--reward", "exact"], "none.jsonl holds no rows"),
    ([*RL, "--rows", "rows.csv", "--reward", "exact"], "rows.csv holds no rows"),
    ([*RL, "--rows", "questions.jsonl", "--reward", "exact"], "rename `question` to `prompt`"),
    ([*RL, "--rows", "number.jsonl", "--reward", "exact"], "number.jsonl, line 3: `prompt` must be a text"),
    ([*RL, "--rows", "missing.jsonl", "--reward", "exact"], "missing.jsonl, line 3: `prompt` must be a text"),
    (
        [*RL, "--rows", "blank.jsonl", "--reward", "exact"],
        "blank.jsonl, line 1: the prompt cannot be given to the model",
    ),
    ([*RL, "--rows", "nobody.jsonl", "--reward", "exact"], "nobody.jsonl, line 1: every message of `prompt` must be"),
    ([*RL, "--rows", "long.jsonl", "--reward", "exact"], "long.jsonl, line 3: the prompt has 1200 tokens but"),
    ([*RL, "--rows", "long_chat.jsonl", "--reward", "exact"], "long_chat.jsonl, line 1: the prompt has 10"),
    ([*RL, "--rows", "sortin"], "did you mean 'sorting'?"),
    ([*RL, "--rows", "sorting:lenght=3"], "did you mean `length`?"),
    # rewards
    ([*RL, "--rows", "sums.jsonl"], "no reward: give one"),
    ([*RL, "--rows", "sums.jsonl", "--reward", ""], "a reward's name is empty"),
    ([*RL, "--rows", "sums.jsonl", "--reward", "exactly"], "did you mean 'exact'"),
    ([*RL, "--rows", "sums.jsonl", "--reward", "nosuch.py:f"], "there is no file"),
    ([*RL, "--rows", "sums.jsonl", "--reward", "rewards.py:rihgt"], "did you mean `right`?"),
    ([*RL, "--rows", "sums.jsonl", "--reward", "rewards.py:number"], "not a function"),
    ([*RL, "--rows", "sums.jsonl", "--reward", "broken.py:f"], "SyntaxError"),
    ([*RL, "--rows", "sums.jsonl", "--reward", "lost.py:f"], "No module named 'no_such_module_anywhere'"),
    ([*RL, "--rows", "sums.jsonl", "--reward", "rewards.py:unknown_signature"], "has the parameters (x, y)"),
    (
        [*RL, "--rows", "sums.jsonl", "--reward", "rewards.py:levelled"],
        "asks for `level`, but the rows have no such column",
    ),
    (
        [*RL, "--rows", "sums.jsonl", "--reward", "rewards.py:one_levelled"],
        "asks for `level`, but the rows have no such column",
    ),
    (
        [*RL, "--rows", "bare.jsonl", "--reward", "rewards.py:right"],
        "asks for `answer`, but the rows have no such column",
    ),
    ([*RL, "--rows", "bare.jsonl", "--reward", "exact"], "reward `exact` compares with the row's answer"),
    ([*RL, "--rows", "bare.jsonl", "--reward", "rewards.py:compute_score"], "compares with the row's answer"),
    ([*RL, "--rows", "sums.jsonl", "--reward", "exact", "--reward_weights", "1,2"], "need as many weights"),
    # the run
    ([*RL, "--rows", "sorting", "--out", "."], "cannot be a run's name"),
    ([*RL, "--rows", "sorting", "--out", "a b"], "cannot be a run's name"),
    ([*RL, "--rows", "sorting", "--out", "rewards.py"], "rewards.py is a file"),
    ([*RL, "--rows", "sorting", "--device", "cuda"], "torch finds no GPU"),
    ([*RL, "--rows", "sorting", "--model", "./nosuch"], "no such directory"),
    ([*RL, "--resume"], "resume needs out"),
    ([*RL, "--resume", "--out", "runs/nosuch"], "there is no run to resume in runs/nosuch"),
    # options
    ([*RL, "--stepz", "1"], "did you mean --steps?"),
    ([*RL, "--config", "unknown.yaml"], "unknown key `stepz` in unknown.yaml: did you mean `steps`?"),
    ([*RL, "--config", "torn.yaml"], "not valid YAML in line 2"),
    ([*RL, "--preset", "gropo"], "did you mean grpo?"),
    # the other commands
    (["sft", "--rows", "sums.jsonl"], "sft needs rows with `prompt` and `completion`"),
    (["rm", "--rows", "sums.jsonl"], "a preference needs `chosen` and `rejected`"),
    (
        ["eval", "--model", "tiny", "--rows", "long.jsonl", "--reward", "exact"],
        "long.jsonl, line 3: the prompt has 1200",
    ),
    (["eval", "--model", "tiny", "--rows", "number.jsonl", "--reward", "exact"], "number.jsonl, line 3: `prompt` must"),
    (["eval", "--model", "tiny", "--rows", "questions.jsonl", "--reward", "exact"], "rename `question` to `prompt`"),
    (["eval", "--model", "tiny", "--rows", "bare.jsonl", "--reward", "rewards.py:right"], "asks for `answer`"),
]


@pytest.mark.parametrize(("words", "sentence"), CALLS, ids=[" ".join(w[-4:]) for w, _ in CALLS])
def test_a_wrong_call_says_so_in_one_sentence_before_any_work(words, sentence, capfd):
    before = sorted(Path().iterdir())
    assert main(words) == 2
    said = capfd.readouterr()
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert said.err.startswith(f"rolecall {words[0]}: ")
    assert said.out == ""
    assert sorted(Path().iterdir()) == before


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


SFT = ["sft", "--rows", "sorting:length=2", "--steps", "1", "--batch", "2", "--quiet"]


def test_a_run_that_is_there_is_left_alone_without_overwrite(capfd):
    assert main([*SFT, "--out", "runs/first"]) == 0
    before = contents("runs")
    assert main([*SFT, "--out", "runs/first"]) == 2
    assert capfd.readouterr().err == (
        "rolecall sft: runs/first is not empty; give --resume to continue it, --overwrite to remove it, or another --out\n"
    )
    # A mistake elsewhere in the call removes nothing either.
    assert main(["sft", "--rows", "nosuch.jsonl", "--out", "runs/first", "--overwrite"]) == 2
    assert contents("runs") == before
    assert main([*SFT, "--out", "runs/first", "--overwrite"]) == 0


def test_a_folder_of_other_things_is_never_overwritten(capfd):
    Path("papers").mkdir()
    Path("papers/thesis.txt").write_text("years of work")
    assert main([*SFT, "--out", "papers", "--overwrite"]) == 2
    assert "holds 'thesis.txt' but no run" in capfd.readouterr().err
    assert [p.name for p in Path("papers").iterdir()] == ["thesis.txt"]


def test_a_run_in_use_is_refused(capfd):
    from rolecall.train.lock import RunLock

    Path("runs/first").mkdir(parents=True)
    lock = RunLock(Path("runs/first"))
    try:
        assert main([*SFT, "--out", "runs/first"]) == 2
    finally:
        lock.release()
    said = capfd.readouterr().err
    assert "is in use by process" in said
    assert said.count("\n") == 1


def test_sft_does_not_pretend_to_evaluate_rows_that_have_no_reward_and_no_loss(capfd):
    Path("demos.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    Path("prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    command = ["sft", "--rows", "demos.jsonl", "--steps", "1", "--eval.every", "1", "--eval.data", "prompts.jsonl"]
    assert main(command) == 2
    assert "the evaluation rows are not demonstrations" in capfd.readouterr().err
    assert not Path("runs").exists()


def test_no_rows_from_python_are_not_the_default_rows():
    with pytest.raises(UserError, match="there are no rows"):
        rolecall.rl(rows=[], reward="exact", steps=1, quiet=True)
    with pytest.raises(UserError, match="there are no rows"):
        rolecall.sft(rows=[], steps=1, quiet=True)
    with pytest.raises(UserError, match="there are no rows"):
        rolecall.eval(model="tiny", rows=[], reward="exact")


def test_a_tracker_that_is_not_installed_is_named_with_the_pip_command(monkeypatch, capsys, tmp_path):
    from rolecall.cli import main
    from rolecall.jobs import tracking

    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    assert main(["sft", "--rows", "sorting", "--save.trackers", "tensorboard", "--out", str(tmp_path / "run")]) == 2
    assert "pip install 'rolecall[track]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
