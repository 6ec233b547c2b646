"""The command line as a user meets it: sentences, exit codes, and no waiting for torch."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields

import pytest
from config_options import RunOptions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rolecall
from rolecall.cli import commands, main
from rolecall.cli.commands import COMMANDS, Command, imported
from rolecall.config.docs import commands as documented
from rolecall.config.schema import schema
from rolecall.errors import UserError

seen = []


def run(options):
    """The job of the command the tests add."""
    seen.append(options)
    match options.steps:
        case 1:
            raise UserError("the disk is full", exit_code=74)
        case 2:
            raise KeyboardInterrupt
        case 3:
            raise RuntimeError("oh")
        case 4:
            return 3
    return "a result"


@pytest.fixture(autouse=True)
def jobs(monkeypatch):
    added = Command(name="run", about="try something", options="config_options:RunOptions", run=f"{__name__}:run")
    monkeypatch.setattr("rolecall.cli.COMMANDS", (*COMMANDS, added))
    seen.clear()


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_every_command(capsys):
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        shown = capsys.readouterr().out
        for command in COMMANDS:
            assert f"  {command.name} " in shown
            assert command.about in shown


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rolecall {rolecall.__version__}\n"


def test_every_command_has_what_it_names(capsys):
    for command in COMMANDS:
        assert main([command.name, "--help"]) == 0
        assert f"usage: rolecall {command.name}" in capsys.readouterr().out
        assert callable(imported(command.run))


def test_the_page_of_options_covers_every_command_that_has_some():
    with_options = {c.name: imported(c.options) for c in COMMANDS if fields(imported(c.options))}
    assert documented() == with_options


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["genrate"], "rolecall: unknown command 'genrate': did you mean `rolecall generate`?"),
        (["zzzzz"], "rolecall: unknown command 'zzzzz'; `rolecall --help` lists the commands"),
        (["--verbose"], "rolecall: unknown option '--verbose'; `rolecall --help` lists the commands"),
        (["run", "--optim.lrr", "1"], "rolecall run: unknown option --optim.lrr: did you mean --optim.lr?"),
        (["run", "--model.name", "m", "--optim.lr", "x"], "rolecall run: --optim.lr must be a number, got 'x'"),
        (["run", "--model.name", "m", "--preset", "fats"], "rolecall run: unknown preset 'fats': did you mean fast?"),
        (["env", "--preset", "x"], "rolecall env: this command has no presets; leave out --preset"),
        (["run", "--help", "optm.lr"], "rolecall run: there is no option or section 'optm.lr': did you mean optim.lr?"),
    ],
)
def test_a_wrong_call_is_one_sentence_and_exit_code_2(capsys, words, sentence):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err == f"{sentence}\n"
    assert captured.out == ""
    assert not seen


def test_preset_file_and_flags(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("preset: fast\nmodel: {name: m}\noptim:\n  lr: 1e-4\n")
    assert main(["run", "--config", str(path), "--optim.no-such", "1"]) == 2
    assert main(["run", "--config", str(path), "--steps=50"]) == 0
    assert (seen[0].optim.lr, seen[0].optim.schedule, seen[0].steps) == (1e-4, "cosine", 50)
    assert main(["run", "--config", str(path), "--preset", "adapters"]) == 0
    assert (seen[1].optim.schedule, seen[1].model.lora.rank) == ("constant", 4)


def test_an_unknown_key_in_a_file(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: m}\noptim: {lr_: 1}\n")
    assert main(["run", "--config", str(path)]) == 2
    assert capsys.readouterr().err == "rolecall run: unknown key `optim.lr_` in run.yaml: did you mean `optim.lr`?\n"


def test_a_dry_run_shows_the_settings_and_the_plan(tmp_path, capsys):
    words = ["run", "--preset", "fast", "--model.name", "m", "--optim.lr", "1e-5"]
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not seen
    assert shown.endswith("\n10 steps\n")
    saved = tmp_path / "saved.yaml"
    saved.write_text(shown.removesuffix("\n10 steps\n"))
    assert main(words) == main(["run", "--config", str(saved)]) == 0
    assert seen[0] == seen[1] == RunOptions(
        model=seen[0].model, optim=seen[0].optim, steps=10
    )  # fmt: skip


FLAGS = [f"--{o.flag}" for o in schema(RunOptions).options()] + [
    "--no-optim.fused", "--model.lora", "--no-model.lora", "--extra.x", "--extra.", "--optim", "--config", "--preset", "--",
]  # fmt: skip
VALUES = ["none", "true", "1", "-1", "1e-3", "nan", "fast", "", "[", "{a: 1}", "a,b", "x=1", "é", "\x00", "-h"]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(
        st.sampled_from(FLAGS)
        | st.sampled_from(VALUES)
        | st.builds("{}={}".format, st.sampled_from(FLAGS), st.sampled_from(VALUES))
    ),
    preset=st.sampled_from(["fast", "[a]", "{}", "3", "''"]),
)
def test_whatever_is_written_is_answered_with_settings_or_sentences(tmp_path_factory, words, preset):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(f"preset: {preset}\nmodel: {{name: m}}\n")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["run", "--config", str(path), "--dry-run", *words])
    assert code in (0, 2), err.getvalue()
    assert (code == 0) == (err.getvalue() == "")
    assert not seen


def test_exit_codes(capsys):
    def code(steps):
        return main(["run", "--model.name", "m", "--steps", str(steps)])

    assert code(5) == 0  # what a job returns is its result
    assert code(4) == 3  # unless it is a number
    assert code(1) == 74
    assert capsys.readouterr().err == "rolecall run: the disk is full\n"
    assert code(2) == 130
    assert capsys.readouterr().err == "rolecall run: interrupted\n"
    assert code(3) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.splitlines()[-1].endswith("what `rolecall env` prints")


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Nothing to set."""


def test_a_command_without_options_offers_none(monkeypatch, capsys):
    bare = commands.Command(name="bare", about="x", options=f"{__name__}:NoOptions", run=f"{__name__}:run")
    monkeypatch.setattr("rolecall.cli.COMMANDS", (bare,))
    assert main(["bare", "--help"]) == 0
    assert capsys.readouterr().out == "Nothing to set.\n\nusage: rolecall bare\n"


def test_help_and_mistakes_do_not_wait_for_torch():
    script = (
        "import sys, rolecall\nfrom rolecall.cli import main\n"
        "assert main(['--help']) == 0 and main(['generate', '--help']) == 0 and main(['generate', '--modl', 'x']) == 2\n"
        "assert main(['generate', '--model', 'x', '--prompt', 'y', '--dry-run']) == 0\n"
        "assert not {'torch', 'transformers', 'numpy', 'pyarrow', 'rich'} & set(sys.modules)"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    assert "--sampling.temperature" in done.stdout


def test_the_module_runs():
    done = python("-m", "rolecall", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rolecall: unknown command 'nonsense'")


def test_a_closed_pipe_is_quiet():
    read, write = os.pipe()
    os.close(read)
    for words in (["--help"], ["generate", "--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "rolecall", *words], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (1, b"")
    os.close(write)


def test_short_ways_to_write_steps_and_the_start():
    from rolecall.config.resume import rewritten

    assert rewritten(["--steps", "+500"]) == ["--extend", "500"]
    assert rewritten(["--steps=+5", "--quiet"]) == ["--extend", "5", "--quiet"]
    assert rewritten(["--steps", "500"]) == ["--steps", "500"]
    assert rewritten(["--init-from", "runs/x"]) == ["--model", "runs/x"]
    assert rewritten(["--init-from=runs/x"]) == ["--model=runs/x"]
