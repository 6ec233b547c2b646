"""Jobs take rows of any kind, evaluate on rows of their own, count passes, and resume streams exactly."""

import json

import datasets
import pandas
import polars
import pytest

import rolecall
from rolecall.cli import main
from rolecall.config.merge import ConfigError, resolve
from rolecall.config.parts import HeldOutOptions
from rolecall.config.rl import RLOptions
from rolecall.config.training import RMOptions, SFTOptions
from rolecall.errors import UserError
from rolecall.jobs.agents import episode_rows
from rolecall.jobs.data import preferences, prompt_rows, steps_of
from rolecall.tasks import find_task

DEMOS = [{"prompt": f"say {i}:", "completion": str(i)} for i in range(24)]
PROMPTS = [{"prompt": f"say {i}:", "answer": str(i)} for i in range(24)]
PAIRS = [{"prompt": f"say {i}:", "chosen": str(i), "rejected": "no"} for i in range(24)]
EVAL = [{"prompt": f"ask {i}:", "completion": "x", "answer": "x", "chosen": "x", "rejected": "y"} for i in range(3)]
SMALL = {"quiet": True, "seed": 1}
TRAIN = {"sft": DEMOS, "dpo": PAIRS, "rm": PAIRS, "rl": PROMPTS}


def settings(job):
    if job == "rl":

        def letters(completions, **kwargs):  # in here, so that its worker need not import this module
            return [float(sum(text.encode()) % 7) for text in completions]

        return {**SMALL, "prompts": 4, "samples": 2, "reward": letters, "sampling": {"max_new_tokens": 2}}
    return {**SMALL, "batch": 4}


def run(job, **given):
    return getattr(rolecall, job)(**{"rows": TRAIN[job], **settings(job), **given})


def streamed(job):
    return datasets.Dataset.from_list(TRAIN[job]).to_iterable_dataset()


def weights(found):
    return (found.path / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("job", ["sft", "dpo", "rm", "rl"])
def test_a_stream_is_resumed_bit_for_bit(job, tmp_path):
    """8 steps of 4 rows are more than the 24 rows of the stream: the second pass is resumed too."""
    whole = run(job, rows=streamed(job), steps=8, out=str(tmp_path / "whole"), **{"optim.schedule": "constant"})
    out = str(tmp_path / "parts")
    run(job, rows=streamed(job), steps=3, out=out, **{"optim.schedule": "constant"})
    parts = run(job, rows=streamed(job), steps=8, out=out, resume=True)
    assert weights(parts) == weights(whole)
    assert parts.metrics == whole.metrics
    assert json.loads((parts.path / "config.json").read_text())["rows"] == "(given in Python) a stream"


def test_streams_are_evaluated_on_what_they_hold_out(tmp_path):
    found = run(
        "rl", rows=streamed("rl"), steps=1, out=str(tmp_path / "r"), eval={"every": 1, "held_out": 0.3, "rows": 2}
    )
    assert found.evaluations[-1]["eval_failed"] == 0.0
    split = prompt_rows(streamed("rl"), HeldOutOptions(every=1, held_out=0.3, rows=50), seed=0)
    trained, held = ({row["prompt"] for row in rows} for rows in (split.train, split.test))
    assert held
    assert len(trained | held) == 24
    assert not trained & held


@pytest.mark.parametrize("job", ["sft", "dpo", "rm", "rl"])
def test_evaluation_rows_of_their_own(job, tmp_path):
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EVAL))
    how = {"epochs": 1, "eval.every": 6}
    by_name = run(job, out=str(tmp_path / "a"), **how, **{"eval.data": str(tmp_path / "eval.jsonl")})
    as_object = run(job, out=str(tmp_path / "b"), **how, eval_data=pandas.DataFrame(EVAL))
    assert len(by_name.evaluations) == 2
    assert by_name.evaluations == as_object.evaluations
    assert by_name.outcome.step == 6  # all 24 rows train
    main_number = {"sft": "eval_loss", "dpo": "eval_rewards/accuracies", "rm": "eval_accuracy", "rl": "eval_reward"}
    assert main_number[job] in by_name.evaluations[0]


def test_sft_keeps_the_checkpoint_with_the_smallest_loss_on_held_out_rows(tmp_path):
    found = run("sft", steps=6, out=str(tmp_path / "a"), optim={"lr": 1e-3}, eval={"every": 2, "held_out": 0.3})
    losses = [line["eval_loss"] for line in found.evaluations]
    assert losses[-1] < losses[0]
    assert found.outcome.best == min(losses[1:])


def test_sft_scores_answers_to_rows_of_the_users_with_a_reward(tmp_path):
    how = {"eval": {"every": 1, "reward": ["exact"]}, "max_new_tokens": 2}
    found = run("sft", steps=1, out=str(tmp_path / "a"), eval_data=EVAL, **how)
    assert {"eval_loss", "eval_reward", "eval_accuracy"} <= found.evaluations[-1].keys()


def test_the_test_split_of_the_data_is_what_is_evaluated_on():
    data = datasets.DatasetDict(
        train=datasets.Dataset.from_list(PROMPTS[:20]), test=datasets.Dataset.from_list(PROMPTS[20:])
    )
    found = prompt_rows(data, HeldOutOptions(every=1), seed=0)
    assert (list(found.train), list(found.test)) == (PROMPTS[:20], PROMPTS[20:])
    assert prompt_rows(data, HeldOutOptions(), seed=0).test is None


@pytest.fixture
def few_rows(monkeypatch):
    for where in ("data._TRAIN_ROWS", "data._TASK_PAIRS"):
        monkeypatch.setattr(f"rolecall.jobs.{where}", 200)


def prompts_of(rows):
    return [str(row["prompt"]) for row in rows]


@pytest.mark.parametrize("data", [None, "sorting"])
def test_a_task_is_evaluated_on_its_test_rows(data, few_rows):
    found = prompt_rows("addition", HeldOutOptions(every=1, rows=20, data=data), seed=0)
    assert prompts_of(found.test) == prompts_of(find_task(data or "addition").rows("test", n=20))
    assert not {*prompts_of(found.train)} & {*prompts_of(found.test)}


@pytest.mark.parametrize("data", [None, "addition:digits=1"])
def test_preferences_of_a_task_are_evaluated_on_its_test_rows(data, few_rows):
    options = resolve(
        RMOptions, [("test", {"rows": "addition:digits=1", "eval": {"every": 1, "rows": 5, "data": data}})]
    )
    train, test = preferences(options.options)
    assert len(test) == 5
    assert {*prompts_of(test)} <= {*prompts_of(find_task("addition:digits=1").rows("test", n=200))}
    assert not {*prompts_of(train)} & {*prompts_of(test)}


@pytest.mark.parametrize("data", [None, "calculator"])
def test_episodes_of_a_task_are_evaluated_on_its_test_rows(data):
    train, test = episode_rows("calculator", None, HeldOutOptions(every=1, rows=20, data=data), seed=0, n=200)
    assert len(test) == 20
    assert not {str(row) for row in train} & {str(row) for row in test}


def test_evaluation_rows_without_evaluations_are_refused():
    with pytest.raises(UserError, match=r"eval\.data is for evaluations, and there are none: give eval\.every too"):
        run("sft", steps=1, eval_data=EVAL)


@pytest.mark.parametrize("made", [pandas.DataFrame, polars.DataFrame, datasets.Dataset.from_list])
def test_the_same_rows_train_the_same_weights(made, tmp_path):
    listed = run("sft", steps=2, out=str(tmp_path / "list"))
    other = run("sft", rows=made(DEMOS), steps=2, out=str(tmp_path / "other"))
    assert weights(listed) == weights(other)


def test_rows_that_are_only_asked_may_be_streams(tmp_path):
    class Again:
        def __iter__(self):
            return iter(PROMPTS)

    how = {"reward": "exact", "sampling": {"max_new_tokens": 1}}
    assert len(rolecall.eval(model="tiny", rows=Again(), n=5, **how).answers) == 5
    best = rolecall.best_of_n(rows=Again(), count=3, n=2, out=str(tmp_path / "b"), quiet=True, **how)
    assert best.outcome.step == 1
    assert rolecall.audit(rows=Again(), groups=2, samples=2, **how)["prompts"].level == "ok"


# -- passes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "epochs", "per_step", "steps"), [(24, 1, 4, 6), (24, 0.5, 4, 3), (25, 2, 4, 13), (3, 1, 8, 1)]
)
def test_steps_of_passes(rows, epochs, per_step, steps):
    assert steps_of(SFTOptions(epochs=epochs), [None] * rows, per_step).steps == steps


def test_passes_and_their_resumption(tmp_path):
    out = str(tmp_path / "run")
    assert run("sft", epochs=0.5, out=out).outcome.step == 3
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 3
    assert run("sft", out=out, resume=True).outcome.step == 3
    assert run("sft", epochs=1, out=out, resume=True).outcome.step == 6
    assert run("sft", steps=7, out=out, resume=True).outcome.step == 7
    assert run("sft", extend=1, out=out, resume=True).outcome.step == 8
    whole = run("sft", epochs=1, out=str(tmp_path / "whole"), optim={"schedule": "constant"})
    run("sft", epochs=0.5, out=str(tmp_path / "half"), optim={"schedule": "constant"})
    half = run("sft", epochs=1, out=str(tmp_path / "half"), resume=True)
    assert weights(half) == weights(whole)


def test_passes_beside_steps():
    with pytest.raises(ConfigError, match="`steps` and `epochs` are both given; keep one"):
        run("sft", steps=2, epochs=1)
    layers = [("preset", {"steps": 5}), ("the call", {"epochs": 2})]
    assert resolve(RLOptions, layers).options.epochs == 2
    layers = [("a.yaml", {"epochs": 2}), ("the command line", {"steps": 5})]
    assert resolve(RLOptions, layers).options.epochs is None
    with pytest.raises(ValueError, match="epochs must be above 0"):
        SFTOptions(epochs=0)


def test_passes_over_a_stream_are_refused():
    with pytest.raises(UserError, match="the end of a stream is not known: give steps"):
        run("sft", rows=streamed("sft"), epochs=1)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["sft", "--epochs", "2"], "in all: 2 passes over the training rows, 2 x rows / 32 steps, rounded up"),
        (["rl", "--preset", "grpo", "--epochs", "1.5"], "in all: 1.5 passes over the training rows, 1.5 x rows / 16"),
        (["dpo", "--epochs", "1"], "in all: 1 passes"),
    ],
)
def test_the_plan_of_passes(command, line, capsys):
    assert main([*command, "--dry-run"]) == 0
    assert line in capsys.readouterr().out


# -- columns that are not used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "column", "value", "sentence"),
    [
        ("sft", "label", False, "`label` is not used to train: all completions are imitated"),
        ("sft", "weight", 0.5, "`weight` is not used to train: every row counts the same"),
        ("sft", "system", "Be kind.", "`system` is not used to train: it is not put before the prompt"),
        ("dpo", "margin", 0.5, "`margin` is not used to train: only `rolecall rm`"),
        ("rl", "images", ["a.png"], "`images` is not used to train: only rewards are given it"),
        ("rl", "environment", "maze", "`environment` is not used to train: it starts no environment"),
    ],
)
def test_a_column_with_a_meaning_is_not_dropped_in_silence(job, column, value, sentence, caplog, tmp_path):
    run(job, rows=[{**row, column: value} for row in TRAIN[job]], steps=1, out=str(tmp_path / "run"))
    assert sentence in caplog.text


@pytest.mark.parametrize("job", ["sft", "dpo", "rm"])
def test_pictures_are_refused(job):
    with pytest.raises(UserError, match=f"the rows have `images`, which {job} cannot show to the model"):
        run(job, rows=[{**row, "images": ["a.png"]} for row in TRAIN[job]], steps=1)


def test_conversations_beside_a_prompt_are_demonstrations(tmp_path):
    """As ultrachat has them."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert run("sft", rows=[{"prompt": "a", "messages": said}], steps=1, out=str(tmp_path / "r")).outcome.step == 1
