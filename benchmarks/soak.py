"""Real runs that are killed, stopped, hung and starved of disk by a seeded plan, and resumed: is anything lost or left behind?

    python benchmarks/soak.py --minutes 30 [--seed 0] [--only grpo]

Each kind of run is left alone once; then it is disturbed again and again until it ends, and its bytes are compared with those
of the first. Afterwards a long run is watched for memory, descriptors and threads that grow. Writes the table in
docs/reliability.md if all kinds were run. Disks are filled on a tmpfs, which takes root.
"""

import argparse
import ctypes
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
PAGE, BEGIN, END = ROOT / "docs" / "reliability.md", "<!-- soak: begin -->", "<!-- soak: end -->"
sys.path.insert(0, str(ROOT / "tests" / "jobs"))

REWARD = """import os, time
def letters(completions, **columns):
    while os.path.exists({flag!r}):
        time.sleep(0.1)
    return [sum(map(ord, text)) % 7 / 6 for text in completions]
"""
RL = ["rl", "--rows", "sorting:length=3", "--steps", "10", "--prompts", "4", "--sampling.max_new_tokens", "6"]
LETTERS = ["--reward", "{place}/reward.py:letters", "--samples", "4"]
KINDS = {
    "grpo": [*RL, "--preset", "grpo", *LETTERS],
    "ppo": [*RL, "--preset", "ppo", "--algorithm.critic", "separate", *LETTERS],
    "replay": [*RL, "--preset", "grpo", "--replay.share", "0.5", *LETTERS],
    "agents": [
        *(
            "rl",
            "--preset",
            "grpo",
            "--env",
            f"{ROOT}/tests/jobs/letters_env.py:Letters",
            "--steps",
            "8",
            "--prompts",
            "3",
        ),
        *("--samples", "4", "--sampling.max_new_tokens", "6", "--agent.workers", "1"),
    ],
    "qmix": [
        *(
            "marl",
            "--algo",
            "qmix",
            "--env",
            "lbf:5x5-2p-1f",
            "--steps",
            "30",
            "--episodes",
            "4",
            "--agent.hidden",
            "8",
        ),
        *("--q.buffer", "10", "--q.batch", "4"),
    ],
    "2 ranks": [*RL, "--preset", "grpo", *LETTERS, "--rank_timeout", "20"],
}
FAULTS = ("kill", "kill", "term", "int", "hang", "disk")
FINE = {"kill": {-9}, "term": {143, -15}, "int": {130, -2}, "hang": {143, -15}, "disk": {74, 143, -15}}
"""How a disturbed process may end beside 0: by the signal if it had not begun yet. Torchrun ends as it likes."""


def command(kind: str, place: Path, out: Path, *, resume: bool) -> list[str]:
    words = [word.format(place=place) for word in KINDS[kind]]
    words += ["--out", str(out), "--save.every", "1", "--grace", "6", "--quiet", *(["--resume"] if resume else [])]
    if kind == "2 ranks":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
        return [sys.executable, *torchrun, "rolecall", *words]
    return [sys.executable, "-m", "rolecall", *words]


def kill_all(process: subprocess.Popen) -> None:
    """The process and all below it: torchrun gives each of its own a session."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        for one in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()


@contextmanager
def started(words: list[str], place: Path) -> Iterator[subprocess.Popen]:
    """A process with its own temporary directory, ended with all that it started."""
    temporary = place / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    with (place / "said.txt").open("ab") as said:
        process = subprocess.Popen(words, env=environment, stdout=said, stderr=said, start_new_session=True)
        try:
            yield process
        finally:
            kill_all(process)
            process.wait()


def disturb(process: subprocess.Popen, fault: str, place: Path, disk: Path, moment: float) -> tuple[str, int | None]:
    """Do it after `moment` seconds; what was done, and the exit code, or None if the process must be ended by hand."""
    with suppress(subprocess.TimeoutExpired):
        return "end", process.wait(moment)
    if fault == "kill":
        kill_all(process)
    elif fault in ("term", "int"):
        process.send_signal(signal.SIGTERM if fault == "term" else signal.SIGINT)
    elif fault == "hang":  # the reward hangs, and only then comes the signal
        (place / "flag").touch()
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
    elif fault == "disk":
        filled = disk / "ballast"
        with suppress(OSError), filled.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
        time.sleep(3)
        filled.unlink()
        with suppress(subprocess.TimeoutExpired):
            return fault, process.wait(moment / 2)
        process.send_signal(signal.SIGTERM)
    try:
        return fault, process.wait(60)
    except subprocess.TimeoutExpired:
        return fault, None
    finally:
        (place / "flag").unlink(missing_ok=True)


def leftovers(place: Path) -> list[str]:
    """Processes and temporary files that outlived their run."""
    time.sleep(0.5)
    own = psutil.Process()
    processes = [f"process {' '.join(p.cmdline()[:6])}" for p in own.children(recursive=True) if p.status() != "zombie"]
    while True:  # orphans come to this process
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break
    files = [f"file {path.name}" for path in (place / "tmp").iterdir() if not path.name.startswith("torchelastic")]
    shutil.rmtree(place / "tmp")
    return processes + files


def soak(kind: str, place: Path, disk: Path, rng: random.Random, until: float) -> dict[str, object]:
    """Disturbed runs of one kind until it is time."""
    from resume_driver import differing

    (place / "reward.py").write_text(REWARD.format(flag=str(place / "flag")))
    whole, broken, begun = disk / "whole", disk / "broken", time.monotonic()
    with started(command(kind, place, whole, resume=False), place) as process:
        if process.wait(300) != 0:
            sys.exit(f"{kind}: {(place / 'said.txt').read_text()[-2000:]}")
    length = time.monotonic() - begun
    wrong, ends, left, finished = [], Counter(), leftovers(place), 0
    while time.monotonic() < until or not finished:
        fault = rng.choice(FAULTS) if time.monotonic() < until else "none"
        if fault == "hang" and kind in ("agents", "qmix"):
            fault = "term"
        with started(command(kind, place, broken, resume=broken.is_dir()), place) as process:
            done, code = (
                ("end", process.wait(300))
                if fault == "none"
                else disturb(process, fault, place, disk, rng.uniform(0.3, 1.0) * length)
            )
        ends[done] += 1
        fine = FINE.get(done, set()) | ({1, -2, -15} if kind == "2 ranks" and done != "end" else set())
        if code not in fine | {0}:
            wrong.append(f"{fault}: exit code {code}: {(place / 'said.txt').read_text()[-300:]}")
            shutil.rmtree(broken, ignore_errors=True)
            finished += fault == "none"
        left += [f"{fault}: {one}" for one in leftovers(place) if fault != "kill" or one.startswith("process")]
        if code == 0 and (broken / "model").is_dir():
            finished += 1
            wrong += [f"differs: {name}" for name in differing(whole, broken)]
            shutil.rmtree(broken)
    return {"kind": kind, "ends": ends, "finished": finished, "wrong": wrong, "left": left}


def watch(place: Path, seconds: float) -> str:
    """A long run: its memory, descriptors and threads in the middle and at the end."""
    (place / "reward.py").write_text(REWARD.format(flag=str(place / "flag")))
    words = [*command("grpo", place, place / "long", resume=False), "--steps", "100000"]
    seen: list[tuple[float, int, int]] = []
    with started(words, place) as process:
        watched, end = psutil.Process(process.pid), time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.5)
            if process.poll() is not None:
                sys.exit(f"the long run ended: {(place / 'said.txt').read_text()[-500:]}")
            with watched.oneshot():
                seen.append((watched.memory_info().rss / 1e6, watched.num_fds(), watched.num_threads()))
    third = len(seen) // 3
    middle, last = seen[third : 2 * third], seen[2 * third :]
    before, after = (statistics.median(x[0] for x in part) for part in (middle, last))
    most = [max(x[i] for x in last) - max(x[i] for x in middle) for i in (1, 2)]
    lines = (place / "long" / "metrics.jsonl").read_bytes().count(b"\n")
    return (
        f"{lines:,} steps in {seconds:.0f} s: memory {before:.0f} MB in the middle third and {after:.0f} MB in the last "
        f"({after / before - 1:+.1%}), {most[0]:+d} descriptors, {most[1]:+d} threads"
    )


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp())
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)
        place.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(KINDS))
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what outlives its parent comes to this process
    kinds = [given.only] if given.only else list(KINDS)
    share, rows, bad = given.minutes * 60 / (len(kinds) + 1), [], []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as name, small_disk(400) as disk:
            found = soak(kind, Path(name), disk, random.Random(f"{given.seed} {kind}"), time.monotonic() + share)
        ends = ", ".join(f"{count} {fault}" for fault, count in sorted(found["ends"].items()))
        wrong = [*found["wrong"], *found["left"]]
        rows.append(f"| {kind} | {ends} | {found['finished']} | {len(found['wrong'])} | {len(found['left'])} |")
        print(rows[-1], *wrong, sep="\n  ", flush=True)
        bad += wrong
    with tempfile.TemporaryDirectory() as name:
        grown = watch(Path(name), max(60.0, share))
    print(grown)
    head = ["| run | disturbed by | ended | bytes or exit codes wrong | left behind |", "|---|---|---|---|---|"]
    if not given.only:
        before, rest = PAGE.read_text().split(BEGIN)
        date = time.strftime("%Y-%m-%d")
        table = "\n".join(
            [f"{date}, seed {given.seed}, {given.minutes:g} minutes.", "", *head, *rows, "", f"A long run: {grown}."]
        )
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
