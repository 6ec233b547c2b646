"""`rolecall serve --vllm` with a stand-in for vLLM: the command that starts it, who is let in, and how it ends."""

import asyncio
import json
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolecall.config.parts import EngineOptions
from rolecall.config.use import ServeOptions
from rolecall.errors import UserError
from rolecall.jobs.serve import run
from rolecall.policy.load import load, save
from rolecall.serving.vllm import INSIDE, vllm_python
from rolecall.train.manifest import seal_model

STAND_IN = f"""#!{sys.executable}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
names = sys.argv[1:]
with open(os.environ["SAID"], "w") as file:
    json.dump({{"command": names, "environment": dict(os.environ)}}, file)
if "--fail" in names:
    print("(APIServer pid=1) ValueError: no such thing")
    sys.exit(3)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *parts):
        pass
HTTPServer(("127.0.0.1", int(names[names.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    """An interpreter that says how it was called."""
    monkeypatch.setenv("ROLECALL_CACHE", str(tmp_path))
    monkeypatch.setenv("ROLECALL_SERVER_KEY", "a-key")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return path


def test_vllm_is_started_for_training_and_ended_with_us(tmp_path, python):
    words = ["--port", "0", "--vllm", "--vllm-python", str(python), "--vllm-args=--enforce-eager --seed 3"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rolecall", "serve", "tiny", *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().startswith("serving tiny (vllm, float32) on http://127.0.0.1:")
    said = json.loads((tmp_path / "said").read_text())
    command, environment = said["command"], said["environment"]
    model = Path(command[command.index("--model") + 1])
    assert (model / "model.safetensors").is_file()
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[-3:] == ["--enforce-eager", "--seed", "3"]
    assert environment["ROLECALL_SERVER_KEY"] == environment["VLLM_API_KEY"] == "a-key"
    assert environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    process.communicate()
    assert not model.exists()


def test_a_vllm_that_does_not_start_is_a_sentence(python):
    options = ServeOptions(model="tiny", port=0, vllm=True, vllm_python=str(python), vllm_args="--fail")
    with pytest.raises(
        UserError, match=r"vLLM did not start \(status 3\): ValueError: no such thing \(its output is in "
    ):
        run(options, lambda serving: None)


def test_options_that_do_not_fit():
    with pytest.raises(ValueError, match="give vllm too"):
        ServeOptions(model="tiny", vllm_args="--seed 3")
    with pytest.raises(ValueError, match=r"engine\.name is about our own engine"):
        ServeOptions(model="tiny", vllm=True, engine=EngineOptions(name="hf"))
    with pytest.raises(UserError, match="is not a file"):
        vllm_python("/nowhere/python")


@pytest.fixture(scope="module")
def inside():
    """What vLLM's processes import, as they do: by its path, from a directory with nothing else in it but what it imports."""
    assert sorted(path.name for path in INSIDE.glob("*.py")) == ["rolecall_vllm.py", "rolecall_weights.py"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(INSIDE)
        yield runpy.run_path(str(INSIDE / "rolecall_vllm.py"))


def status(guard, path, headers):
    """What a guard answers; 200 if it lets a request pass."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
    asyncio.run(guard(scope, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/health", {"host": "localhost:8000"}, 200),
        ("/collective_rpc", {"host": "127.0.0.1:8000", "authorization": "Bearer a-key"}, 200),
        ("/v1/models", {"host": "served.example", "authorization": "Bearer a-key"}, 200),
        ("/collective_rpc", {"host": "127.0.0.1:8000"}, 401),
        ("/pause", {"host": "127.0.0.1:8000", "authorization": "Bearer another"}, 401),
        ("/collective_rpc", {"host": "evil.example", "authorization": "Bearer a-key"}, 403),
        ("/health", {"host": "evil.example"}, 403),
        ("/health", {}, 403),
    ],
)
def test_every_path_needs_the_key_and_our_name(inside, monkeypatch, path, headers, expected):
    async def app(scope, receive, send):
        await send({"status": 200})

    monkeypatch.setenv("ROLECALL_SERVER_KEY", "a-key")
    monkeypatch.setenv("ROLECALL_SERVER_HOSTS", "served.example")
    assert status(inside["Guard"](app), path, headers) == expected


def test_without_a_key_nothing_is_served(inside, monkeypatch):
    monkeypatch.delenv("ROLECALL_SERVER_KEY", raising=False)
    with pytest.raises(RuntimeError, match="ROLECALL_SERVER_KEY"):
        inside["Guard"](None)


def test_only_what_was_published_is_loaded(inside, tmp_path):
    save(load("tiny"), tmp_path)
    with pytest.raises(FileNotFoundError):
        inside["check_manifest"](tmp_path)
    seal_model(tmp_path, 1)
    assert inside["check_manifest"](tmp_path) == ["model.safetensors"]
    file = tmp_path / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match="not those that were published"):
        inside["check_manifest"](tmp_path)
    file.write_bytes(good)
    (tmp_path / "more.safetensors").write_bytes(good)
    with pytest.raises(ValueError, match="its manifest says"):
        inside["check_manifest"](tmp_path)


def test_weights_and_adapters_are_loaded_and_a_tied_head_is_packed_again(inside, tmp_path):
    save(load("tiny"), tmp_path)
    seal_model(tmp_path, 1)
    packed = []

    class Method:
        def process_weights_after_loading(self, layer):
            packed.append(layer)

    model = torch.nn.Module()
    model.embedding, model.other, model.head = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    model.head.weight = model.embedding.weight
    for layer in (model.embedding, model.other, model.head):
        layer.quant_method = Method()

    class Worker(inside["Worker"]):
        model_runner = type("Runner", (), {"get_model": staticmethod(lambda: model)})
        rank, loaded = 0, None

        def reload_weights(self, *, weights_iterator):
            self.loaded = dict(weights_iterator)
            assert packed == []

    worker, weights = Worker(), load_file(tmp_path / "model.safetensors")
    assert worker.rolecall_load(directory=str(tmp_path), keep="first") == {"repacked": 1}
    assert packed == [model.head]
    assert worker.loaded.keys() == weights.keys()
    assert all(torch.equal(worker.loaded[name], weights[name]) for name in weights)
    packed.clear()
    adapter, name = tmp_path / "adapter", "model.layers.0.self_attn.q_proj.weight"
    adapter.mkdir()
    a, b = torch.ones(1, weights[name].shape[1]), torch.ones(weights[name].shape[0], 1)
    halves = {f"{name}.lora_A": a, f"{name}.lora_B": b, f"{name}.lora_scale": torch.tensor(0.5)}
    save_file(halves, adapter / "model.safetensors")
    seal_model(adapter, 2)
    assert worker.rolecall_load(directory=str(adapter), base="first") == {"repacked": 1}
    assert worker.loaded.keys() == weights.keys()
    assert torch.equal(worker.loaded[name], weights[name] + 0.5)
    with pytest.raises(ValueError, match="that this adapter belongs to are not here"):
        worker.rolecall_load(directory=str(adapter), base="second")
    packed.clear()
    worker.rolecall_load(directory=str(tmp_path))
    with pytest.raises(ValueError, match="that this adapter belongs to are not here"):
        worker.rolecall_load(directory=str(adapter), base="first")


def test_a_server_ends_with_the_process_that_started_it(inside, tmp_path):
    """Two generations: the middle one starts a watcher and dies."""
    pid = tmp_path / "pid"
    watcher = (
        f"import os, runpy, sys; open({str(pid)!r}, 'w').write(str(os.getpid())); sys.path.insert(0, {str(INSIDE)!r});"
        f" runpy.run_path({str(INSIDE / 'rolecall_vllm.py')!r})['_end_with'](int(os.environ['PARENT']))"
    )
    middle = (
        "import os, subprocess, sys, time;"
        f" subprocess.Popen([sys.executable, '-c', {watcher!r}], env={{**os.environ, 'PARENT': str(os.getpid())}});"
        " time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", middle])
    while not pid.exists() or not pid.read_text():
        time.sleep(0.02)
    watched = int(pid.read_text())
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while Path(f"/proc/{watched}").exists() and "Z" not in Path(f"/proc/{watched}/stat").read_text().split()[2]:
        assert time.monotonic() < end
        time.sleep(0.05)
