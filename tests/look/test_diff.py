"""`rolecall diff` on pairs of real short runs that differ in one planted cause, and on edited copies of one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from look_rewards import bonus

import rolecall
from rolecall.cli import main
from rolecall.look.diff.seeds import t_quantile
from rolecall.train.step import Term, trained

ROWS = [{"prompt": f"say {a}{b}", "bonus": 0.0} for a in "abcde" for b in "12345"]


def run(place: Path, rows=ROWS, **settings) -> Path:
    how = {"model": "tiny", "steps": 6, "prompts": 4, "samples": 2, "quiet": True, "reward": bonus, "rows": rows}
    how |= {"sampling.max_new_tokens": 4, "optim.lr": 1e-3, "save.every": 0, "save.updates": 20}
    return rolecall.rl(out=str(place), **(how | settings)).path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("diff")


@pytest.fixture(scope="module")
def first(place):
    return run(place / "first")


def parting(a: Path, b: Path):
    (pair,) = rolecall.diff(a, b).pairs
    return pair.followed.parting


def step_of(path: Path, *prompts: str) -> int:
    """The first step that answers one of these prompts."""
    for file in sorted((path / "rollouts").iterdir()):
        if set(prompts) & set(pq.read_table(file)["prompt_text"].to_pylist()):
            return int(file.stem.removeprefix("step-"))
    raise AssertionError(f"no step of {path} answers any of {prompts}")


def test_the_same_command_twice_is_the_same(first, place, capsys):
    again = run(place / "again")
    assert main(["diff", str(first), str(again)]) == 0
    out = capsys.readouterr().out
    assert "the same in all 6 steps" in out
    assert "weights at start: the same" in out
    assert main(["diff", str(first), str(again), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True


def test_one_reward_value(first, place):
    chosen = pq.read_table(first / "rollouts" / "step-000004.parquet")["prompt_text"].to_pylist()[0]
    rows = [{**row, "bonus": 0.25 if row["prompt"] == chosen else 0.0} for row in ROWS]
    found = parting(first, run(place / "reward", rows))
    assert (found.step, found.kind) == (step_of(first, chosen), "reward")
    answers = pq.read_table(first / "rollouts" / f"step-{found.step:06d}.parquet")["prompt_text"].to_pylist()
    assert answers[found.answer] == chosen
    assert "'bonus'" in found.sentence


def test_the_order_of_two_rows(first, place):
    rows = list(ROWS)
    rows[3], rows[20] = rows[20], rows[3]
    (pair,) = rolecall.diff(first, run(place / "order", rows)).pairs
    found = pair.followed.parting
    assert (found.step, found.kind) == (step_of(first, rows[3]["prompt"], rows[20]["prompt"]), "order")
    assert pair.followed.order is False
    assert pair.followed.weights is True


def test_another_row(first, place):
    rows = [{**row, "prompt": "say zz"} if i == 7 else row for i, row in enumerate(ROWS)]
    found = parting(first, run(place / "row", rows))
    assert (found.step, found.kind) == (step_of(first, ROWS[7]["prompt"]), "data")


@pytest.mark.parametrize(
    ("setting", "value", "kind"),
    [
        ("optim.lr", 2e-3, "setting"),
        ("sampling.temperature", 0.9, "sampling"),
        ("algorithm.scale", "batch", "advantage"),
        ("optim.beta1", 0.5, "gradient"),
    ],
)
def test_one_setting(setting, value, kind, first, place):
    (pair,) = rolecall.diff(first, run(place / setting, **{setting: value})).pairs
    found = pair.followed.parting
    assert (found.step, found.kind) == (1, kind)
    assert [changed.name for changed in pair.settings] == [setting]
    assert f"{setting} is the only setting that differs" in pair.cause


def test_the_number_of_threads(place):
    """A sum over a million numbers is made in parts, one for each thread: the last bits of the loss differ."""

    def loss(outputs, batch):
        mask, numbers = trained(batch), torch.arange(1e6)
        pull = -batch.advantages * outputs.logprobs * torch.dot(numbers.sin(), numbers.cos())
        return {"policy": Term(values=pull.where(mask, 0), mask=mask, mode="token-mean")}

    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append(run(place / f"threads-{threads}", loss=loss, steps=2))
    finally:
        torch.set_num_threads(before)
    (pair,) = rolecall.diff(*made).pairs
    assert (pair.followed.parting.step, pair.followed.parting.kind) == (1, "loss")
    assert pair.cause == "all settings are the same; threads differs"


def edited(first: Path, place: Path, column: str, change, *, folder: str = "rollouts", step: int = 3) -> Path:
    """A copy of the run in which `change` has gone over a column of a step's file, row by row."""
    copy = Path(shutil.copytree(first, place, ignore=shutil.ignore_patterns("model")))
    path = copy / folder / f"step-{step:06d}.parquet"
    table = pq.read_table(path)
    field = table.schema.field(column)
    changed = pa.array([change(i, held) for i, held in enumerate(table[column].to_pylist())], field.type)
    pq.write_table(table.set_column(table.schema.get_field_index(column), field, changed), path)
    return copy


def at(row: int, token: int, change):
    """Changes one entry of one row's list."""
    return lambda i, held: (
        [change(v) if t == token % len(held) else v for t, v in enumerate(held)] if i == row else held
    )


EDITS = {
    "sampled token": ("ids", at(2, -1, lambda v: v + 1), (2, -1)),
    "log-prob": ("behaviour_logprobs", at(2, -2, lambda v: v - 1e-6), (2, -2)),
    "random number": ("seed", lambda i, v: v + (i == 1), (1, None)),
    "finish": ("finish", lambda i, v: "timeout" if i == 3 else v, (3, None)),
    "advantage": ("advantages", at(5, -1, lambda v: v + 0.1), (5, -1)),
    "verdict": ("verdicts", at(4, -1, lambda v: 6), (4, -1)),
}


@pytest.mark.parametrize("kind", EDITS)
def test_what_differs_in_a_record_is_named_with_its_place(kind, first, tmp_path):
    column, change, (row, token) = EDITS[kind]
    found = parting(first, edited(first, tmp_path / "run", column, change))
    assert (found.step, found.kind, found.answer) == (3, kind, row)
    if token is not None:
        length = len(pq.read_table(first / "rollouts" / "step-000003.parquet")["ids"][row].as_py())
        assert found.token == length + token


def test_what_an_optimiser_step_did_differently(first, tmp_path):
    change = at(0, -1, lambda v: v * 2 + 1e-3)
    found = parting(first, edited(first, tmp_path / "run", "contribution_policy", change, folder="updates"))
    assert (found.step, found.kind) == (3, "loss")
    assert "share of the policy loss" in found.sentence


def test_other_weights_at_the_start(first, place):
    start = rolecall.sft(rows="sorting", steps=1, out=str(place / "start"), quiet=True, batch=2).path
    (pair,) = rolecall.diff(first, run(place / "weights", model=str(start), steps=1)).pairs
    assert pair.followed.weights is False
    assert (pair.followed.parting.step, pair.followed.parting.kind) == (1, "weights")


def test_without_a_record_the_numbers_tell(first, tmp_path, capsys):
    copy = Path(shutil.copytree(first, tmp_path / "run", ignore=shutil.ignore_patterns("model", "rollouts", "updates")))
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines[3] |= {"grad_norm": 7.5, "loss/grad_norm": 7.5}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = parting(first, copy)
    assert (found.step, found.kind, found.recorded) == (4, "gradient", False)
    assert main(["diff", str(first), str(copy)]) == 1
    out = capsys.readouterr().out
    assert "they part at step 4: gradient" in out
    assert "nothing is recorded of the answers of that step" in out


def test_a_damaged_record_is_compared_without(first, tmp_path, caplog):
    copy = Path(shutil.copytree(first, tmp_path / "run", ignore=shutil.ignore_patterns("model")))
    path = copy / "rollouts" / "step-000002.parquet"
    path.write_bytes(path.read_bytes()[:100])
    assert parting(first, copy) is None
    assert "is not a whole Parquet file" in caplog.text


def test_lists_of_other_lengths_stop_nothing(first, tmp_path):
    for column in ("ids", "roles", "verdicts", "behaviour_logprobs", "rewards", "advantages", "pieces"):
        for i, change in enumerate((lambda i, held: held[:-1], lambda i, held: [])):
            assert parting(first, edited(first, tmp_path / f"{column}{i}", column, change)).step == 3
    gone = edited(first, tmp_path / "gone", "advantages", lambda i, held: None)
    assert "and nothing" in parting(first, gone).sentence


def test_answers_that_are_given_are_not_called_sampled(place):
    """Imitation keeps no record of answers: the first number that differs is of the data or the loss."""
    how = {"steps": 3, "batch": 4, "quiet": True, "save.every": 0}
    made = [rolecall.sft(rows=f"sorting:length={n}", out=str(place / f"sft-{n}"), **how).path for n in (2, 3)]
    (pair,) = rolecall.diff(*made).pairs
    assert (pair.followed.parting.step, pair.followed.parting.kind) == (1, "data")
    assert pair.followed.order is None


def test_a_shorter_run_is_the_same_as_far_as_it_goes(first, place):
    (pair,) = rolecall.diff(first, run(place / "shorter", steps=2)).pairs
    assert pair.followed.parting is None
    assert pair.followed.steps == 2
    assert [changed.name for changed in pair.settings] == ["steps"]


# -- several seeds ----------------------------------------------------------------------------------------------------


def fake(place: Path, seed: int, lr: float, reward: float) -> Path:
    """A run with nothing but numbers."""
    place.mkdir(parents=True)
    (place / "run.json").write_text(json.dumps({"format": 1, "command": "rl", "seed": seed, "versions": {}}))
    (place / "config.json").write_text(json.dumps({"seed": seed, "optim": {"lr": lr}}))
    rng = np.random.default_rng(seed)
    numbers = [{"step": s + 1, "reward": reward + 0.01 * rng.normal(), "kl": 0.1 * rng.normal()} for s in range(20)]
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in numbers))
    return place


def sides(tmp_path: Path, better: float) -> list[str]:
    one = [fake(tmp_path / f"a{seed}", seed, 1e-4, 0.5 + 0.02 * seed) for seed in range(3)]
    two = [fake(tmp_path / f"b{seed}", seed, 1e-3, 0.5 + 0.02 * seed + better) for seed in range(3)]
    return [str(path) for path in (*one, *two)]


def test_seeds_are_found_by_equal_settings(tmp_path, capsys):
    assert main(["diff", *sides(tmp_path, 0.3)]) == 1
    out = capsys.readouterr().out
    assert "3 against 3 runs: reward differs by more than noise" in out
    assert "optim.lr: 0.0001 and 0.001" in out


def test_a_difference_of_noise_is_called_so(tmp_path, capsys):
    paths = sides(tmp_path, 0.01)
    assert main(["diff", *paths[:3], "--against", *paths[3:], "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["sides"]
    (reward,) = [one for one in found["metrics"] if one["name"] == "reward"]
    assert reward["interval"][0] < 0 < reward["interval"][1]
    assert reward["more_than_noise"] is False
    assert found["sentence"] == "3 against 3 runs: no difference is more than noise"


@pytest.mark.parametrize(
    ("share", "freedom", "value"), [(0.975, 1, 12.706), (0.975, 2, 4.3027), (0.975, 4, 2.7764), (0.95, 10, 1.8125)]
)
def test_quantiles_of_students_t(share, freedom, value):
    assert t_quantile(share, freedom) == pytest.approx(value, rel=1e-3)


def test_the_interval_is_welchs(tmp_path):
    """By hand: means 1 and 3, variances 1 and 4 of 3 runs, error sqrt(5 / 3), 2.94 degrees of freedom, t = 3.218."""
    for name, lr, values in (("a", 1.0, (0, 1, 2)), ("b", 2.0, (1, 3, 5))):
        for seed, value in enumerate(values):
            place = fake(tmp_path / f"{name}{seed}", seed, lr, 0.0)
            (place / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": value}) + "\n")
    found = rolecall.diff(*sorted(tmp_path.iterdir())).sides[0].metrics[0]
    assert found.difference == 2
    assert found.interval == pytest.approx((2 - 4.154, 2 + 4.154), abs=5e-3)


# -- bad input --------------------------------------------------------------------------------------------------------


def newer(path: Path) -> None:
    about = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(about | {"format": 99}))


def other_command(path: Path) -> None:
    about = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(about | {"command": "sft"}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shutil.rmtree, "there is no run"),
        (lambda path: (path / "run.json").unlink(), "is half a run"),
        (lambda path: (path / "metrics.jsonl").write_text(""), "has no finished step yet"),
        (newer, "install a newer one"),
        (other_command, "give runs of one command"),
        (lambda path: (path / "config.json").write_text("{torn"), "is torn or no JSON"),
    ],
    ids=["no run", "half a run", "no step", "newer", "other command", "torn"],
)
def test_what_cannot_be_compared_is_a_sentence(damage, said, tmp_path, capsys):
    paths = [fake(tmp_path / name, 0, 1e-4, 0.5) for name in "ab"]
    damage(paths[1])
    assert main(["diff", *map(str, paths)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(("count", "said"), [(0, "runs"), (1, "nothing to compare with"), (2, "given twice")])
def test_too_few_runs_is_a_sentence(count, said, tmp_path, capsys):
    path = fake(tmp_path / "a", 0, 1e-4, 0.5)
    assert main(["diff", *[str(path)] * count]) == 2
    assert said in capsys.readouterr().err


def test_numbers_that_are_none_stop_nothing(tmp_path):
    paths = [fake(tmp_path / name, 0, 1e-4, 0.5) for name in "ab"]
    lines = [{"step": 1, "reward": "nan", "x": []}, {"step": 1.5, "reward": None}, {"step": 3, "reward": 10**400}]
    for path in paths:
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert parting(*paths) is None


def test_it_imports_no_torch(tmp_path):
    paths = [fake(tmp_path / name, 0, 1e-4, 0.5) for name in "ab"]
    code = f"import sys; from rolecall.cli import main; main(['diff', {str(paths[0])!r}, {str(paths[1])!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
