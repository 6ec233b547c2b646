"""How long a step waits for its checkpoint: completed beside the steps that follow, and waited for, in turn.

    python benchmarks/saving.py [--repeat 3]

SFT of SmolLM2-135M, four steps with a checkpoint after each.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import rolecall
from rolecall.train.saving import Saver
from smollm2 import smollm2_path

BESIDE = Saver.save


def waited_for(self: Saver, *given: object, wait: bool, **how: object) -> None:
    """Save as if every checkpoint were the last."""
    BESIDE(self, *given, wait=True, **how)


def measure(place: Path, way: str) -> tuple[float, float]:
    """(seconds that a step waits, gigabytes of a checkpoint) of one run."""
    Saver.save = BESIDE if way == "beside" else waited_for
    rolecall.sft(
        model=str(smollm2_path()),
        rows="addition",
        steps=4,
        batch=8,
        out=str(place),
        quiet=True,
        save={"every": 1, "keep": 2},
    )
    lines = [json.loads(line) for line in (place / "timing.jsonl").read_text().splitlines()]
    newest = sorted((place / "checkpoints").glob("step-??????"))[-1]
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    return statistics.median(line.get("save", 0.0) for line in lines[1:]), size / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    found: dict[str, list[tuple[float, float]]] = {"waited for": [], "beside": []}
    for _ in range(repeat):
        for way, seen in found.items():
            with tempfile.TemporaryDirectory() as name:
                seen.append(measure(Path(name) / "run", way))
    print("| checkpoint | a step waits | of a checkpoint of |\n|---|---|---|")
    for way, seen in found.items():
        print(f"| {way} | {statistics.median(s for s, _ in seen):.2f} s | {seen[0][1]:.2f} GB |")


if __name__ == "__main__":
    main()
