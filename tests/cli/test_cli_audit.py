"""`rolecall audit` as a user meets it: text, page, exit codes."""

import json
from pathlib import Path

import pytest

from rolecall.cli import main

QUICK = ["--groups", "2", "--samples", "2", "--sampling.max_new_tokens", "4"]


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(path, *lines):
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_warnings_are_shown_and_the_page_written(capsys):
    assert main(["audit", *QUICK, "--show", "1"]) == 0
    out, err = capsys.readouterr()
    assert "warning  groups" in out
    assert "change: start from a model that is right sometimes" in out
    assert "prompt       given                  -" in out
    assert "Trained: the policy chose this position and it counts in the loss." in out
    assert "0 errors" in out
    assert err == "page: runs/audit-1.html\n"
    assert Path("runs/audit-1.html").read_text().startswith("<!doctype html>")


def test_an_error_is_exit_code_1(capsys):
    file = rows("long.jsonl", {"prompt": "1" * 2000, "answer": "2"}, {"prompt": "1+1=", "answer": "2"})
    assert main(["audit", *QUICK, "--rows", file, "--reward", "exact", "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert "long.jsonl, line 1: 2000 tokens" in out
    assert "ok  " not in out
    assert err == ""


def test_pages_are_numbered_and_never_overwritten(capsys):
    for number in (1, 2):
        assert main(["audit", *QUICK]) == 0
        assert Path(f"runs/audit-{number}.html").is_file()
    Path("mine.html").write_text("kept")
    assert main(["audit", *QUICK, "--html", "mine.html"]) == 2
    assert "mine.html is there already: give another name, or overwrite" in capsys.readouterr().err
    assert Path("mine.html").read_text() == "kept"
    assert main(["audit", *QUICK, "--html", "mine.html", "--overwrite"]) == 0
    assert Path("mine.html").read_text() != "kept"
    assert main(["audit", *QUICK, "--no-page"]) == 0
    assert not Path("runs/audit-3.html").exists()


def test_a_file_in_place_of_the_directory_for_pages_is_a_sentence(capsys):
    Path("runs").write_text("")
    assert main(["audit", *QUICK]) == 2
    assert "runs is a file, and the page goes into a directory of that name" in capsys.readouterr().err


def test_the_settings_of_rl_are_those_of_audit(capsys):
    Path("my.yaml").write_text(
        "preset: ppo\nmodel: tiny\nrows: sorting:length=3\nsamples: 2\nout: runs/mine\nsampling: {max_new_tokens: 4}\n"
    )
    assert main(["rl", "--config", "my.yaml", "--dry-run"]) == 0
    trained = capsys.readouterr().out
    assert main(["audit", "--config", "my.yaml", "--dry-run"]) == 0
    audited = capsys.readouterr().out
    assert set(trained.splitlines()) <= set(audited.splitlines())
    assert main(["audit", "--config", "my.yaml", "--groups", "2", "--json", "--no-page"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["about"]["rows"] == "sorting:length=3"
    assert {"check", "level", "summary", "evidence", "advice"} == set(found["findings"][0])
    assert not Path("runs").exists()


def test_demonstrations(capsys):
    file = rows("demos.jsonl", {"prompt": "1+1=", "completion": "2"}, {"prompt": "1+2=", "completion": "3"})
    assert main(["audit", "--job", "sft", "--rows", file, "--max_length", "64", "--batch", "2", "--no-page"]) == 0
    out = capsys.readouterr().out
    assert "stop         trained" in out
    assert "0 errors, 0 warnings" in out


def test_what_would_act_on_a_terminal_is_shown(capsys):
    evil = "\x1b[31m<img src=x onerror=alert(1)></script>\u202e"
    file = rows("evil.jsonl", *[{"prompt": f"{evil}{i % 2}", "answer": evil} for i in range(4)])
    main(["audit", *QUICK, "--rows", file, "--reward", "exact"])
    out = capsys.readouterr().out
    page = Path("runs/audit-1.html").read_text()
    for text in (out, page):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "onerror" in out
    assert "<img" not in page
    assert page.count("</script>") == page.count("<script")


def test_half_a_pair_of_surrogates_is_a_finding_not_a_traceback(capsys):
    Path("half.jsonl").write_text('{"prompt": "a\\ud800=", "answer": "\\ud800"}\n{"prompt": "1+1=", "answer": "2"}\n')
    assert main(["audit", *QUICK, "--rows", "half.jsonl", "--reward", "exact", "--no-page"]) == 1
    out, err = capsys.readouterr()
    assert "half.jsonl, line 1" in out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "nowhere.jsonl"], "there is no file or folder nowhere.jsonl"),
        (["--model", "./nowhere"], "no such directory"),
        (["--groups", "0"], "groups must be at least 1"),
        (["--grops", "3"], "did you mean"),
        (["--gold_form", "no place"], "gold_form needs a {} where the row's answer goes"),
        (["--reward", "nowhere.py:f"], "there is no file"),
        (["--max_new_tokens", "9"], "max_new_tokens is a setting of sft; in rl it is sampling.max_new_tokens"),
        (["--job", "sft", "--reward", "exact"], "sft takes no reward"),
        (["--job", "dpo"], "must be one of rl, sft"),
        (["--html", "no/such/place.html"], "there is no directory no/such to write place.html to"),
        (["--html", ".", "--overwrite"], "is a directory"),
    ],
)
def test_a_wrong_call_is_one_sentence_and_exit_code_2(words, said, capsys):
    assert main(["audit", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
