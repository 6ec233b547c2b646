"""What the machine does not give (memory, a home) is one sentence."""

import os
import resource
import signal
import subprocess
import sys
import time
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
        (RuntimeError("can't start new thread"), "out of memory"),
        (RuntimeError("Could not determine home directory."), "no home directory"),
    ],
)
def test_what_the_system_refuses_is_no_bug_of_ours(error, sentence, monkeypatch, capsys, rows):
    def fail(options, *, progress):
        raise error

    real = commands.imported
    monkeypatch.setattr("rolecall.cli.imported", lambda name: fail if name.endswith("running:run") else real(name))
    assert main(["rl", "--rows", str(rows)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rolecall rl: ")
    assert sentence in line


def test_other_errors_are_still_called_a_bug(monkeypatch, capsys, rows):
    def fail(options, *, progress):
        raise RuntimeError("something else")

    real = commands.imported
    monkeypatch.setattr("rolecall.cli.imported", lambda name: fail if name.endswith("running:run") else real(name))
    assert main(["rl", "--rows", str(rows)]) == 1
    assert "this is a bug" in capsys.readouterr().err


def test_without_a_home_the_cache_is_asked_for_in_a_sentence(monkeypatch):
    def homeless(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.delenv("ROLECALL_CACHE", raising=False)
    with pytest.raises(LoadError, match=f"user {os.geteuid()} has no home directory; set ROLECALL_CACHE"):
        cache_root()


def limited(program, gibibytes=3):
    """A Python program with that much address space."""
    limit = gibibytes << 30
    return subprocess.Popen(
        [sys.executable, "-c", f"import os, signal, sys, time\nfrom rolecall.cli.watched import watched\n{program}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )


@pytest.mark.parametrize(
    ("command", "code", "sentence"),
    [
        ("0", 0, ""),
        ("74", 74, ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 1, "ended by SIGSEGV with 3.0 GiB of address space"),
        ("os.abort()", 1, "ended by SIGABRT with 3.0 GiB of address space"),
        ("os._exit(127)", 1, "ended by the C library with 3.0 GiB of address space"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, ""),
    ],
)
def test_with_a_limit_every_end_is_an_exit_code(command, code, sentence):
    process = limited(f"sys.exit(watched(lambda: {command}))")
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert (sentence in said) if sentence else not said


def test_a_crash_of_libraries_as_they_are_unloaded_is_none_of_a_finished_run():
    process = limited(
        "import atexit, ctypes\n"
        "def command():\n"
        "    atexit.register(print, 'cleaned up')\n"
        "    return ctypes.CDLL(None).__cxa_atexit(ctypes.c_void_p(1), None, None)\n"  # jumps there at exit
        "sys.exit(watched(command))"
    )
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out, said) == (0, "cleaned up\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_watched_command(number):
    process = limited(
        "def stop(*_): os._exit(40)\n"
        f"signal.signal({int(number)}, stop)\n"
        "sys.exit(watched(lambda: print('ready', flush=True) or time.sleep(60) or 0))"
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 40


def test_a_watched_command_ends_with_who_watches_it():
    process = limited("sys.exit(watched(lambda: print(os.getpid(), flush=True) or time.sleep(60) or 0))")
    child = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=60)
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "State:\tZ" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.05)
    raise AssertionError("it runs on")


@pytest.mark.slow
@pytest.mark.parametrize("gibibytes", [2.0, 2.25, 3.0])
@pytest.mark.parametrize("command", ["sft", "rl", "eval"])
def test_any_limit_is_a_finished_run_or_a_sentence(command, gibibytes, rows):
    how = {
        "sft": ["--rows", "sorting:length=2", "--steps", "1", "--batch", "2"],
        "rl": ["--rows", "sorting:length=2", "--steps", "1", "--prompts", "2", "--algorithm.entropy_coef", "0.01"],
        "eval": ["--model", "tiny", "--rows", "sorting:length=2", "--n", "2"],
    }[command]
    out = [] if command == "eval" else ["--out", str(rows.parent / "run")]
    limit = int(gibibytes * 2**30)
    found = subprocess.run(
        [sys.executable, "-m", "rolecall", command, *how, *out],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert found.returncode in (0, 1), found.stderr
    assert "Traceback" not in found.stderr
    assert found.returncode == 0 or "out of memory" in found.stderr.splitlines()[-1]
