"""`rolecall plan` as a user sees it."""

import json
import re
from pathlib import Path

import pytest

from rolecall.cli import main
from rolecall.planning.hardware import DEVICES

LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def test_a_plan_says_memory_time_cost_and_settings(model, capsys):
    assert main(["plan", model, "--gpus", "8", "--price", "2.5"]) == 0
    said = capsys.readouterr().out
    assert "8.03 billion parameters; h100: NVIDIA H100 data sheet" in said
    assert "of 80 GB" in said
    assert "async.ahead 1" in said
    assert "in flight" in said
    assert re.search(
        r"in turn +[\d.]+ \([\d.]+ to [\d.]+\), [\d,]+ GPU hours \([\d,]+ to [\d,]+\), cost [\d,]+ \([\d,]+ to [\d,]+\)",
        said,
    )
    assert "--train.shard fsdp2" in said
    assert "never measured on a GPU" in said


def test_what_does_not_fit_has_exit_code_1_and_says_what_would_help(model, capsys):
    assert main(["plan", model, "--gpu", "l4", "--gpus", "2"]) == 1
    assert "training does not fit: use more GPUs" in capsys.readouterr().out


def test_a_simulation_is_printed_and_drawn(model, capsys, tmp_path):
    assert main(["plan", model, "--gpus", "16", "--simulate", "--picture", str(tmp_path / "time.svg")]) == 0
    assert "4096 workers, in flight" in capsys.readouterr().out
    assert (tmp_path / "time.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpu", "h1000"], "there is no GPU 'h1000' in the table: choose one of b200, h200"),
        (["--longest", "10"], "the longest answer has 10 tokens and the mean one 1024"),
        (["--sample_gpus", "8"], "sample_gpus is 0 or below gpus (8)"),
        (["--picture", "x.svg"], "give simulate too"),
        (
            ["--simulate", "--picture", "/nowhere/x.svg"],
            "cannot be written to /nowhere/x.svg (No such file or directory)",
        ),
        (["--simulate", "--failures_per_day", "1e5"], "a worker fails every 0.864 s, so no step would end: give fewer"),
        (["--price", "-1"], "price must be 0 or more, got -1"),
    ],
)
def test_bad_input_is_one_sentence(model, capsys, words, sentence):
    assert main(["plan", model, *words]) == 2
    assert sentence in capsys.readouterr().err


def test_models_that_the_formulas_do_not_cover_are_refused(tmp_path, capsys):
    place = tmp_path / "config.json"
    for config, sentence in (
        ({**LLAMA, "num_experts": 8}, "is a mixture of experts (num_experts)"),
        ({"hidden_size": 3}, "is not that of a dense decoder: it has no num_attention_heads"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads is 0, not a number above 0"),
        ({**LLAMA, "vocab_size": "many"}, "vocab_size is 'many', not a number above 0"),
        ({**LLAMA, "hidden_size": 16}, "head_dim is 0, not a number above 0"),
        ([1], "is not a JSON object"),
    ):
        place.write_text(json.dumps(config))
        assert main(["plan", str(place)]) == 2
        assert sentence in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["plan", str(tmp_path / "empty")]) == 2
    assert "there is no config.json at" in capsys.readouterr().err


def test_every_gpu_has_its_source():
    assert all(device.source for device in DEVICES.values())
    assert all(device.flops / device.bandwidth > 10 for device in DEVICES.values())


def test_the_page_has_the_table_of_the_code():
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| ([\d.]+ \| [\d.]+ \| [\d.]+) \|", page, re.MULTILINE))
    found = {name: f"{d.flops / 1e12:g} | {d.memory / 1e9:g} | {d.bandwidth / 1e12:g}" for name, d in DEVICES.items()}
    assert {name: " | ".join(f"{float(x):g}" for x in row.split(" | ")) for name, row in rows.items()} == found
