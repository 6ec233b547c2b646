"""The example that reads a run's rollouts by Ray Data, run as it stands. `make test-cluster` runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs rolecall[ray]")
pytestmark = pytest.mark.slow


def test_ray_data_and_datasets_read_the_same_rollouts():
    example = Path(__file__).parents[2] / "examples" / "stream_experience.py"
    env = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "STEPS")}
    ended = subprocess.run([sys.executable, example], env=env, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    said = re.findall(r"mean score by step, from (datasets|Ray Data): (\{.*\})", ended.stdout)
    assert [name for name, _ in said] == ["datasets", "Ray Data"]
    assert said[0][1] == said[1][1]
    assert said[0][1].count(":") == 5
