"""What the machine does not give (memory, a home) is one sentence."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rolecall.cli import commands, main
from rolecall.config.preflight import check_address_space
from rolecall.errors import UserError
from rolecall.policy.load import LoadError, cache_root


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return path


@pytest.mark.parametrize("megabytes", [700, 1200])
def test_too_little_address_space_is_refused_before_any_work(megabytes, rows):
    words = [sys.executable, "-m", "rolecall", "rl", "--model", "tiny", "--rows", str(rows), "--reward", "exact_match"]
    limit = megabytes << 20
    found = subprocess.run(
        [*words, "--out", str(rows.parent / "run")],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert found.returncode == 2, found.stderr
    (line,) = found.stderr.splitlines()
    assert "GiB of address space here (ulimit -v)" in line
    assert not (rows.parent / "run").exists()


def test_the_limit_is_that_of_the_process(monkeypatch):
    check_address_space()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 30, resource.RLIM_INFINITY))
    with pytest.raises(UserError, match=r"has 1\.0 GiB of address space"):
        check_address_space()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "out of memory"),
        (OSError(12, "Cannot allocate memory"), "out of memory"),
        (RuntimeError("Could not determine home directory."), "no home directory"),
    ],
)
def test_what_the_system_refuses_is_no_bug_of_ours(error, sentence, monkeypatch, capsys, rows):
    def fail(options):
        raise error

    real = commands.imported
    monkeypatch.setattr("rolecall.cli.imported", lambda name: fail if name.endswith("train:run") else real(name))
    assert main(["rl", "--rows", str(rows)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rolecall rl: ")
    assert sentence in line


def test_other_errors_are_still_called_a_bug(monkeypatch, capsys, rows):
    def fail(options):
        raise RuntimeError("something else")

    real = commands.imported
    monkeypatch.setattr("rolecall.cli.imported", lambda name: fail if name.endswith("train:run") else real(name))
    assert main(["rl", "--rows", str(rows)]) == 1
    assert "this is a bug" in capsys.readouterr().err


def test_without_a_home_the_cache_is_asked_for_in_a_sentence(monkeypatch):
    def homeless(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.delenv("ROLECALL_CACHE", raising=False)
    with pytest.raises(LoadError, match=f"user {os.geteuid()} has no home directory; set ROLECALL_CACHE"):
        cache_root()
