"""Every command that the product prints or a page shows is run: quick ones as they stand, trainings as a dry run."""

import re
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

import rolecall
from rolecall.cli import demo, main, train
from rolecall.cli.commands import COMMANDS, imported
from rolecall.config.preflight import check_paths
from rolecall.config.schema import schema
from rolecall.jobs.running import Run
from rolecall.train.exit_codes import ExitCode
from rolecall.train.loop import Outcome

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "zh")]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUICK = ("generate", "eval", "play", "report", "rescore", "audit", "env", "--version")
SHOWN_ADDRESS = "http://127.0.0.1:8750"
MADE_ELSEWHERE = ("docs/results",)
"""Pages of long experiments, whose commands name models and runs that are not made here."""

REWARDS = """
def my_reward(completions, answer, **kwargs):
    return [float(text.strip() == right) + sum(text.encode()) % 7 / 100 for text, right in zip(completions, answer)]

def shorter(completion_text):
    return -float(len(completion_text)) - sum(completion_text.encode()) % 7 / 100
"""


def blocks(page, language):
    return [text.replace("\\\n", " ") for kind, text in _BLOCK.findall(page.read_text()) if kind == language]


def shown():
    """(page, words) of every command in a shell block."""
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for line in "\n".join(blocks(page, "bash")).splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["rolecall"]:
                yield pytest.param(name, words[1:], id=f"{name}: {line[:70]}")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A place with a space in its name and all that the pages speak of, as small as can be."""
    place = tmp_path_factory.mktemp("commands") / "my place"
    runs = place / "runs"
    runs.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        (scope,) = [text for text in blocks(ROOT / "docs/quickstart.md", "python") if "data.jsonl" in text]
        exec(scope)
        shutil.copy("data.jsonl", "prompts.jsonl")
        Path("demos.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n' * 4)
        Path("rewards.py").write_text(REWARDS)
        (env,) = [text for text in blocks(ROOT / "docs/agents.md", "python") if "class Higher" in text]
        Path("higher.py").write_text(env)
        (agent,) = [text for text in blocks(ROOT / "docs/gateway.md", "python") if "def run" in text]
        Path("my_agent.py").write_text(agent)
        (distil,) = [text for text in blocks(ROOT / "docs/lessons.md", "python") if "def short" in text]
        Path("distil.py").write_text(distil)
        Path("preferences.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 4)
        Path("my.yaml").write_text("rows: sorting\nprompts: 2\nsamples: 2\ngroups: 2\nsampling: {max_new_tokens: 2}\n")
        how = {"steps": 1, "quiet": True}
        short = {"prompts": 2, "samples": 2, "sampling": {"max_new_tokens": 2}}
        rolecall.sft(rows="sorting:length=3", batch=2, out="runs/sft-1", **how)
        rolecall.rm(rows="sorting:length=3", batch=2, out="runs/rm-1", **how)
        held_out = {"every": 1, "held_out": 0.2, "rows": 4}
        rolecall.rl(
            model="runs/sft-1",
            rows="data.jsonl",
            reward="rewards.py:my_reward",
            eval=held_out,
            out="runs/first",
            **short,
            **how,
        )
        (guess,) = [words for _, words in (p.values for p in shown()) if words[0] == "rl" and "runs/guess" in words]
        assert main([*guess, "--quiet"]) == 0, "two steps of a page, as they stand there"
        rolecall.marl(env="climbing", algo="ippo", out="runs/marl-1", **how)
        for name in ("start", "sft"):
            shutil.copytree("runs/sft-1", f"runs/{name}")
        shutil.copytree("runs/first", "runs/rl-1")
        rolecall.rescore("runs/first", reward="rewards.py:shorter", out="runs/first-rescored-1", quiet=True)
    return place


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def resolved(words):
    """The options of a call, as the command line makes them."""
    from rolecall.cli import _command, _resolve
    from rolecall.config.flags import parse
    from rolecall.config.resume import rewritten

    options = imported(_command(words[0]).options)
    return _resolve(options, getattr(options, "presets", {}), parse(rewritten(words[1:]), schema(options)))


@pytest.fixture
def served(monkeypatch):
    """Words in which the address that pages show is that of a server which is really there."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "remote"))
    from served import KEY, app_of, serving

    monkeypatch.setenv("ROLECALL_SERVER_KEY", KEY)
    with ExitStack() as stack:

        def put(words):
            if not any(SHOWN_ADDRESS in word for word in words):
                return words
            address = stack.enter_context(serving(app_of()))
            return [word.replace(SHOWN_ADDRESS, address) for word in words]

        yield put


@pytest.mark.parametrize(("page", "words"), list(shown()))
def test_a_command_on_a_page_runs(page, words, capfd, served):
    quick = words[0] in QUICK or words[1:] == ["--help"]
    words = served(words) if quick else words
    if not quick and not page.startswith(MADE_ELSEWHERE):
        check_paths(resolved(words).options)  # what it names is made by the page, or stands beside it
    dry = [] if quick or "--dry-run" in words else ["--dry-run"]
    code = main([*words, *dry])
    said = capfd.readouterr()
    assert code == 0 or (words[0] == "audit" and code == 1), said.err
    assert said.out


def test_pages_show_commands():
    assert len(list(shown())) > 40


# -- what the product prints ---------------------------------------------------------------------------------------------


def printed(text):
    """The commands in what was printed, as words."""
    return [shlex.split(line)[1:] for line in re.findall(r"\brolecall [a-z].*", text)]


def test_what_the_demo_suggests_runs(place, capsys):
    from rich.console import Console

    stage = lambda name: SimpleNamespace(path=place / "runs" / name)
    made = SimpleNamespace(path=place, report="report.html", seconds=1.0, start=stage("sft-1"), grpo=stage("first"))
    demo._next(Console(), made)
    commands = printed(capsys.readouterr().out)
    assert [words[0] for words in commands] == ["generate", "eval", "rl"]
    trains = ["--steps", "1", "--prompts", "2", "--algorithm.entropy_coef", "0.01", "--eval.rows", "4"]
    small = {"eval": ["--n", "4"], "rl": [*trains, "--out", "runs/next"]}
    for words in commands:
        assert main([*words, *small.get(words[0], [])]) == 0


@pytest.mark.parametrize(("command", "run"), [("sft", "sft-1"), ("rm", "rm-1"), ("rl", "first"), ("marl", "marl-1")])
def test_the_hint_of_a_stopped_run_resumes_it(command, run, place, tmp_path, capsys):
    path = shutil.copytree(place / "runs" / run, tmp_path / "a b" / run)
    outcome = Outcome(step=1, exit_code=ExitCode.INTERRUPTED, reason="stopped", best=None, best_step=None)
    train.finish(Run(path=path, outcome=outcome), SimpleNamespace(command=command, quiet=False))
    (words,) = printed(capsys.readouterr().err)
    assert words == [command, "--out", str(path), "--resume"]
    assert main([*words, "--steps", "+1", "--quiet"]) == 0


def test_what_rescore_suggests_runs(place, tmp_path, capsys):
    out = str(tmp_path / "a b" / "scored")
    assert main(["rescore", str(place / "runs/first"), "--reward", "rewards.py:shorter", "--out", out]) == 0
    (words,) = printed(capsys.readouterr().out)
    assert main([*words, "--steps", "1", "--quiet", "--out", str(tmp_path / "trained")]) == 0


def test_commands_in_messages_exist():
    """Sentences of the product name commands and options that there are."""
    options = {
        command.name: {option.flag for option in schema(imported(command.options)).options()} for command in COMMANDS
    }
    named = [
        (match[1], match[2])
        for path in (ROOT / "src").rglob("*.py")
        for match in re.finditer(r"`rolecall ([a-z][a-z-]*)([^`]*)`", path.read_text())
    ]
    assert len(named) > 10
    for command, rest in named:
        assert command in options, command
        for flag in re.findall(r"--([a-z_.-]+)", rest):
            assert flag in options[command] | {"help", "config", "preset", "dry-run"}, (command, flag)
