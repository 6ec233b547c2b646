"""Saves checkpoints in forked children and kills them, then looks at what is left. Run as a script, without torch.

`boundaries ROOT`            a child is killed right before its n-th call to the system, for every n
`moments ROOT SEED KILLS`    children save on and on and are killed at random moments
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rolecall.train.checkpoint import latest, save, sweep

CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


def write(mark: str, size: int = 60_000) -> Callable[[Path], None]:
    def inner(directory: Path) -> None:
        (directory / "deep").mkdir()
        for name in ("a.txt", "deep/b.txt"):
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT)
            for _ in range(3):
                os.write(descriptor, mark.encode() * (size // len(mark)))
            os.close(descriptor)

    return inner


def mark_of(root: Path) -> str | None:
    """What the latest checkpoint holds, after the tidying every start does; damage raises."""
    sweep(root)
    found = latest(root, strict=True)
    assert not list(root.glob("*.tmp-*"))
    if found is None:
        return None
    marks = {(found.path / name).read_text()[:8] for name in ("a.txt", "deep/b.txt")}
    assert len(marks) == 1
    return marks.pop()


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    return child


def die_before(call: int) -> None:
    count = 0

    def counted(real: Callable) -> Callable:
        def inner(*args: object, **options: object) -> object:
            nonlocal count
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return real(*args, **options)

        return inner

    os.fsync = lambda descriptor: None  # a killed process loses nothing by it, and it takes most of the time
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def boundaries(root: Path) -> list[object]:
    """The marks found after a death before each call of a save of step 3, and of a second save of step 3."""
    results = []
    for before, step in (((1, 2), 3), ((2, 3), 3)):
        seen = []
        base, trial = root / "base", root / "trial"
        for number in before:
            base.mkdir(parents=True, exist_ok=True)
            save(base, number, write(f"before {number}"), config={})
        for call in range(1000):
            shutil.copytree(base, trial)

            def work(call: int = call, step: int = step, trial: Path = trial) -> None:
                die_before(call)
                save(trial, step, write("new save"), config={})

            _, status = os.waitpid(forked(work), 0)
            seen.append(mark_of(trial))
            shutil.rmtree(trial)
            if os.WIFEXITED(status):
                break
        shutil.rmtree(base)
        results.append({"finished": status == 0, "marks": seen})
    return results


def moments(root: Path, seed: int, kills: int) -> list[object]:
    """For each kill: the last save that returned, the one that was going on, and the one that is found."""
    root.mkdir(parents=True)
    rng = random.Random(seed)
    results, step = [], 0
    for _ in range(kills):
        reader, writer = os.pipe()

        def work(start: int = step, pipe: int = writer) -> None:
            for number in range(start + 1, start + 1000):
                # Every third step is saved twice, as after a resume.
                for again in range(2 if number % 3 == 0 else 1):
                    mark = f"{number:06d}.{again}"
                    save(root, number, write(mark), config={})
                    os.write(pipe, f"{mark}\n".encode())

        child = forked(work)
        os.close(writer)
        time.sleep(rng.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done = os.read(reader, 1 << 16).decode().split()
        os.close(reader)
        unfinished = bool(list(root.glob("*.tmp-*")) or list(root.glob("*.old-*")))
        found = mark_of(root)
        results.append({"done": done, "found": found, "unfinished": unfinished})
        step = int(found[:6]) if found else 0
    return results


if __name__ == "__main__":
    mode, place, *numbers = sys.argv[1:]
    outcome = boundaries(Path(place)) if mode == "boundaries" else moments(Path(place), *map(int, numbers))
    sys.stdout.write(json.dumps(outcome))
