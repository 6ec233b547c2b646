"""What it costs to sample through a server instead of in the trainer's process, and how long weights take to get there:
`python benchmarks/servers.py [MODEL | smollm2] [--vllm] [--turns N] [--only sampling | sync]`.

All sides do the same work in turns in one run, so that a machine with other work slows all. Writes the part of
docs/performance.md that is about this model, server and kind of work.
"""

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
PROMPTS, SAMPLES, PROMPT, NEW, RANK = 16, 8, 32, 64, 16
CLIENTS = (1, 4, 16, 64)
WAYS = {
    "directory": "from a directory",
    "upload": "sent over HTTP",
    "broadcast": "by broadcast",
    "adapter": f"adapter of rank {RANK} alone, from a directory",
    "adapter broadcast": f"adapter of rank {RANK} alone, by broadcast",
}


@contextmanager
def served(model: str, *more: str) -> Iterator[str]:
    """The address of a server in a process of its own."""
    words = [sys.executable, "-m", "rolecall", "serve", model, "--port", "0", *more]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split(" on ")[1].strip()
    finally:
        process.terminate()
        process.wait()


@dataclass
class Options:
    """As much of a command's options as an engine is made from."""

    engine: Any
    sampling: Any
    policy: Any = field(default_factory=lambda: type("Policy", (), {"mixed_precision": "no"}))


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument(
        "--only", choices=("sampling", "sync"), help="a part, for what takes long: it has its own place"
    )
    given = parser.parse_args()
    os.environ |= {
        "ROLECALL_SERVER_KEY": secrets.token_urlsafe(24),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    model = given.model
    if model == "smollm2":
        sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
        from smollm2 import smollm2_path

        model = str(smollm2_path())
    with served(model, *(["--vllm", "--vllm-args=--enforce-eager"] if given.vllm else [])) as url:
        found, rates = measure(model, url, turns=given.turns, vllm=given.vllm, only=given.only)
    write(given, table(given, found, rates))


def measure(
    model: str, url: str, *, turns: int, vllm: bool, only: str | None
) -> tuple[dict[str, list[float]], dict[int, float]]:
    """Seconds of each kind of work in each turn, and tokens a second by the number of clients."""
    from rolecall.config.parts import EngineOptions
    from rolecall.jobs.models import sampler
    from rolecall.policy.load import load
    from rolecall.policy.lora import add_adapter, merged_weights
    from rolecall.rollout.open import open_engine
    from rolecall.types import Request, Sampling

    sampling = Sampling(max_new_tokens=NEW, stop_ids=())
    prompts = PROMPTS if turns > 5 else 2
    asked = [
        Request(prompt_ids=tuple(range(3 + i, 3 + i + PROMPT)), sampling=sampling, n=SAMPLES, prompt=i)
        for i in range(prompts)
    ]
    loaded = load(model)
    here = open_engine(loaded, name="native", max_rows=256)
    found: dict[str, list[float]] = {}
    rates: dict[int, float] = {}

    def note(name: str, work: Callable[[], Any]) -> None:
        found.setdefault(name, []).append(seconds(work))

    for way in ["directory"] if only == "sampling" else [way for way in WAYS if not (vllm and way == "upload")]:
        source = add_adapter(load(model), rank=RANK) if "adapter" in way else loaded
        sync: Any = "broadcast" if "broadcast" in way else "directory"
        there: Any = sampler(source, Options(EngineOptions(servers=(url,), sync=sync, worker_silence=300.0), sampling))
        there._shared = way != "upload"
        for turn in range(turns + 1):
            weights = merged_weights(source)
            if only != "sampling":
                note(f"here {way}", lambda weights=weights, turn=turn: here.load(weights, turn))
                note(way, lambda weights=weights, turn=turn, there=there: there.load(weights, turn))
            if way == "directory" and only != "sync":
                step = [replace(request, step=turn) for request in asked]
                note("generate here", lambda step=step: here.generate(step))
                note("generate there", lambda step=step, there=there: there.generate(step))
        if way == "directory" and only != "sync":
            rates = {count: clients(there, asked[0], count) for count in CLIENTS}
        there.close()
    return {name: times[1:] for name, times in found.items()}, rates  # the first of each warms up


def clients(engine: Any, request: Any, count: int) -> float:
    """Tokens a second while so many clients each have one request with one answer in flight."""
    server = engine.fleet.servers[0]

    def ask(number: int) -> None:
        mine = replace(request, n=1, prompt=number)
        engine._background.run(server.answer([mine], version=engine.version, seconds=None))

    small = engine.about.model == "tiny"
    rounds = max(2, 64 // count) if small else max(1, 4 // count)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(ask, range(count if small else 1)))
        took = seconds(lambda: list(pool.map(ask, range(count * rounds))))
    return count * rounds * NEW / took


def table(given: argparse.Namespace, found: dict[str, list[float]], rates: dict[int, float]) -> list[str]:
    """The part of the page."""
    middle = {name: statistics.median(times) for name, times in found.items()}

    def row(what: str, one: str, other: str) -> str:
        ratios = sorted(b / a for a, b in zip(found[one], found[other], strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        return f"| {what} | {middle[one] * 1e3:.0f} ms | {middle[other] * 1e3:.0f} ms | {spread} |"

    words = " ".join(
        [
            given.model if given.model != "tiny" else "",
            *(["--vllm"] if given.vllm else []),
            *([f"--only {given.only}"] if given.only else []),
        ]
    ).strip()
    prompts = PROMPTS if given.turns > 5 else 2
    return [
        f"`python benchmarks/servers.py {words}`".replace(" `", "`")
        + f": {given.turns} turns, a step of {prompts} prompts of {PROMPT}",
        f"tokens x {SAMPLES} answers of {NEW}.",
        "",
        "| work | in the process | through the server | ratio |",
        "|---|---|---|---|",
        *([row("sampling a step", "generate here", "generate there")] if "generate here" in found else []),
        *(row(f"sync {what}", f"here {way}", way) for way, what in WAYS.items() if way in found),
        *(
            ["", "| clients, each with one request of one answer in flight | tokens a second |", "|---|---|"]
            if rates
            else []
        ),
        *(f"| {count} | {rate:,.0f} |" for count, rate in rates.items()),
    ]


def write(given: argparse.Namespace, lines: list[str]) -> None:
    """Put them between the marks of this model and server."""
    name = f"{given.model} {'vllm' if given.vllm else 'ours'}" + (f" {given.only}" if given.only else "")
    begin, end = f"<!-- servers: {name} -->", f"<!-- servers: end of {name} -->"
    before, mark, rest = PAGE.read_text().partition(begin)
    if not mark:
        print("\n".join(lines))
        return
    PAGE.write_text("\n".join([before + begin, "", *lines, "", end]) + rest.partition(end)[2])


if __name__ == "__main__":
    main()
