"""The report's contents, who writes it, and what it says of a directory that is no whole run."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from look_runs import copied, demo_of, details_of, record, relog

import rolecall
from rolecall.cli import main
from rolecall.errors import UserError
from rolecall.experience.store import ROLLOUTS
from rolecall.look.losses import check_loss
from rolecall.look.page import Data, Section, page, text
from rolecall.look.records import choose, read_step, samples, shortened, spans_of
from rolecall.look.report import report_html
from rolecall.look.run import read_run
from rolecall.maths.roles import Role
from rolecall.types import Finish, Trajectory


def embedded(html, name):
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', html, re.DOTALL)
    return json.loads(found[1])


def trajectory(answer, *, score=0.0, **more):
    n = len(answer)
    return Trajectory(
        ids=(1, *range(n)),
        roles=(1, *(2,) * n),
        behaviour_logprobs=(float("nan"), *(-1.0,) * n),
        scores={"task": score},
        **more,
    )


def step_of(run, trajectories, details=None):
    details = details or [details_of([b"p", *(b"a",) * (len(t.ids) - 1)]) for t in trajectories]
    record(run, trajectories, details)
    files = read_run(run)
    return read_step(3, files.rollouts[3], files.updates[3])


def test_a_run_ends_with_its_report(run):
    html = (run / "report.html").read_text(encoding="utf-8")
    assert html == report_html(run)
    for shown in ("Before and after", "Curves", "Token by token", "What ran", "torch", "seed", "algorithm.clip_low"):
        assert shown in html
    assert re.search(r"<th scope=\"row\">reward</th>", html)
    for chart in ("Reward", "KL to the reference", "Entropy", "Length", "Truncation", "Clip fractions",
                  "Explained variance", "Gradient norm", "Time by phase"):  # fmt: skip
        assert f"<h4>{chart}</h4>" in html or f"<dt>{chart}" in html  # one that never changed is only listed
    assert html.index("<h4>Reward</h4>") < html.index("Numbers that never changed")


@pytest.mark.parametrize("command", ["sft", "rm"])
def test_sft_and_reward_models_have_a_report_too(tmp_path, command):
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(4)]
    if command == "rm":
        rows = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": "x"} for r in rows]
    made = getattr(rolecall, command)(model="tiny", rows=rows, steps=2, batch=2, out=str(tmp_path / "run"), quiet=True)
    html = made.report.read_text(encoding="utf-8")
    assert "so it records no rollouts" in html
    assert "<h4>Loss</h4>" in html


def test_a_report_that_cannot_be_written_does_not_spoil_the_run(tmp_path, monkeypatch, caplog):
    def broken(path):
        raise RuntimeError("no such luck")

    monkeypatch.setattr("rolecall.jobs.report.report_html", broken)
    made = rolecall.sft(
        model="tiny", rows=[{"prompt": "a", "completion": "b"}], steps=1, batch=1, out=str(tmp_path / "run"), quiet=True
    )
    assert made.outcome.exit_code == 0
    assert "was not written: no such luck; `rolecall report" in caplog.text


def test_chosen_rollouts_are_there_once_with_all_their_labels(run, tmp_path):
    held = step_of(
        copied(run, tmp_path / "run"),
        [
            trajectory("ab", score=1.0),
            trajectory("abcdef", score=0.5, finish=Finish.LENGTH),
            trajectory("a", score=-1.0),
        ],
    )
    chosen = choose(held, clip=(0.8, 1.2))
    assert chosen[0][0] == "best"
    assert chosen[2][0] == "worst"
    assert {"longest", "truncated", "most clipped", "pulls hardest"} <= set(chosen[1])
    assert sum("random" in labels for labels in chosen.values()) == 1
    assert not any("most clipped" in labels for labels in choose(held, clip=(0.5, 1.5)).values())


def test_a_group_is_shown_whole_while_there_is_room(run, tmp_path, monkeypatch):
    group = [trajectory("a" * 10, score=float(i == 0), group=7, episode=i) for i in range(6)]
    held = step_of(copied(run, tmp_path / "run"), group)
    how = {"clip": None, "kl_kind": "k1", "unit": "token"}
    whole, left = samples(held, **how)
    assert (len(whole), left) == (6, 0)
    assert len({sample.group for sample in whole}) == 1
    monkeypatch.setattr("rolecall.look.records.BUDGET", 45)
    some, left = samples(held, **how)
    assert left == 6 - len(some)
    assert left > 0
    assert [s.labels for s in some if s.labels] == [s.labels for s in whole if s.labels]


def test_turns_and_what_lies_between_them_have_their_authors():
    roles = [Role.PROMPT, Role.PROMPT, Role.CONTENT, Role.STOP, Role.OBSERVATION, Role.OBSERVATION, Role.CONTENT]
    row = {
        "roles": roles,
        "turns": [{"start": 2, "end": 4}, {"start": 6, "end": 7}],
        "author": "policy",
        "authors": [
            {"start": 0, "end": 2, "author": "prompt"},
            {"start": 2, "end": 4, "author": "policy"},
            {"start": 4, "end": 5, "author": "template"},
            {"start": 5, "end": 6, "author": "tool"},
            {"start": 6, "end": 7, "author": "policy"},
        ],
    }
    assert [(s.start, s.end, s.label) for s in spans_of(row)] == [
        (0, 2, "prompt"),
        (2, 4, "turn 1, policy"),
        (4, 5, "observation, template"),
        (5, 6, "observation, tool"),
        (6, 7, "turn 2, policy"),
    ]
    assert [s.label for s in spans_of(row | {"authors": None})][2] == "observation"


def test_a_prompt_is_named_by_its_end():
    chat = "<|im_start|>user\nHow many\n apples?<|im_end|>\n<|im_start|>assistant\n"
    assert shortened(chat) == "How many apples?"
    assert shortened("x" * 60 + " why?") == "…" + "x" * 42 + " why?"


def test_a_record_without_pieces_shows_ids_and_says_so(run, tmp_path):
    held = copied(run, tmp_path / "run")
    record(held, [trajectory("ab")], [replace(details_of([b"p", b"a", b"b"]), pieces=None)])
    html = report_html(held)
    assert "boxes show ids" in html
    assert embedded(html, "data-view")["sets"][0]["samples"][0]["texts"] == ["#1", "#0", "#1"]


def test_agents_of_an_episode_stand_side_by_side(run, tmp_path):
    held = copied(run, tmp_path / "run")
    two = [trajectory("abc", agent=name, episode=e) for e in (0, 1) for name in ("red", "blue")]
    record(held, two, [replace(details_of([b"x"] * 4), pieces=None, prompt_text="climbing") for _ in two])
    about = json.loads((held / "run.json").read_text()) | {"command": "marl"}
    (held / "run.json").write_text(json.dumps(about))
    view = embedded(report_html(held), "data-view")
    assert view["unit"] == "step"
    shown = view["sets"][0]["samples"]
    assert {(s["short"], s["group"]) for s in shown if s["group"].startswith("episode 0")} == {
        ("episode 0, red", "episode 0, “climbing”"),
        ("episode 0, blue", "episode 0, “climbing”"),
    }
    assert shown[0]["texts"] == ["1", "0", "1", "2"]


def test_the_sums_of_an_updates_file_and_the_loss_that_was_logged(run):
    files = read_run(run)
    lines = {line["step"]: line for line in files.steps}
    for step, path in files.updates.items():
        check = check_loss(pq.read_table(path), step=step, logged=lines[step]["loss"])
        assert len(check.minibatches) == 4
        assert abs(check.difference) < 1e-6
        assert check.agrees
        for term, coefficient in (("policy", 1.0), ("entropy", -0.01)):
            mean = sum(m.terms[term] for m in check.minibatches) / 4
            assert mean == pytest.approx(coefficient * lines[step][f"loss/{term}"], abs=1e-6)


def test_a_loss_that_is_not_the_sum_is_told(run, tmp_path):
    held = copied(run, tmp_path / "run")
    record(held, [trajectory("ab")], [details_of([b"p", b"a", b"b"])])
    assert "They agree" in report_html(held)
    relog(held, 3, loss=0.6)
    assert "something is wrong with the record" in report_html(held)
    about = json.loads((held / "run.json").read_text()) | {"processes": 2}
    (held / "run.json").write_text(json.dumps(about))
    assert "one process's share of several" in report_html(held).replace("&#x27;", "'")


def test_a_loss_that_is_not_finite_is_told(run, tmp_path):
    held = copied(run, tmp_path / "run")
    record(held, [trajectory("ab")], [details_of([b"p", b"a", b"b"])], loss=float("nan"))
    assert "the loss of this step was not finite" in report_html(held)


# --- what is not whole ---


def refused(path, capsys):
    """The one sentence for a directory that cannot be shown."""
    assert main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


def test_a_directory_that_is_no_run(tmp_path, capsys):
    assert "there is no run" in refused(tmp_path / "nowhere", capsys)
    assert "is not a run: it has no run.json; give a directory that" in refused(tmp_path, capsys)
    (tmp_path / "file").write_text("x")
    assert "is a file, not a run" in refused(tmp_path / "file", capsys)
    assert "there is no run" in refused("a\0b", capsys)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_run_of_a_newer_version(run, tmp_path, capsys):
    held = copied(run, tmp_path / "run")
    about = json.loads((held / "run.json").read_text())
    (held / "run.json").write_text(json.dumps(about | {"format": 9, "versions": {"rolecall": "7.0"}}))
    assert "is a run in format 9, written by rolecall 7.0; this is rolecall" in refused(held, capsys)
    (held / "run.json").write_text(json.dumps(about))
    path = sorted((held / "rollouts").iterdir())[-1]
    table = pq.read_table(path)
    facts = dict(table.schema.metadata) | {b"rolecall.schema_version": b"99"}
    pq.write_table(table.replace_schema_metadata(facts), path)
    assert f"in version 99, written by rolecall {rolecall.__version__}" in refused(held, capsys)
    assert ROLLOUTS.version < 99


def test_a_half_written_run(run, tmp_path, capsys):
    held = copied(run, tmp_path / "run")
    whole = (held / "metrics.jsonl").read_bytes()
    (held / "metrics.jsonl").write_bytes(b"")
    assert "has no finished step yet" in refused(held, capsys)
    (held / "metrics.jsonl").write_bytes(whole[:20])
    assert "has no finished step yet" in refused(held, capsys)
    (held / "metrics.jsonl").write_bytes(b'{"st\n' + whole)
    assert ", is not a JSON object; bring back a whole copy of it" in refused(held, capsys)
    (held / "metrics.jsonl").write_bytes(whole)
    config = (held / "config.json").read_bytes()
    (held / "config.json").write_bytes(config[:30])
    assert "config.json is torn or no JSON" in refused(held, capsys)
    (held / "config.json").unlink()
    assert "is half a run: it has no config.json" in refused(held, capsys)
    (held / "config.json").write_bytes(config)
    path = sorted((held / "rollouts").iterdir())[-1]
    path.write_bytes(path.read_bytes()[:100])
    assert "is not a whole Parquet file" in refused(held, capsys)
    (held / "run.json").unlink()
    assert "is half a run: it has no run.json" in refused(held, capsys)


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(run, tmp_path, capsys):
    held = copied(run, tmp_path / "run")
    whole = (held / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (held / "metrics.jsonl").write_bytes(b"".join(whole[:2]) + whole[2][:40])
    (held / ".lock").write_text("{}")
    assert main(["report", str(held)]) == 0
    html = (held / "report.html").read_text(encoding="utf-8")
    assert "1 of 3 steps, and a process still works on it" in html
    assert "The metrics have no loss for this step to compare with" in html


def test_a_run_without_rollouts_has_a_page_that_says_so(run, tmp_path, capsys):
    held = copied(run, tmp_path / "run")
    for path in (held / "rollouts").iterdir():
        path.unlink()
    assert main(["report", str(held)]) == 0
    assert "This run has no rollouts in its directory" in (held / "report.html").read_text(encoding="utf-8")


def test_a_demo_that_is_not_whole(run, tmp_path, capsys):
    held = demo_of(run, tmp_path / "demo")
    about = json.loads((held / "demo.json").read_text())
    (held / "demo.json").write_text(json.dumps(about | {"runs": ["../looked-at"]}))
    assert "does not name the demo's runs" in refused(held, capsys)
    (held / "demo.json").write_text(json.dumps(about | {"format": 2}))
    assert "is a run in format 2" in refused(held, capsys)
    (held / "demo.json").write_text(json.dumps(about | {"runs": ["sft", "dpo"]}))
    assert "there is no run" in refused(held, capsys)
    assert main(["report", str(held.parent / "nothing" / ".." / "demo" / "grpo")]) == 2


@pytest.mark.slow
def test_the_demos_own_report_is_small(tmp_path):
    made = rolecall.demo(out=str(tmp_path / "demo"), quiet=True)
    html = made.report.read_text(encoding="utf-8")
    assert made.report.stat().st_size < 2e6
    assert html == report_html(made.path)
    for stage in made.stages:
        assert f"{100 * stage.evaluation.numbers['accuracy']:.1f} %" in html
    assert html.count("They agree") == 2


def test_a_page_can_go_elsewhere_and_only_there(run, tmp_path, capsys):
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.startswith(f"report: {tmp_path / 'page.html'} (")
    assert main(["report", str(run), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert main(["report", str(run), "--out", str(tmp_path)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_link_in_place_of_the_page_is_replaced_not_followed(run, tmp_path):
    held = copied(run, tmp_path / "run")
    (tmp_path / "precious.txt").write_text("mine")
    (held / "report.html").symlink_to(tmp_path / "precious.txt")
    rolecall.report(held)
    assert (tmp_path / "precious.txt").read_text() == "mine"
    assert not (held / "report.html").is_symlink()


def test_png_writes_a_picture_for_each_curve(run, tmp_path, capsys):
    held = copied(run, tmp_path / "run")
    assert main(["report", str(held), "--png"]) == 0
    pictures = sorted(path.name for path in (held / "curves").iterdir())
    assert {"reward.png", "entropy.png", "time.png", "kl-to-the-reference.png"} <= set(pictures)
    assert (held / "curves" / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert f"{len(pictures)} pictures" in capsys.readouterr().out


def test_without_matplotlib_png_names_the_pip_command(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'rolecall\[plot\]'"):
        rolecall.report(copied(run, tmp_path / "run"), png=True)


def test_help_names_the_run_without_a_flag(capsys):
    assert main(["report", "--help"]) == 0
    assert "usage: rolecall report RUN ... [--option value ...]" in capsys.readouterr().out
    assert main(["report"]) == 2
    assert main(["report", "a", "b"]) == 2


def test_looking_loads_no_models():
    code = "import sys, rolecall.look.report; sys.exit(any(m in sys.modules for m in ('transformers', 'accelerate')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the shell ---


def test_data_cannot_leave_its_element():
    value = {"a": "</script><!--<script>\u2028&"}
    html = page(title="t", sections=[Section(id="s", title="s", body="")], data=[Data(id="d", value=value)])
    assert embedded(html, "d") == value
    assert html.count("</script>") == 2


def test_text_is_text():
    assert text("<a href='x'>\u202e\x1b&\"") == "&lt;a href=&#x27;x&#x27;&gt;\\u202e\\x1b&amp;&quot;"


def test_only_the_pages_own_script_and_style_may_act():
    html = page(title="t", sections=[])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    assert "http" not in re.sub(r"<meta http-equiv", "", html)
