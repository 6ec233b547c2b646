"""A run whose clock jumps, in another time zone and locale, writes the bytes of one at home."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

JUMPING = """
import random, time
real, numbers = time.time, random.Random(3)
time.time = lambda: real() + numbers.choice([-1e9, -3600.0, 0.0, 3600.0, 4e9])
"""
RUN = """
import sys, rolecall
rolecall.rl(
    out=sys.argv[1], model="tiny", rows="sorting:length=2", steps=2, prompts=2, samples=2, quiet=True,
    **{"sampling.max_new_tokens": 3, "algorithm.entropy_coef": 0.01},
)
"""
PLACES = {
    "at home": {"TZ": "UTC", "LC_ALL": "C.UTF-8"},
    "abroad": {"TZ": "Asia/Kathmandu", "LC_ALL": "tr_TR.UTF-8", "LANG": "de_DE.UTF-8", "PYTHONUTF8": "0"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("clocks")
    processes = []
    for number, variables in enumerate(PLACES.values()):
        script = (JUMPING if number else "") + RUN
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        processes.append(subprocess.Popen([sys.executable, "-c", script, str(place / str(number))], env=environment))
    assert [process.wait(120) for process in processes] == [0, 0]
    return [place / str(number) for number in range(len(PLACES))]


def written(run: Path) -> dict[str, bytes]:
    """Every file but times, and the report and run.json, which say when and where it ran."""
    left_out = ("timing.jsonl", "run.json", "report.html")
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in left_out]
    files = [path for path in files if path.name != "config.json" and path.name != "manifest.json"]  # hold `out`
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def test_neither_clock_nor_place_change_a_byte(runs):
    home, abroad = map(written, runs)
    assert "metrics.jsonl" in home
    assert any(name.startswith("rollouts/") for name in home)
    assert [name for name in home.keys() | abroad.keys() if home.get(name) != abroad.get(name)] == []
