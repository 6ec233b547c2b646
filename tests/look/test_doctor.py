"""What `rolecall doctor` finds in runs that were made sick, and in one that is not."""

import json

import pytest

import rolecall
from rolecall.cli import main
from rolecall.look.doctor.audit import CHECKS, findings


def noise(completions, **columns):
    return [1.0 + 1e-5 * (hash(text) % 7) for text in completions]


def run(path, **settings):
    how = {"model": "tiny", "rows": "sorting:length=2", "steps": 8, "prompts": 4, "samples": 4, "quiet": True}
    rolecall.rl(out=str(path), **(how | {"sampling.max_new_tokens": 3} | settings))
    return path


@pytest.fixture(scope="module")
def phantom(tmp_path_factory):
    return run(tmp_path_factory.mktemp("doctor") / "run", reward=noise)


def test_advantages_of_noise_are_found(phantom):
    (found,) = [one for one in findings(phantom) if one.kind == "phantom-advantages"]
    assert found.evidence
    assert found.setting == "--algorithm.scale batch"


def test_the_command_says_it_and_exits_1(phantom, capsys):
    assert main(["doctor", str(phantom)]) == 1
    assert "phantom-advantages" in capsys.readouterr().out
    assert main(["doctor", str(phantom), "--json"]) == 1
    assert "phantom-advantages" in [one["kind"] for one in json.loads(capsys.readouterr().out)]


def test_a_run_without_steps_is_a_sentence(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_kinds_are_names_of_functions():
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)
