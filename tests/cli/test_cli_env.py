"""`rolecall env`."""

import importlib.metadata

from rolecall.cli import main
from rolecall.jobs import env


def test_env_names_versions_and_hardware(capsys):
    assert main(["env"]) == 0
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"].strip() == importlib.metadata.version("torch")
    for name in ("rolecall", "python", "cpu", "cpu flags", "memory", "allocator", "torch threads", "variables"):
        assert lines[name].strip()


def test_a_missing_extra_comes_with_its_command(monkeypatch):
    monkeypatch.setattr(
        env.metadata, "requires", lambda _: ["peft>=1; extra == 'lora'", 'no-such-package; extra == "x"']
    )
    facts = env.environment()
    assert facts["extra x"].startswith("no-such-package missing: ")
    assert facts["extra x"].endswith("-m pip install 'rolecall[x]'")


def test_a_preloaded_allocator_is_named(monkeypatch):
    monkeypatch.setattr(env, "_read", lambda path: "7f /usr/lib/libtcmalloc_minimal.so.4" if "maps" in path else "")
    facts = env.environment()
    assert facts["allocator"] == "tcmalloc (preloaded)"
    assert facts["memory"] == "unknown"
