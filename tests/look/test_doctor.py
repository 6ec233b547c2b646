"""What `rolecall doctor` finds in runs that were made sick, and in those that are not. benchmarks/doctor.py is the whole suite."""

import json
import shutil
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from look_rewards import noise, spread

import rolecall
from rolecall.cli import main
from rolecall.cli.commands import COMMANDS, imported
from rolecall.config.flags import parse
from rolecall.config.schema import schema
from rolecall.experience.parquet import table_of
from rolecall.experience.rollout_schema import UNCUT
from rolecall.look.doctor.audit import CHECKS, findings, findings_of
from rolecall.look.run import read_run

SMALL = {"model": "tiny", "rows": "sorting:length=2", "steps": 10, "prompts": 4, "samples": 4, "quiet": True}


PLANTED = {
    "lr-too-small": {"optim.lr": 1e-9},
    "lr-too-large": {"optim.lr": 0.1, "algorithm.epochs": 3},
    "truncation-wall": {"sampling.max_new_tokens": 1},
    "rounded-away": {"policy.dtype": "bfloat16", "optim.lr": 1e-7},
}


def run(place: Path, **settings) -> Path:
    return rolecall.rl(out=str(place), **(SMALL | {"sampling.max_new_tokens": 4, "save.every": 0} | settings)).path


def kinds(path: Path) -> list[str]:
    return [one.kind for one in findings(path)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def planted(place):
    """A run with a fault, made when it is first wanted."""
    return cache(lambda kind: run(place / kind, **({"reward": spread} | PLANTED[kind])))


@pytest.fixture(scope="module")
def healthy(place):
    """A model that ends its answers and gets some of them right, and goes on learning."""
    start = rolecall.sft(
        rows="sorting:length=2", steps=60, out=str(place / "start"), quiet=True, **{"optim.lr": 2e-3, "save.every": 0}
    ).path
    return run(place / "healthy", model=str(start), **{"optim.lr": 1e-4, "sampling.max_new_tokens": 6})


@pytest.fixture(scope="module")
def phantom(place):
    return run(place / "phantom", reward=noise)


@pytest.fixture(scope="module")
def game(place):
    settings = {"q.epsilon_steps": 10**8, "q.target_every": 10**6, "q.tau": None, "save.every": 0, "quiet": True}
    return rolecall.marl(env="climbing", algo="iql", steps=12, episodes=4, out=str(place / "game"), **settings).path


def test_nothing_is_found_in_a_healthy_run(healthy, capsys):
    assert findings(healthy) == []
    assert main(["doctor", str(healthy)]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert main(["doctor", str(healthy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_imitation_before_it_is_healthy_too(healthy, place):
    assert findings(place / "start") == []


def test_advantages_of_noise_are_found_and_shown(phantom):
    (found,) = [one for one in findings(phantom) if one.kind == "phantom-advantages"]
    assert found.setting == "--algorithm.scale batch"
    step, row, token = found.evidence[0]
    assert token is None
    shown = pq.read_table(phantom / "rollouts" / f"step-{step:06d}.parquet").slice(row, 1).to_pylist()[0]
    assert max(abs(a) for a in shown["advantages"]) > 0.5  # of full size, though scores differ by thousandths


def test_the_command_says_it_and_exits_1(phantom, capsys):
    assert main(["doctor", str(phantom)]) == 1
    out = capsys.readouterr().out
    assert "phantom-advantages" in out
    assert "try: --algorithm.scale batch" in out
    assert main(["doctor", str(phantom), "--json"]) == 1
    assert "phantom-advantages" in [one["kind"] for one in json.loads(capsys.readouterr().out)]


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_found(kind, planted):
    assert kind in kinds(planted(kind))


def test_faults_of_agents_that_learn_together_are_found(game):
    assert kinds(game) == ["epsilon-stuck", "stale-target"]


def test_every_setting_to_try_is_one_that_the_command_takes(phantom, game, planted):
    for path in (phantom, game, *map(planted, ("lr-too-small", "lr-too-large", "truncation-wall"))):
        command = next(c for c in COMMANDS if c.name == read_run(path).command)
        for one in findings(path):
            assert parse(one.setting.split(), schema(imported(command.options))).given


def test_a_run_that_goes_on_is_looked_at_as_far_as_it_is(place):
    """A process writes while another reads: what it finds is of whole steps."""
    out, seen = place / "going-on", []

    going = threading.Event()

    def keep_looking():
        while not going.wait(0.01):
            if (out / "metrics.jsonl").is_file() and (out / "metrics.jsonl").stat().st_size:
                seen.append([one.steps[1] for one in findings(out)])

    looking = threading.Thread(target=keep_looking)
    looking.start()
    try:
        run(out, reward=noise, **{"save.rollouts": 1})
    finally:
        going.set()
        looking.join()
    assert len(seen) > 1
    assert "phantom-advantages" in kinds(out)


WEIRD = (0, -1, 1e308, -1e308, float("nan"), None, [], {}, "x", True, 10**400, ["a", "b"])


def test_no_number_or_setting_of_a_file_stops_it(phantom, game):
    for path in (phantom, game):
        files = read_run(path)
        names = dict.fromkeys(name for line in files.steps for name in line if name != "step")
        for i, name in enumerate(names):
            for weird in WEIRD[i % 4 :: 4]:
                findings_of(replace(files, steps=[{**line, name: weird} for line in files.steps]))
                some = [{**line, name: weird} if line["step"] % 3 else line for line in files.steps]
                findings_of(replace(files, steps=some))
        for i, key in enumerate(files.config):
            findings_of(replace(files, config={**files.config, key: WEIRD[i % len(WEIRD)]}))


@pytest.fixture
def damaged(phantom, tmp_path):
    return Path(shutil.copytree(phantom, tmp_path / "run", ignore=shutil.ignore_patterns("model")))


def rewrite(path: Path, **columns) -> None:
    table = pq.read_table(path)
    changed = {name: columns.get(name, table[name]) for name in table.schema.names}
    pq.write_table(table_of(changed, UNCUT.schema).replace_schema_metadata(table.schema.metadata), path)


def test_a_damaged_record_is_left_out(damaged, caplog):
    newest = max((damaged / "rollouts").iterdir())
    newest.write_bytes(newest.read_bytes()[:-50])
    assert "phantom-advantages" in kinds(damaged)
    assert "is not a whole Parquet file" in caplog.text


def test_a_record_whose_lists_do_not_fit_is_left_out(damaged, caplog):
    newest = max((damaged / "rollouts").iterdir())
    rows = pq.read_table(newest).num_rows
    rewrite(newest, roles=[[2]] * rows)
    assert "phantom-advantages" in kinds(damaged)
    assert "another length than its ids" in caplog.text


@pytest.mark.parametrize(("score", "said"), [(1.0, False), (0.0, True)], ids=["right", "wrong"])
def test_flat_groups_are_a_finding_unless_most_of_them_have_the_best_score(score, said, damaged):
    for path in (damaged / "rollouts").iterdir():
        rows = pq.read_table(path).num_rows
        scores = [1.0 - score, score, *[score] * (rows - 2)]  # the first group is not flat
        rewrite(path, score=scores, total=scores)
    lines = [json.loads(line) for line in (damaged / "metrics.jsonl").read_text().splitlines()]
    flat = {"frac_reward_zero_std": 0.9, "reward": abs(score - 0.05), "reward_std": 0.2}
    (damaged / "metrics.jsonl").write_text("".join(json.dumps(line | flat) + "\n" for line in lines))
    assert ("flat-groups" in kinds(damaged)) == said


def test_strange_words_and_missing_scores_are_no_error(damaged):
    for path in (damaged / "rollouts").iterdir():
        rows = pq.read_table(path).num_rows
        rewrite(path, score=[None] * rows, total=[None] * rows, finish=["\x1b[31m"] * rows, group=[0] * rows)
    findings(damaged)


def test_what_a_run_says_is_no_control_character(damaged, capsys):
    lines = [json.loads(line) for line in (damaged / "metrics.jsonl").read_text().splitlines()]
    parts = {"rewards/\x1b[31m/std": 100.0}
    (damaged / "metrics.jsonl").write_text("".join(json.dumps(line | parts) + "\n" for line in lines))
    assert main(["doctor", str(damaged)]) == 1
    out = capsys.readouterr().out
    assert "of the variance of the reward" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("broken", ["empty", "no steps", "newer", "torn in the middle", "a file"])
def test_what_is_no_run_is_a_sentence(broken, damaged, capsys):
    if broken == "empty":
        shutil.rmtree(damaged)
        damaged.mkdir()
    elif broken == "no steps":
        (damaged / "metrics.jsonl").write_text('{"step": 0, "eval_reward": 1.0}\n')
    elif broken == "newer":
        about = json.loads((damaged / "run.json").read_text())
        (damaged / "run.json").write_text(json.dumps(about | {"format": 99}))
    elif broken == "torn in the middle":
        lines = (damaged / "metrics.jsonl").read_text().splitlines(keepends=True)
        (damaged / "metrics.jsonl").write_text("".join([lines[0], "{torn\n", *lines[1:]]))
    place = damaged / "run.json" if broken == "a file" else damaged
    assert main(["doctor", str(place)]) == 2
    said = capsys.readouterr().err
    assert str(damaged) in said
    assert "Traceback" not in said


def test_kinds_are_names_of_functions():
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)
