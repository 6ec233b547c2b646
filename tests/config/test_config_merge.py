"""Settings from presets, files and flags become one checked dataclass, or a sentence for each problem."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from config_options import Lora, Model, Optim, RunOptions

from rolecall.config.merge import FLAGS, ConfigError, make, resolve, to_dict
from rolecall.config.rl import RLOptions
from rolecall.config.sampling import Sampling
from rolecall.config.show import resolved_yaml

MODEL = {"model": {"name": "tiny"}}


def problems(settings, source="run.yaml"):
    with pytest.raises(ConfigError) as caught:
        make(RunOptions, settings, source=source)
    return list(caught.value.problems)


def test_what_is_not_set_is_the_default():
    assert make(RunOptions, MODEL) == RunOptions(model=Model(name="tiny"))


def test_later_layers_win_key_by_key():
    resolved = resolve(
        RunOptions,
        [
            ("preset fast", RunOptions.presets["fast"]),
            ("run.yaml", {"model": {"name": "tiny"}, "optim": {"lr": 1e-4}}),
            (FLAGS, {"optim.lr": "3e-4"}),
        ],
    )
    assert resolved.options.optim == Optim(lr=3e-4, schedule="cosine")
    assert resolved.options.steps == 10
    assert resolved.sources == {
        "model.name": "run.yaml",
        "optim.lr": FLAGS,
        "optim.schedule": "preset fast",
        "steps": "preset fast",
    }


def test_a_section_keeps_the_defaults_of_its_own_field():
    options = make(RunOptions, MODEL | {"eval_sampling": {"max_new_tokens": 5}})
    assert options.eval_sampling == Sampling(temperature=0.0, max_new_tokens=5)


def test_mappings_merge_by_key():
    layers = [("preset", {"extra": {"a": 1, "b": 2}}), (FLAGS, {"extra.b": 3, "extra.c": 4}), ("x", MODEL)]
    assert resolve(RunOptions, layers).options.extra == {"a": 1, "b": 3, "c": 4}


def test_an_optional_section_is_switched_on_by_its_settings_and_off_by_none():
    assert make(RunOptions, {"model": {"name": "m", "lora": {}}}).model.lora == Lora()
    assert make(RunOptions, {"model.name": "m", "model.lora.rank": 8}).model.lora == Lora(rank=8)
    on, off = {"model": {"lora": {"rank": 8}}}, {"model": {"lora": None}}
    assert resolve(RunOptions, [("a", MODEL), ("b", on), ("c", off)]).options.model.lora is None
    again = resolve(RunOptions, [("a", MODEL), ("b", on), ("c", off), ("d", {"model.lora.targets": ["q"]})])
    assert again.options.model.lora == Lora(targets=("q",))  # the rank went with what was switched off


def test_a_section_may_be_given_as_its_dataclass():
    options = RunOptions(model=Model(name="m", lora=Lora(rank=2)), optim=Optim(lr=1.0))
    assert make(RunOptions, {"model": options.model, "optim": options.optim}) == options


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optim": {"lr_": 1}}, "unknown key `optim.lr_` in run.yaml: did you mean `optim.lr`?"),
        ({"lr": 1}, "unknown key `lr` in run.yaml: did you mean `optim.lr`?"),
        ({"learning_rate": 1}, "unknown key `learning_rate` in run.yaml: did you mean `optim.lr`?"),
        ({"optim": {"learning_rate": 1}}, "unknown key `optim.learning_rate` in run.yaml: did you mean `optim.lr`?"),
        ({"step": 1}, "unknown key `step` in run.yaml: did you mean `steps`?"),
        ({"steps.x": 1}, "unknown key `steps.x` in run.yaml: did you mean `steps`?"),
        ({"zzz": 1}, "unknown key `zzz` in run.yaml; docs/config.md lists all keys"),
        ({7: 1}, "unknown key `7` in run.yaml; docs/config.md lists all keys"),
        ({"optim": 3}, "`optim` in run.yaml holds settings of its own, such as `optim.lr`; got 3"),
        ({"optim": {"lr": "fast"}}, "`optim.lr` in run.yaml must be a number, got 'fast'"),
        ({"optim": {"lr": float("nan")}}, "`optim.lr` in run.yaml must be a number, got nan"),
        ({"steps": 1.5}, "`steps` in run.yaml must be a whole number, got 1.5"),
        ({"steps": True}, "`steps` in run.yaml must be a whole number, got True"),
        ({"steps": None}, "`steps` in run.yaml must be a whole number, got None"),
        ({"limit": "all"}, "`limit` in run.yaml must be a whole number or none, got 'all'"),
        ({"model": {"name": 3}}, "`model.name` in run.yaml must be text, got 3"),
        (
            {"optim": {"schedule": "cosin"}},
            "`optim.schedule` in run.yaml must be one of constant, cosine, got 'cosin'; did you mean cosine?",
        ),
        ({"clip": "no"}, "`clip` in run.yaml must be auto or a number, got 'no'"),
        ({"bits": 5}, "`bits` in run.yaml must be one of 4, 8, got 5"),
        ({"parts": "one"}, "`parts` in run.yaml must be a list of text, got 'one'"),
        ({"optim": {"betas": [0.9]}}, "`optim.betas` in run.yaml must be a list of 2 times a number, got [0.9]"),
        ({"optim": {"lr": 1}, "optim.lr": 2}, "`optim.lr` in run.yaml is given twice; keep one"),
        ({"eval_sampling": {"temperature": -1}}, "`eval_sampling`: temperature must be 0 (greedy) or more, got -1.0"),
        ({"limit": 5}, "limit 5 is less than steps 100; raise it"),
    ],
)
def test_each_mistake_is_one_sentence(settings, sentence):
    assert problems(MODEL | settings) == [sentence]


def test_what_is_missing_is_named():
    assert problems({}) == ["`model.name` is missing: give --model.name, or `model.name` in a config file"]


def test_all_mistakes_are_told_together():
    assert len(problems({"stepz": 1, "optim": {"lr": "x", "fussed": 1}, "limit": "y"})) == 4


def test_numbers_may_come_as_text():
    options = make(RunOptions, MODEL | {"optim": {"lr": "1e-5"}, "steps": "7", "ids": ["1", "2"], "clip": "0.5"})
    assert (options.optim.lr, options.steps, options.ids, options.clip) == (1e-5, 7, (1, 2), 0.5)


def test_options_survive_json():
    options = RunOptions(
        model=Model(name="m", lora=Lora(targets=("q", "v"))),
        optim=Optim(lr=1e-7, betas=(0.8, 0.9)),
        ids=(),
        clip=0.2,
        parts=("1e-5", "off", "null", "é\n\u2028"),
        extra={"a": [1, {"b": None}], "c.d": "x"},
    )
    assert make(RunOptions, json.loads(json.dumps(to_dict(options)))) == options


def test_the_resolved_settings_read_back_and_name_their_sources():
    from rolecall.config.files import read_value

    layers = [
        ("preset adapters", RunOptions.presets["adapters"]),
        ("run.yaml", {"model": {"name": "off"}, "parts": ["1e-5", "a: b", "# x"], "clip": 1e-7}),
        (FLAGS, {"extra.b": 3}),
    ]
    resolved = resolve(RunOptions, layers)
    text = resolved_yaml(resolved)
    assert make(RunOptions, read_value(text, where="it")) == resolved.options
    lines = [line.split("  # ") for line in text.splitlines()]
    assert [pair[1] for pair in lines if pair[0].strip().startswith("rank:")] == ["preset adapters"]
    assert [len(pair) for pair in lines if pair[0].strip().startswith("steps:")] == [1]


def test_options_stay_frozen_and_checked():
    options = make(RunOptions, MODEL)
    with pytest.raises(ValueError, match="raise it"):
        replace(options, limit=1)


def test_a_path_is_text():
    assert make(RLOptions, {"model": Path("runs/start")}).model == "runs/start"
