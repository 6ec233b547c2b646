"""Help and the page of options come from the dataclasses."""

from pathlib import Path

import pytest
from config_options import RunOptions

from rolecall.config.docs import commands, main, options_page
from rolecall.config.help import help_text
from rolecall.config.schema import schema
from rolecall.errors import UserError


def shown(about="", width=100):
    return help_text("run", schema(RunOptions), presets=tuple(RunOptions.presets), about=about, width=width)


def test_every_option_has_its_line_with_text_and_default():
    lines = shown().splitlines()
    assert "usage: rolecall run --model.name TEXT [--option value ...]" in lines
    for option in schema(RunOptions).options():
        own = [line for line in lines if f"{option.flag} " in line or f"{option.flag}.KEY" in line]
        assert own, option.key
    assert any("--optim.lr FLOAT" in line and line.endswith("Step size.  [1e-05]") for line in lines)
    assert any("--[no-]optim.fused" in line for line in lines)
    assert any("--optim.schedule constant|cosine" in line for line in lines)
    assert any("--model.name TEXT" in line and line.endswith("The model.  (required)") for line in lines)
    assert "model.lora: Train adapters only. Off unless set; --model.lora switches it on." in lines
    assert any("fast, adapters" in line for line in lines)


def test_lines_keep_to_the_width():
    assert max(len(line) for line in shown(width=80).splitlines() if line.startswith("  ")) <= 80


def test_all_about_one_key():
    assert "A second sentence." in shown("model.name")
    assert "--optim.lr" in shown("--optim")
    assert "--steps" not in shown("optim")
    with pytest.raises(UserError, match="did you mean optim"):
        shown("optm")


def test_every_option_of_every_command_is_explained():
    found = commands()
    assert "generate" in found
    for name, options in found.items():
        for part in (*schema(options).options(), *schema(options).sections()):
            assert part.about, f"{name}: {part.key} has no docstring"


def test_presets_hold_only_keys_that_exist():
    from rolecall.config.merge import ConfigError, resolve

    for options in commands().values():
        for preset, settings in getattr(options, "presets", {}).items():
            try:
                resolve(options, [(f"preset {preset}", settings)])
            except ConfigError as error:
                assert all(problem.endswith("in a config file") for problem in error.problems), error.problems  # noqa: PT017


def test_the_page_of_options_is_current(tmp_path, capsys):
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == options_page(), "run `python -m rolecall.config.docs`"
    copy = tmp_path / "config.md"
    assert main([str(copy)]) == 0
    assert main(["--check", str(copy)]) == 0
    copy.write_text("old")
    assert main(["--check", str(copy)]) == 1
    assert "is not current" in capsys.readouterr().err
