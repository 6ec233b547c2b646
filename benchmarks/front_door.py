"""What stands between a user and training: start-up, reading rows, rewards in worker processes.

python benchmarks/front_door.py
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REWARD = "def length(completions, **columns):\n    return [float(len(text)) for text in completions]\n"
ROWS = 1_000_000


def best(function, *, repeats: int = 5) -> float:
    """Seconds of the quickest of several calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def help_seconds() -> float:
    command = [sys.executable, "-m", "rolecall", "--help"]
    return best(lambda: subprocess.run(command, check=True, capture_output=True))


def megabytes_per_second(folder: Path, words: int) -> tuple[float, float, float]:
    """(MB of the file, MB checked per second, MB read per second) for a million rows with so many words more."""
    from rolecall.tasks.names import resolve

    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for i in range(ROWS):
            row = {"prompt": f"What is {i} plus {i * 7}?{' and why' * words}", "answer": str(i * 8)}
            file.write(json.dumps(row) + "\n")
    megabytes = path.stat().st_size / 1e6
    rows = resolve(str(path))

    def read() -> None:
        assert sum(1 for _ in rows) == ROWS

    return megabytes, megabytes / best(lambda: resolve(str(path)), repeats=3), megabytes / best(read, repeats=3)


def reward_seconds(folder: Path) -> float:
    """Seconds for a thousand cheap answers, once the workers are there."""
    from rolecall.rewards.pool import RewardPool
    from rolecall.rewards.records import Sample

    path = folder / "rewards.py"
    path.write_text(REWARD)
    samples = [
        Sample(prompt="p", completion="x" * (i % 50), completion_ids=(1,), row={}, prompt_index=i, sample_index=0)
        for i in range(1000)
    ]
    with RewardPool([f"{path}:length"]) as pool:
        return best(lambda: pool.score(samples))


def reward_share(folder: Path) -> float:
    """The share of a step's time that rewards take, on the built-in model and task."""
    import rolecall

    settings = {"prompts": 32, "samples": 8, "sampling": {"max_new_tokens": 16}, "steps": 12}
    run = rolecall.rl(rows="addition", out=str(folder / "run"), quiet=True, **settings)
    lines = [json.loads(line) for line in (run.path / "timing.jsonl").read_text().splitlines()][2:]
    return sum(line["reward"] for line in lines) / sum(line["step"] for line in lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"rolecall --help: {help_seconds():.2f} s (aim: under 2)", flush=True)
        for words in (0, 30):
            size, checked, rate = megabytes_per_second(folder, words)
            what = f"a million rows of {size:.0f} bytes"
            print(f"{what}: opened and checked at {checked:.0f} MB/s, streamed at {rate:.0f} MB/s", flush=True)
        print(f"a thousand cheap answers: {reward_seconds(folder):.3f} s (aim: under 1)", flush=True)
        print(f"rewards of 256 answers: {reward_share(folder):.2%} of a step (aim: under 2 %)", flush=True)


if __name__ == "__main__":
    main()
