"""What is wrong with servers is one sentence at the start, before anything is sent to them."""

import dataclasses
import json

import pytest
import torch
from served import Options, app_of, serving
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import rolecall
from rolecall.config.parts import EngineOptions
from rolecall.config.use import ServeOptions
from rolecall.errors import UserError
from rolecall.jobs.models import sampler
from rolecall.jobs.serve import serve
from rolecall.policy.load import load
from rolecall.serving.app import App


class Without(App):
    """A server that lacks something."""

    async def __call__(self, request):
        if request.path == "/version":
            said = await super().__call__(request)
            said.pop("hash")
            return said
        return await super().__call__(request)


class Other(App):
    """A server of something else."""

    async def __call__(self, request):
        if request.path == "/version":
            return {"version": "1.0"}
        return await super().__call__(request)


class Fixed(App):
    """One that was built without the endpoint that takes weights."""

    def __init__(self, *given, **how):
        super().__init__(*given, **how)
        del self._routes["POST", "/update_weights"]


class Larger(App):
    """A server of a model with more tokens."""

    async def _version(self, request):
        return await super()._version(request) | {"vocabulary": 512}


def shortened(length):
    return dataclasses.replace(load("tiny"), context_length=length)


def renamed():
    """The same model with two tokens of its tokenizer exchanged."""
    loaded = load("tiny")
    said = json.loads(loaded.tokenizer.backend_tokenizer.to_str())
    vocabulary = said["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(said)))
    return app_of(dataclasses.replace(loaded, tokenizer=other))


def other_weights():
    """A model of the same shapes whose embedding does not match what the trainer's config says of it."""

    class Deaf(App):
        """Loads nothing and says that it did."""

        async def _update_weights(self, request):
            said = await self._version(request)
            return {"version": said["policy_version"], "hash": self.expected}

    loaded = load("tiny")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.5)
    app = app_of(loaded, kind=Deaf)
    app.expected = app_of().engine.hash()
    return app


@pytest.mark.parametrize(
    ("app", "sentence"),
    [
        (lambda: app_of(kind=Other), "no kind of server that is known here"),
        (lambda: app_of(kind=Without), "its /version does not say hash"),
        (renamed, "serves tiny with another tokenizer than the model that trains; serve the same model"),
        (
            lambda: app_of(kind=Larger),
            "with a vocabulary of 512 tokens, but the model that trains has 259; serve the same",
        ),
        (
            lambda: app_of(kind=Fixed),
            "there is no /update_weights here; as it is, it can be evaluated .*, not trained with",
        ),
        (lambda: app_of(shortened(12)), "with a context of 12 tokens, which has no room for a prompt"),
        (
            other_weights,
            "no server is left that samples from the weights that are trained: .* version 0 did not arrive",
        ),
    ],
)
def test_a_server_that_does_not_fit_is_named(app, sentence):
    with serving(app()) as url, pytest.raises(UserError, match=sentence) as raised:
        sampler(load("tiny"), Options(url))
    assert url in str(raised.value)


def test_another_version_is_warned_about_probed_and_used(caplog):
    with serving(app_of(about={"version": "9.9"})) as url:
        sampler(load("tiny"), Options(url)).close()
    assert f"a server has rolecall 9.9, and this is {rolecall.__version__}: it is probed and used" in caplog.text


def test_no_server_there(monkeypatch):
    with pytest.raises(
        UserError, match=r"engine.servers http://127.0.0.1:9: nothing answers there; start `rolecall serve"
    ):
        sampler(load("tiny"), Options("http://127.0.0.1:9"))


@pytest.mark.parametrize("given", [None, "", "another"])
def test_a_wrong_key(monkeypatch, given):
    monkeypatch.delenv("ROLECALL_SERVER_KEY") if given is None else monkeypatch.setenv("ROLECALL_SERVER_KEY", given)
    with serving(app_of()) as url, pytest.raises(UserError, match="give the server's key in the environment variable"):
        sampler(load("tiny"), Options(url))


@pytest.mark.parametrize("given", ["clé", "two words", "a line\n"])
def test_a_key_that_cannot_be_sent(monkeypatch, given):
    monkeypatch.setenv("ROLECALL_SERVER_KEY", given)
    with pytest.raises(UserError, match="ROLECALL_SERVER_KEY is not of ASCII without spaces"):
        sampler(load("tiny"), Options("http://127.0.0.1:9"))
    with pytest.raises(UserError, match="ROLECALL_SERVER_KEY is not of ASCII without spaces"):
        serve(model="tiny", port=0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:port"])
def test_a_port_that_is_none(url):
    with pytest.raises(UserError, match=f"{url} is no address: its port is a number up to 65535"):
        sampler(load("tiny"), Options(url))


def test_servers_that_differ_or_are_not_what_is_said(monkeypatch):
    with serving(app_of()) as one, serving(app_of(dtype=torch.bfloat16)) as two:
        with pytest.raises(
            UserError, match=f"engine.servers differ: {one} computes in float32, {two} computes in bfloat16"
        ):
            sampler(load("tiny"), Options(one, two))
        with pytest.raises(UserError, match=r"engine.dtype is bfloat16, but servers have float32"):
            sampler(load("tiny"), Options(one, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"servers": ("127.0.0.1:8750",)}, "wants addresses such as http://127.0.0.1:8750, got '127.0.0.1:8750'"),
        ({"servers": ("http://a", "http://a")}, "names the same server twice"),
        ({"servers": ("http://a",), "workers": 1}, "both say what samples"),
        ({"servers": ("http://a",), "max_rows": 3}, "give it to the servers when they are started"),
        ({"weights_directory": "x"}, "engine.weights_directory is for servers"),
        ({"name": "vllm"}, "engine.name vllm is for servers"),
    ],
)
def test_options_that_contradict_each_other(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        EngineOptions(**given)


def test_addresses_may_have_commas_between_them():
    assert EngineOptions(servers=("http://a:1,http://b", "https://c")).servers == (
        "http://a:1",
        "http://b",
        "https://c",
    )


def test_a_server_does_not_sample_elsewhere():
    with pytest.raises(ValueError, match="serve samples itself"):
        ServeOptions(model="tiny", engine=EngineOptions(servers=("http://a",)))


def test_each_process_has_servers_of_its_own(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"engine.servers are 1: give at least as many"):
        EngineOptions(servers=("http://a",))
