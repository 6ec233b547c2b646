"""What it costs to sample through `rolecall serve` instead of in the trainer's process: `python benchmarks/servers.py [MODEL]`.

Both sides do the same work in turns in one run, so that a machine with other work slows both. Writes the last section of
docs/performance.md; with a model's name, prints the table for that instead.
"""

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
MARK = "<!-- from here on: benchmarks/servers.py -->"
PROMPTS, SAMPLES, PROMPT, NEW, TURNS = 16, 8, 32, 64, 15
CLIENTS = (1, 4, 16, 64)


@contextmanager
def served(model: str) -> Iterator[str]:
    """The address of a server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rolecall", "serve", model, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
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
    model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    os.environ |= {
        "ROLECALL_SERVER_KEY": secrets.token_urlsafe(24),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    from rolecall.config.parts import EngineOptions
    from rolecall.jobs.models import sampler
    from rolecall.policy.load import load
    from rolecall.rollout.open import open_engine
    from rolecall.types import Request, Sampling

    loaded = load(model)
    weights = dict(loaded.model.named_parameters())
    sampling = Sampling(max_new_tokens=NEW, stop_ids=())
    asked = [
        Request(prompt_ids=tuple(range(3 + i, 3 + i + PROMPT)), sampling=sampling, n=SAMPLES, prompt=i)
        for i in range(PROMPTS)
    ]
    here = open_engine(loaded, name="native", max_rows=256)
    with served(model) as url:
        there = sampler(loaded, Options(EngineOptions(servers=(url,)), sampling))
        found: dict[str, list[float]] = {}

        def note(name: str, work: Callable[[], Any]) -> None:
            found.setdefault(name, []).append(seconds(work))

        for turn in range(TURNS + 1):
            if turn == 1:
                found.clear()  # the first one warms up
            step = [replace(request, step=turn) for request in asked]
            note("generate here", lambda step=step: here.generate(step))
            note("generate there", lambda step=step: there.generate(step))
            note("sync here", lambda turn=turn: here.load(weights, turn))
            there._shared = True
            note("sync directory", lambda turn=turn: there.load(weights, turn))
            there._shared = False
            note("sync upload", lambda turn=turn: there.load(weights, turn))
        rates = {count: clients(there, asked[0], count) for count in CLIENTS}
        there.close()
    lines = table(model, found, rates)
    if model != "tiny":
        print("\n".join(lines))
        return
    PAGE.write_text(PAGE.read_text().partition(MARK)[0].rstrip() + "\n\n" + "\n".join([MARK, *lines]) + "\n")


def clients(engine: Any, request: Any, count: int) -> float:
    """Tokens a second while so many clients each have one request with one answer in flight."""
    server = engine.fleet.servers[0]

    def ask(number: int) -> None:
        mine = replace(request, n=1, prompt=number)
        engine._background.run(server.answer([mine], version=engine.version, seconds=None))

    rounds = max(2, 64 // count)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(ask, range(count)))
        took = seconds(lambda: list(pool.map(ask, range(count * rounds))))
    return count * rounds * NEW / took


def table(model: str, found: dict[str, list[float]], rates: dict[int, float]) -> list[str]:
    """The section of the page."""
    middle = {name: statistics.median(times) for name, times in found.items()}

    def row(what: str, one: str, other: str) -> str:
        ratios = sorted(b / a for a, b in zip(found[one], found[other], strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        return f"| {what} | {middle[one] * 1e3:.0f} ms | {middle[other] * 1e3:.0f} ms | {spread} |"

    return [
        "",
        "## Through a server",
        "",
        f"`python benchmarks/servers.py`: `rolecall serve {model}` in a process of its own on the same {os.cpu_count()} cores against",
        f"the engine in the trainer's process, {TURNS} turns each, one after the other, one thread each. A step is {PROMPTS} prompts of {PROMPT} tokens x",
        f"{SAMPLES} answers of {NEW}. A sync of a server publishes the weights with a manifest, pauses, loads, probes twice and resumes. The",
        "machine had other work: times are what they are, the ratio of neighbours is what counts.",
        "",
        "| work | in the process | through HTTP | ratio |",
        "|---|---|---|---|",
        row("sampling a step", "generate here", "generate there"),
        row("sync by a directory", "sync here", "sync directory"),
        row("sync by upload", "sync here", "sync upload"),
        "",
        "| clients, each with one request of one answer in flight | tokens a second |",
        "|---|---|",
        *(f"| {count} | {rate:,.0f} |" for count, rate in rates.items()),
    ]


if __name__ == "__main__":
    main()
