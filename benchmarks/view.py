"""How `rolecall view` does with many runs and a long one: `python benchmarks/view.py [--part pages|cost] [--place DIR]`.

Makes 200 runs of 1,000 steps, and one of 1,000 recorded steps with 100 answers each, out of a short real run. Measures in
chromium how long their pages take until the curves are drawn, what the server holds in memory, how long a line of the
metrics takes to the page (`pages`), and what a training costs with and without it (`cost`), and writes that section of
docs/view.md. Needs chromium, chromedriver and the `dev` and `view` extras.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from shlex import split
from statistics import median, quantiles
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

RUNS, STEPS, ANSWERS = 200, 1000, 100
CALL = [sys.executable, "-m", "rolecall"]
TRAIN = split(
    "rl --preset ppo --model tiny --rows sorting --prompts 25 --samples 4 --seed 1 --sampling.max_new_tokens 40 "
    "--algorithm.entropy_coef 0.01 --eval.every 0"
)


DOCS = Path(__file__).parents[1] / "docs" / "view.md"
PAGES, COST, END = "## What it costs\n", "What the open page costs a run", "## Not built\n"
"""Where the parts of that section of docs/view.md begin, and the next one."""
PAGES_SAY = f"""{PAGES}
Measured by `python benchmarks/view.py`, which writes this section, in chromium on {{cores}} cores (load {{load:.0f}}); seconds until the page and its
first curves are drawn, at the first and at later visits:

| | first | again | server's memory, at most |
|---|---|---|---|
{{pages}}

A line that a run writes is on its page after {{median:.1f}} s (median of {{count}}; at most {{longest:.1f}} s).

"""
COST_SAYS = f"""{COST}: a training with `--view` is measured in stretches of {{steps}} steps with the page open, each beside one in which no
page is open and the server is stopped ({{pairs}} pairs, each kind first in turn; load {{load:.0f}}):

| a step with the page open, in parts of one without | median | middle half of the pairs |
|---|---|---|
{{ratios}}

The browser drew on the same cores, and wall time counts that too. The server is a process of its own with a lower priority
and reads files only while a page is open. In {{viewed:.0f}} s of training with
the page open it used {{server:.1f}} s of processor time.

"""
STRETCH = 10
"""Steps of a training that are timed together."""


def main() -> None:
    """Measure, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["pages", "cost"], help="only this; the other one another time")
    parser.add_argument(
        "--place", type=Path, default=Path("runs/view-benchmark"), help="where the runs are made, or are"
    )
    parser.add_argument("--pairs", type=int, default=24, help="stretches of a training with and without the page")
    given = parser.parse_args()
    runs = given.place / "runs"
    if given.part != "cost" and not (runs / "long").is_dir():
        make(runs)
    with opened() as driver:
        if given.part != "cost":
            with viewing(runs) as (process, base, token):
                driver.get(f"{base}/?token={token}")
                load = os.getloadavg()[0]
                write_pages(load, looked(driver, process, base), reached(driver, base, runs))
        if given.part != "pages":
            write_cost(os.getloadavg()[0], *slowed(driver, given.place / "trained", given.pairs))


def write_pages(load: float, pages: list[tuple[str, float, float, float]], took: list[float]) -> None:
    """What docs/view.md says of pages."""
    rows = "\n".join(
        f"| {name} | {first:.1f} s | {again:.1f} s | {most:.0f} MB |" for name, first, again, most in pages
    )
    times = {"median": median(took), "count": len(took), "longest": max(took)}
    written(PAGES, COST, PAGES_SAY.format(cores=os.cpu_count(), load=load, pages=rows, **times))


def write_cost(load: float, ratios: list[tuple[float, ...]], viewed: float, server: float) -> None:
    """What docs/view.md says of what a run costs."""
    rows = []
    for name, held in zip(("processor time of the training's own process", "wall time"), ratios, strict=True):
        low, middle, high = quantiles(held, n=4)
        rows.append(f"| {name} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    said = {"steps": STRETCH, "pairs": len(ratios[0]), "viewed": viewed, "server": server, "load": load}
    written(COST, END, COST_SAYS.format(ratios="\n".join(rows), **said))


def written(begin: str, end: str, part: str) -> None:
    """Put it in the place of what stands there."""
    whole = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(whole[: whole.index(begin)] + part + whole[whole.index(end) :], encoding="utf-8")
    print(part)


def make(runs: Path) -> None:
    """The runs, from one of three steps."""
    subprocess.run([*CALL, *TRAIN, "--steps", "3", "--out", str(runs / "real"), "--quiet"], check=True)
    real = runs / "real"
    lines = [json.loads(line) for line in (real / "metrics.jsonl").read_text().splitlines()]
    line, timing = lines[-1], json.loads((real / "timing.jsonl").read_text().splitlines()[-1])
    draw = random.Random(0)
    for i in range(RUNS):
        run = runs / f"sweep,lr={1 + i // 4}e-5,seed={i % 4}"
        run.mkdir()
        config = json.loads((real / "config.json").read_text()) | {"seed": i % 4, "steps": STEPS}
        config["optim"]["lr"] = (1 + i // 4) * 1e-5
        (run / "config.json").write_text(json.dumps(config))
        shutil.copy(real / "run.json", run)
        write_log(run / "metrics.jsonl", line, draw)
        write_log(run / "timing.jsonl", timing, draw)
    long = runs / "long"
    shutil.copytree(runs / "sweep,lr=1e-5,seed=0", long)
    for folder in ("rollouts", "updates"):
        (long / folder).mkdir()
        (recorded,) = sorted((real / folder).glob("step-*3.parquet"))
        for step in range(1, STEPS + 1):
            shutil.copy(recorded, long / folder / f"step-{step:06d}.parquet")
    shutil.rmtree(real)


def write_log(path: Path, line: dict[str, Any], draw: random.Random) -> None:
    """So many steps like this one."""
    held = {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}
    with path.open("w") as file:
        for step in range(1, STEPS + 1):
            moved = {name: value * (1 + step / STEPS) + draw.gauss(0, 0.1) for name, value in held.items()}
            file.write(json.dumps({"step": step, **moved}) + "\n")


@contextmanager
def opened() -> Any:
    """A browser."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1600,1000"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


@contextmanager
def viewing(runs: Path) -> Any:
    """(process, base address, token) of a server."""
    process = subprocess.Popen([*CALL, "view", str(runs), "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", process.stdout.readline())
    assert found is not None
    try:
        yield process, found[1], found[2]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def seconds(action: Callable[[], object], done: Callable[[], object], times: int = 3) -> list[float]:
    """How long it takes from the action until it is done, each time."""
    out = []
    for _ in range(times):
        begun = time.monotonic()
        action()
        while not done():
            assert time.monotonic() - begun < 30, "not within 30 s"
            time.sleep(0.01)
        out.append(time.monotonic() - begun)
    return out


def memory(process: subprocess.Popen) -> float:
    """What the process held at most, in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1e3


def looked(driver: Any, process: subprocess.Popen, base: str) -> list[tuple[str, float, float, float]]:
    """Every page: its name, seconds at first and again, and the server's memory after it."""
    rows = f"return document.querySelectorAll('tbody tr').length > {RUNS - 1}"
    drawn = "return document.querySelectorAll('.card canvas').length > 3"
    tokens = "return document.querySelectorAll('.strip .tok').length > 10"
    many = "&".join(f"run=sweep%2Clr%3D{i}e-5%2Cseed%3D{k}" for i in (1, 2, 3) for k in range(4))
    pages = (
        (f"table of {RUNS + 1} runs of {STEPS:,} steps", "/", rows),
        (f"run of {STEPS:,} recorded steps with {ANSWERS} answers each", "/run/long", drawn),
        (
            "its answers, the first 100",
            "/run/long/answers",
            "return document.querySelectorAll('.answers tr').length > 90",
        ),
        ("one answer", "/run/long/answers/500/7", tokens),
        (
            "search for a text that is nowhere, until it offers to go on",
            "/run/long/answers?text=nowhere",
            "return document.querySelector('#found')",
        ),
        (f"12 runs of {STEPS:,} steps compared", f"/compare?{many}", drawn),
    )
    out = []
    for name, path, ready in pages:
        first, *again = seconds(lambda p=path: driver.get(base + p), lambda r=ready: driver.execute_script(r))
        out.append((name, first, median(again), memory(process)))
    told = "return !document.querySelector('#findings').textContent.startsWith('Looking')"
    (took,) = seconds(lambda: driver.get(f"{base}/run/long"), lambda: driver.execute_script(told), times=1)
    return [*out, ("what the doctor finds in that run", took, took, memory(process))]


def reached(driver: Any, base: str, runs: Path) -> list[float]:
    """Seconds from a written line to the page."""
    log = runs / "long" / "metrics.jsonl"
    line = json.loads(log.read_text().splitlines()[-1])
    driver.get(f"{base}/run/long")
    points = "return Number(document.body.dataset.points || 0)"
    time.sleep(2)
    took = []
    for i in range(10):
        count = len(log.read_text().splitlines()) + 1
        with log.open("a") as file:
            file.write(json.dumps({**line, "step": line["step"] + i + 1}) + "\n")
        took += seconds(lambda: None, lambda c=count: driver.execute_script(points) >= c, times=1)
    return took


def slowed(driver: Any, run: Path, pairs: int) -> tuple[list[tuple[float, ...]], float, float]:
    """What a step costs a training with `--view`: with its page open and, in turns, with no page and the server stopped.

    Stretches of one training are compared with their neighbours, because other work on the machine changes from minute to
    minute. The training's own processor time is counted without its server's.
    """
    words = [*CALL, *TRAIN, "--prompts", "4", "--sampling.max_new_tokens", "16", "--steps", "100000"]
    training = subprocess.Popen(
        [*words, "--out", str(run), "--overwrite", "--view"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert training.stderr is not None
    try:
        page = next(said.removeprefix("view: ").strip() for said in training.stderr if said.startswith("view: "))
        children = Path(f"/proc/{training.pid}/task/{training.pid}/children").read_text().split()
        server = next(int(pid) for pid in children if "rolecall.jobs.view" in Path(f"/proc/{pid}/cmdline").read_text())
        ratios, viewed, used = [], 0.0, processor(server)
        for i in range(pairs):
            found = {}
            for how in ("alone", "viewed") if i % 2 else ("viewed", "alone"):
                os.kill(server, signal.SIGCONT if how == "viewed" else signal.SIGSTOP)
                driver.get(page if how == "viewed" else "about:blank")
                steps_from(training.pid, run, 2)  # the page is drawn for the first time
                found[how] = steps_from(training.pid, run, STRETCH)
            viewed += STRETCH * found["viewed"][1]
            print("viewed: {:.3f} s of processor, {:.3f} s".format(*found["viewed"]), end=", ")
            print("alone: {:.3f} s of processor, {:.3f} s a step".format(*found["alone"]), flush=True)
            ratios.append([with_it / without for with_it, without in zip(found["viewed"], found["alone"], strict=True)])
        used = processor(server) - used
    finally:
        os.kill(server, signal.SIGCONT)
        training.terminate()
        training.communicate()
    return list(zip(*ratios, strict=True)), viewed, used


def processor(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def steps_from(pid: int, run: Path, steps: int) -> tuple[float, float]:
    """(processor seconds of the process alone, seconds) of each of its next steps."""

    def now() -> tuple[int, float, float]:
        log = run / "timing.jsonl"
        return log.read_bytes().count(b"\n") if log.is_file() else 0, processor(pid), time.monotonic()

    def after(step: int) -> tuple[int, float, float]:
        while (at := now())[0] < step:
            time.sleep(0.02)
        return at

    begun = after(now()[0] + 1)
    ended = after(begun[0] + steps)
    done = ended[0] - begun[0]
    return (ended[1] - begun[1]) / done, (ended[2] - begun[2]) / done


if __name__ == "__main__":
    main()
