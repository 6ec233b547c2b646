"""What runs inside vLLM's own processes. It is imported there by its path, without rolecall, so it needs nothing of it but the file
beside it.

`rolecall serve MODEL --vllm` starts vLLM with both classes. For a server of your own put this file's directory on its
PYTHONPATH and add `--worker-extension-cls rolecall_vllm.Worker --middleware rolecall_vllm.Guard`.
"""

import hashlib
import hmac
import json
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from rolecall_weights import merged, receive  # type: ignore[import-not-found]
from torch import Tensor

KEY_VARIABLE, HOSTS_VARIABLE = "ROLECALL_SERVER_KEY", "ROLECALL_SERVER_HOSTS"


class Worker:
    """Mixed into vLLM's worker: methods that `/collective_rpc` can call."""

    def rolecall_about(self: Any) -> dict[str, Any]:
        """What the client checks before it starts."""
        config = self.model_runner.model_config
        return {
            "extension": 2,
            "cuda": self.device.type == "cuda",
            "vocabulary": int(config.get_vocab_size()),
            "tokenizer": _fingerprint(config),
            "tied": bool(_tied_heads(self.model_runner.get_model())),
        }

    def rolecall_base(self: Any) -> str | None:
        """The name of the weights that are kept for adapters."""
        kept = getattr(self, "_rolecall_base", None)
        return None if kept is None else kept[0]

    def rolecall_load(
        self: Any,
        directory: str | None = None,
        broadcast: dict[str, Any] | None = None,
        base: str | None = None,
        keep: str | None = None,
    ) -> dict[str, Any]:
        """Load a published directory, checked against its manifest, or what a broadcast brings; then what vLLM derives from
        other layers' weights is made again. `keep` is a name under which the weights are kept aside, `base` that of the
        weights to which what comes now is an adapter."""
        kept: tuple[str, dict[str, Tensor]] | None = getattr(self, "_rolecall_base", None)
        if base is not None and (kept is None or kept[0] != base):
            raise ValueError("the weights that this adapter belongs to are not here")
        tensors = _incoming(directory, broadcast, rank=int(self.rank))
        if base is not None and kept is not None:
            tensors = merged(kept[1], dict(tensors)).items()
        else:
            self._rolecall_base = None
            if keep is not None:
                tensors = [(name, tensor.cpu()) for name, tensor in tensors]
                self._rolecall_base = (keep, dict(tensors))
        self.reload_weights(weights_iterator=iter(tensors))
        heads = _tied_heads(self.model_runner.get_model())
        for head in heads:
            # A head that shares the embedding's weights is in no checkpoint. vLLM (0.32) then leaves the packed copy of
            # the old ones in place, and answers 200.
            head.quant_method.process_weights_after_loading(head)
        return {"repacked": len(heads)}


def _incoming(directory: str | None, broadcast: dict[str, Any] | None, *, rank: int) -> Iterable[tuple[str, Tensor]]:
    """Names and tensors. Those of a broadcast through the CPU are all there before the first is used: one that breaks off
    changes nothing. On GPUs there is no room for that."""
    if broadcast is not None:
        found = receive(broadcast, rank=broadcast["rank"] + rank)
        return found if broadcast["backend"] == "nccl" else list(found)
    from safetensors.torch import load_file

    place = Path(str(directory))
    return (pair for name in check_manifest(place) for pair in load_file(place / name).items())


def _fingerprint(config: Any) -> str | None:
    """Tells tokenizers apart, in the same way as the client: a hash of the vocabulary."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, trust_remote_code=config.trust_remote_code)
    except Exception:  # none that transformers can read: the client then does not compare it
        return None
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _tied_heads(model: torch.nn.Module) -> list[Any]:
    """Layers that use another layer's weight as their own and keep a copy of it in another form."""
    seen: set[int] = set()
    heads = []
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if id(weight) in seen and hasattr(module, "quant_method"):
            heads.append(module)
        seen.add(id(weight))
    return heads


def check_manifest(directory: Path) -> list[str]:
    """The names of the weight files, each of which has the size and sha256 that its manifest says."""
    files = json.loads((directory / "manifest.json").read_bytes())["files"]
    names = sorted(name for name in files if name.endswith(".safetensors"))
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names or names != found:
        raise ValueError(f"{directory} holds {found}, its manifest says {names}")
    for name in names:
        with (directory / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != files[name]["sha256"]:
                raise ValueError(f"the bytes of {name} in {directory} are not those that were published")
    return names


class Guard:
    """ASGI middleware: every path but /health needs the key, and the Host header must name this server.

    vLLM's own `--api-key` guards /v1 and /inference only; /collective_rpc, /pause and /update_weights stay open to every
    program on the machine, and to every web page that a browser on it shows.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"{KEY_VARIABLE} is not set: the server would be open to everybody")
        self.expected = f"Bearer {key}".encode()
        self.hosts = {"127.0.0.1", "::1", "localhost", *os.environ.get(HOSTS_VARIABLE, "").split(",")} - {""}
        parent = os.environ.get("ROLECALL_SERVER_PARENT")
        if parent is not None:
            threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        fault = self._fault(scope)
        if fault is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            status, message = fault
            body = json.dumps({"error": {"message": message, "code": status}}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _fault(self, scope: Any) -> tuple[int, str] | None:
        """Status and sentence for who is not let in."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            host = urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname
        except ValueError:
            host = None
        if host not in self.hosts:
            return 403, "the Host header names another server: see --hosts of rolecall serve"
        if scope["path"] == "/health":
            return None
        if not hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
            return 401, "the key is missing or wrong: send `Authorization: Bearer KEY`"
        return None


def _end_with(parent: int) -> None:
    """End this server when the process that started it is gone, however that ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
