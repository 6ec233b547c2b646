"""The command line read against the options."""

import pytest
from config_options import RunOptions

from rolecall.config.flags import parse
from rolecall.config.merge import FLAGS, make
from rolecall.config.schema import schema
from rolecall.errors import UserError


def given(*words):
    return parse(words, schema(RunOptions)).given


def options(*words):
    return make(RunOptions, given("--model.name", "m", *words), source=FLAGS)


def mistakes(*words):
    with pytest.raises(UserError) as caught:
        given(*words)
    return str(caught.value).splitlines()


def test_values_follow_or_are_joined():
    assert options("--optim.lr", "3e-4", "--steps=7").optim.lr == 3e-4
    assert options("--optim.lr", "3e-4", "--steps=7").steps == 7
    assert given("--part=a=b", "--part=--x", "--part=") == {"parts": ["a=b", "--x", ""]}


def test_a_negative_number_is_a_value():
    assert given("--optim.lr", "-1") == {"optim.lr": "-1"}


def test_the_last_one_wins():
    assert given("--steps", "1", "--steps", "2") == {"steps": "2"}


def test_dashes_stand_for_underscores():
    assert options("--eval-sampling.max-new-tokens", "3").eval_sampling.max_new_tokens == 3


def test_switches():
    assert options("--no-optim.fused").optim.fused is False
    assert options("--optim.fused", "false").optim.fused is False
    assert options("--optim.fused=true").optim.fused is True
    assert options("--no-optim.fused", "--optim.fused", "--steps", "3").optim.fused is True
    assert mistakes("--no-optim.fused=1") == ["--no-optim.fused takes no value, got '1'"]
    assert mistakes("--no-steps") == ["unknown option --no-steps: did you mean --steps?"]


def test_none_and_lists():
    assert options("--limit", "none").limit is None
    assert options("--ids", "1,2", "--ids", "3").ids == (1, 2, 3)
    assert options("--ids", "").ids == ()
    assert options("--part", "a,b", "--part", "c").parts == ("a,b", "c")
    assert options("--optim.betas", "0.8,0.9").optim.betas == (0.8, 0.9)
    assert options("--bits", "4").bits == 4


def test_mappings():
    assert options("--extra.enable_thinking", "false", "--extra.a-b", "1e-3").extra == {
        "enable_thinking": False,
        "a-b": 1e-3,
    }
    assert options("--extra", "{a: [1, x]}").extra == {"a": [1, "x"]}


def test_optional_sections():
    assert options("--model.lora").model.lora is not None
    assert options("--model.lora.rank", "3").model.lora.rank == 3
    assert options("--model.lora.rank", "3", "--no-model.lora").model.lora is None


def test_the_words_every_command_knows():
    line = parse(["--config", "x.yaml", "--preset=fast", "--dry-run"], schema(RunOptions))
    assert (line.config, line.preset, line.dry_run, line.help) == ("x.yaml", "fast", True, None)
    assert parse(["--help"], schema(RunOptions)).help == ""
    assert parse(["--nonsense", "--help", "optim"], schema(RunOptions)).help == "optim"


def test_each_mistake_is_one_sentence():
    assert mistakes("--optim.lrr", "1", "--stps=3", "--confg", "x", "--lr", "1", "--qqqq") == [
        "unknown option --optim.lrr: did you mean --optim.lr?",
        "unknown option --stps: did you mean --steps?",
        "unknown option --confg: did you mean --config?",
        "unknown option --lr: did you mean --optim.lr?",
        "unknown option --qqqq; --help lists all options",
    ]
    assert mistakes("--optim", "3") == [
        "--optim is a section: set --optim.lr, --optim.betas, --optim.schedule, --optim.fused"
    ]
    assert mistakes("--parts_", "a") == ["unknown option --parts_: did you mean --part?"]
    assert mistakes("optim.lr=1") == ["unexpected 'optim.lr=1': write it as --optim.lr=1"]
    assert mistakes("-steps", "1")[0] == "unexpected '-steps': write it as --steps"
    assert "an option is written --name value" in mistakes("stray")[0]
    assert mistakes("--steps", "--optim.lr", "1") == [
        "--steps needs a value; one that begins with dashes is written --steps=VALUE"
    ]
    assert mistakes("--config") == ["--config needs a file"]
    assert "--extra.x is not valid YAML" in mistakes("--extra.x", "[")[0]
