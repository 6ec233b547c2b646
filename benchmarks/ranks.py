"""Memory and time of one process, of two that hold the model whole (ddp), and of two that hold it in parts (fsdp2):
`python benchmarks/ranks.py`. SmolLM2-135M, one core to each process, the ways in turn, `--repeat` times."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from smollm2 import smollm2_path

FOUND = Path(__file__).parents[1] / "runs" / "bench"
WAYS = {"one process": (1, "none"), "ddp": (2, "ddp"), "fsdp2": (2, "fsdp2")}
JOBS = {
    "sft": [
        *("sft", "--rows", "addition", "--batch", "32", "--steps", "3", "--optim.token_budget", "512"),
        *("--save.every", "0"),
    ],
    "grpo with KL": [
        *("rl", "--preset", "grpo", "--rows", "addition", "--prompts", "8", "--samples", "4", "--steps", "3"),
        *("--sampling.max_new_tokens", "24", "--algorithm.kl_coef", "0.01", "--optim.token_budget", "512"),
        *("--reward", "{place}/rewards.py:letters", "--save.every", "0"),
    ],
}
REWARD = """def letters(completions, **columns):
    return [len(set(text)) / 10 for text in completions]
"""


def rank() -> None:
    """One process of a job: run it, then say its peak memory."""
    from rolecall.cli import main

    place, *words = sys.argv[2:]
    code = main(words)
    status = Path("/proc/self/status").read_text().split()
    peak = int(status[status.index("VmHWM:") + 1]) / 1e6
    Path(place, f"rank-{os.environ.get('RANK', '0')}").write_text(str(peak))
    sys.exit(code)


def measure(job: str, way: str) -> tuple[float, float]:
    """(the largest peak of any process in GB, seconds of a step) of one run."""
    count, shard = WAYS[way]
    with tempfile.TemporaryDirectory() as place:
        Path(place, "rewards.py").write_text(REWARD)
        job_words = [word.format(place=place) for word in JOBS[job]]
        words = [*job_words, "--model", str(smollm2_path()), "--out", f"{place}/run", "--train.shard", shard, "--quiet"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*torchrun, __file__, "rank", place, *words], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        peaks = [float(path.read_text()) for path in Path(place).glob("rank-*")]
        lines = [json.loads(line) for line in Path(place, "run/timing.jsonl").read_text().splitlines()]
        return max(peaks), statistics.median(line["step_time"] for line in lines[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--job", choices=list(JOBS), action="append")
    given = parser.parse_args()
    rows: list[list[str]] = []
    print(
        "| job | way | peak of a process | of one process's | seconds a step | of one process's |\n|---|---|---|---|---|---|"
    )
    for job in given.job or JOBS:
        found = {way: [] for way in WAYS}
        for _ in range(given.repeat):
            for way in WAYS:
                found[way].append(measure(job, way))
        peak = {way: statistics.median(p for p, _ in runs) for way, runs in found.items()}
        time = {way: statistics.median(t for _, t in runs) for way, runs in found.items()}
        for way in WAYS:
            first = "one process"
            shares = f"{peak[way] / peak[first]:.2f}", f"{time[way] / time[first]:.2f}"
            rows.append([job, way, f"{peak[way]:.2f} GB", shares[0], f"{time[way]:.2f}", shares[1]])
            print(f"| {' | '.join(rows[-1])} |", flush=True)
    FOUND.mkdir(parents=True, exist_ok=True)
    (FOUND / "ranks.json").write_text(json.dumps({"rows": rows, "repeat": given.repeat}, indent=1))


if __name__ == "__main__":
    rank() if sys.argv[1:2] == ["rank"] else main()
