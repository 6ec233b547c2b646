"""Pushing a run: the folder, its card, and what a hub is sent."""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

import rolecall
from rolecall.cli import main
from rolecall.config.files import read_settings
from rolecall.config.flags import parse
from rolecall.config.merge import resolve
from rolecall.config.rl import RLOptions
from rolecall.config.schema import schema
from rolecall.errors import UserError
from rolecall.look.card import markdown, model_card
from rolecall.look.run import read_run

SHORT = {"steps": 2, "prompts": 2, "samples": 2, "sampling.max_new_tokens": 4, "quiet": True}
TASK = "sorting:length=2"
ROWS = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(4)]
OTHERS = {
    "sft": {"rows": ROWS, "batch": 2, "epochs": 1},
    "rm": {"rows": TASK, "batch": 2, "steps": 1, "eval": {"every": 1, "rows": 4}},
    "dpo": {"rows": TASK, "batch": 2, "steps": 1},
    "expert-iteration": {
        "rows": TASK,
        "keep": "best",
        "prompts": 2,
        "samples": 2,
        "steps": 1,
        "sampling.max_new_tokens": 2,
    },
    "marl": {"env": "climbing", "algo": "ippo", "steps": 1},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("push") / "run"
    settings = {"eval.every": 2, "eval.rows": 4, "optim.lr": 1e-3, "algorithm.entropy_coef": 0.01}
    return rolecall.rl(rows="sorting:length=2", out=str(out), **SHORT, **settings).path


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    pushed = rolecall.push(run, "me/sorter", out=str(tmp_path_factory.mktemp("out") / "folder"), dry_run=True)
    assert pushed.url is None
    return pushed.folder


def front(card):
    _, head, body = card.split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_folder_holds_model_tokenizer_card_and_report(run, folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    there = {file.name for file in folder.iterdir()}
    assert {file.name for file in (run / "model").iterdir()} - there == {"manifest.json"}
    assert "<title>" in (folder / "report.html").read_text()
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_the_card_says_what_the_run_was(run, folder):
    head, body = front((folder / "README.md").read_text())
    assert head == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rolecall", "rl", "grpo"],
    }
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scored = next(line for line in reversed(last) if "eval_reward" in line)
    assert f"| {scored['eval_reward']:.4g} |" in body
    assert "| base model | tiny |" in body
    assert "| data | sorting:length=2 |" in body
    assert "`accuracy` is the share of greedy answers that score 1 or more" in body
    assert "| steps | reward |" in body
    assert "| 1 to 1 |" in body
    assert json.loads((run / "run.json").read_text())["versions"]["torch"] in body


def test_the_command_of_the_card_makes_the_same_run_again(run, folder, monkeypatch):
    _, body = front((folder / "README.md").read_text())
    words = next(line for line in body.splitlines() if line.startswith("rolecall rl ")).split()
    line = parse(words[2:], schema(RLOptions))
    monkeypatch.chdir(folder)
    options = resolve(RLOptions, [("file", read_settings(line.config))]).options
    assert options == resolve(RLOptions, [("run", json.loads((run / "config.json").read_text()))]).options
    assert options.steps == 2


def trained(command, out):
    return getattr(rolecall, command.replace("-", "_"))(out=str(out), quiet=True, **OTHERS[command]).path


@pytest.mark.parametrize("command", ["sft", "rm", "dpo", "expert-iteration"])
def test_every_kind_of_run_that_makes_a_model_is_pushed(command, tmp_path, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    folder = rolecall.push(trained(command, tmp_path / "run"), "me/mine", dry_run=True).folder
    loads = AutoModelForSequenceClassification if command == "rm" else AutoModelForCausalLM
    assert loads.from_pretrained(folder).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert "<title>" in (folder / "report.html").read_text()
    head, body = front((folder / "README.md").read_text())
    assert head["pipeline_tag"] == ("text-classification" if command == "rm" else "text-generation")
    assert head["tags"] == ["rolecall", command]
    assert "| base model | tiny |" in body
    assert "| data | (given in Python)" in body if command == "sft" else f"| data | {TASK} |" in body
    assert ("| reward | that of the task" in body) == (command == "expert-iteration")
    assert ("| accuracy |" in body) == (command == "rm")
    if command == "rm":
        assert "share of greedy answers" not in body, "its accuracy is that of pairs"
    monkeypatch.chdir(folder)
    line = next(line for line in body.splitlines() if line.startswith(f"rolecall {command} ")).split()
    rows = ["--rows", TASK] if command == "sft" else []
    assert main([*line[1:], *rows, "--dry-run"]) == 0, capsys.readouterr().err
    shown = yaml.safe_load((folder / "rolecall.yaml").read_text())
    assert shown["steps"] == (2 if command == "sft" else 1)
    assert shown.get("epochs") == (2 if command == "expert-iteration" else None)


def test_a_run_without_a_language_model_is_not_pushed(tmp_path):
    with pytest.raises(
        UserError, match="is a run of marl, which makes no language model; push one of sft, rm, rl, dpo"
    ):
        rolecall.push(trained("marl", tmp_path / "run"), "me/mine", dry_run=True)


@pytest.mark.parametrize(
    ("model", "rows", "wanted"),
    [
        ("org/base-1", "org/data", {"base_model": "org/base-1", "datasets": ["org/data"]}),
        ("/home/me/base", "/home/me/data.jsonl", {}),
    ],
)
def test_only_what_is_on_the_hub_is_named_in_the_cards_head(run, tmp_path, model, rows, wanted):
    copy = changed(run, tmp_path / "run", model=model, rows=rows)
    (copy / "model").mkdir()
    folder = rolecall.push(copy, "me/x", dry_run=True).folder
    head, body = front((folder / "README.md").read_text())
    assert {name: head[name] for name in ("base_model", "datasets") if name in head} == wanted
    assert "/home/me" not in body


def changed(run, place, **config):
    shutil.copytree(run, place, ignore=shutil.ignore_patterns("model", "checkpoints", "push"))
    held = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**held, **config}))
    return place


def test_the_base_of_a_chain_of_runs_is_where_it_began(run, tmp_path):
    first = changed(run, tmp_path / "first", model="org/base-1")
    second = changed(run, tmp_path / "second", model=str(first))
    (second / "model").mkdir()
    head, _ = front((rolecall.push(second, "me/x", dry_run=True).folder / "README.md").read_text())
    assert head["base_model"] == "org/base-1"


def test_text_of_the_run_stays_text_in_the_card(run, tmp_path):
    hostile = "<img src=x onerror=alert(1)> | `a` [b](javascript:c)\n---\n# d ````"
    copy = changed(run, tmp_path / "run", rows=hostile, model=hostile)
    head, body = front(model_card(read_run(copy), repo="me/x", base=hostile))
    assert head["library_name"] == "transformers"
    outside = body.split("## Settings")[0]
    assert "<img" not in outside
    assert "[b](" not in outside
    assert "\n# d" not in outside
    assert "`````yaml" in body, "a longer fence than any in the settings"
    assert markdown("a|b\n_c_") == r"a\|b \_c\_"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda place, run: changed(run, place),
            "has no final model yet: let it end, or resume it with rolecall rl --out",
        ),
        (lambda place, run: place, "there is no run"),
        (lambda place, run: (place.mkdir(), (place / "demo.json").write_text("{}"), place)[2], "demo of several runs"),
    ],
)
def test_what_cannot_be_pushed_is_a_sentence(run, tmp_path, make, said):
    with pytest.raises(UserError, match=said):
        rolecall.push(make(tmp_path / "run", run), "me/x", dry_run=True)


def test_a_wrong_name_or_a_foreign_folder_is_refused(run, tmp_path):
    with pytest.raises(UserError, match="is not a hub id, such as me/my-model"):
        rolecall.push(run, "me/my model", dry_run=True)
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="was not written by push; give another folder"):
        rolecall.push(run, "me/x", out=str(tmp_path), dry_run=True)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_offline_the_folder_is_kept_and_named(run, capsys):
    assert main(["push", str(run), "me/x"]) == 75  # the tests' environment says HF_HUB_OFFLINE
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert f"the folder is kept in {run / 'push'}" in said
    assert (run / "push" / "README.md").is_file()


def test_dry_run_on_the_command_line_writes_the_folder(run, capsys, tmp_path):
    assert main(["push", str(run), "me/x", "--dry-run", "--out", str(tmp_path / "there")]) == 0
    assert f"folder: {tmp_path / 'there'}" in capsys.readouterr().out
    assert (tmp_path / "there" / "model.safetensors").is_file()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files needs."""

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        server = self.server
        if self.headers.get("authorization") != "Bearer hf_test":
            return self.answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            server.created.append(json.loads(body))
            return self.answer(200, {"url": f"http://{self.headers['host']}/me/sorter", "id": "1", "name": "me/sorter"})
        if self.path == "/api/models/me/sorter/preupload/main":
            asked = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in asked]
            return self.answer(200, {"files": modes})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if self.path.startswith("/api/models/me/sorter/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            oid = "a" * 40
            url = f"http://{self.headers['host']}/me/sorter/commit/{oid}"
            return self.answer(200, {"commitUrl": url, "commitOid": oid, "success": True})
        return self.answer(404, {"error": self.path})

    def do_GET(self):
        self.answer(200 if "revision" in self.path else 404, {"id": "me/sorter", "sha": "a" * 40, "siblings": []})

    def answer(self, code, value):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.created, server.files = [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def pushed(run, hub, home, *words, token="hf_test"):
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home), "HF_TOKEN": token}
    call = [sys.executable, "-m", "rolecall", "push", str(run), "me/sorter", *words]
    return subprocess.run(call, env=env, capture_output=True, text=True, timeout=120)


def test_a_hub_gets_every_file_of_the_folder(run, hub, tmp_path):
    done = pushed(run, hub, tmp_path, "--out", str(tmp_path / "folder"))
    assert done.returncode == 0, done.stderr
    assert "/me/sorter" in done.stdout
    assert hub.created[0]["name"] == "sorter"
    assert "private" in json.dumps(hub.created[0])
    sent = {file.name: file.read_bytes() for file in (tmp_path / "folder").iterdir() if not file.name.startswith(".")}
    assert {
        "README.md",
        "report.html",
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "rolecall.yaml",
    } <= sent.keys()
    assert {name: held for name, held in hub.files.items() if name != ".gitattributes"} == sent


def test_who_is_not_logged_in_is_told_so(run, hub, tmp_path):
    done = pushed(run, hub, tmp_path, token="hf_wrong")
    assert done.returncode == 1
    assert "you are not logged in to the hub: `hf auth login`, or set HF_TOKEN; the folder is kept in" in done.stderr
    assert "Traceback" not in done.stderr
    assert not hub.files


def test_a_hub_that_is_not_there_is_said_in_a_sentence(run, hub, tmp_path):
    hub.shutdown()
    hub.server_close()
    done = pushed(run, hub, tmp_path)
    assert done.returncode == 75
    assert "the hub cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
