"""Files that rolecall reads, made whole and then damaged, and the readers of them. Run as a script it fuzzes for long:

python tests/faults/fuzzed.py READER SECONDS [SEED]
"""

import json
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from rolecall.config.files import read_settings
from rolecall.errors import UserError
from rolecall.experience.parquet import StoreError, read_table, write_table
from rolecall.experience.rollout_schema import ROLLOUTS, UPDATES
from rolecall.look.run import read_run
from rolecall.policy.headers import FormatError, check_gguf, check_safetensors
from rolecall.tasks.row_files import read_rows
from rolecall.train.checkpoint import latest, save
from rolecall.train.jsonl import JsonLines, read_lines
from rolecall.train.manifest import CheckpointError
from rolecall.train.state import read_state, write_state

ALLOWED = (UserError, StoreError, FormatError, CheckpointError)
"""What a reader may raise: a sentence for people."""
MOST = 64 << 20
"""Bytes that the process may grow by while a reader reads any number of these files, of at most some hundred kilobytes each."""

_ROWS = [{"prompt": "1+1=", "answer": "2", "n": [1, 2]}, {"prompt": "ü\u202e", "answer": None, "extra": {"a": 1.5}}]


def _jsonl(path: Path) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in _ROWS))


def _json(path: Path) -> None:
    path.write_text(json.dumps(_ROWS))


def _csv(path: Path) -> None:
    path.write_text('prompt,answer\n"1,+1=",2\nx,"y\nz"\n')


def _row_table(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "1+1=", "answer": "2"}] * 3), path)


def _yaml(path: Path) -> None:
    path.write_text("steps: 3\noptim: {lr: 1e-3}\nrows: [a, b]\nsampling:\n  temperature: 0.7\n")


def _records(path: Path, form: Any) -> None:
    write_table(path, form.schema.empty_table(), form, {})


def _safetensors(path: Path) -> None:
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}, path)


def _gguf(path: Path) -> None:
    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    entry = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    numbers = text("a.list") + struct.pack("<IIQ", 9, 4, 3) + struct.pack("<III", 1, 2, 3)
    tensor = text("w") + struct.pack("<IQIQ", 1, 32, 0, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + entry + numbers + tensor + bytes(256))


def _lines(path: Path) -> None:
    path.write_text("".join(f"{json.dumps({'step': i, 'loss': 1 / (i + 1), 'bad': 'nan'})}\n" for i in range(4)))


def _append(path: Path) -> None:
    """As a run does that goes on: open, which cuts a torn end, and write."""
    log = JsonLines(path)
    log.append({"step": 9})
    log.close()
    assert path.read_bytes().splitlines()[-1] == b'{"step": 9}'
    read_lines(path)


def _checkpoint(path: Path) -> None:
    """In the file's place a folder of two checkpoints; the newer one's manifest is what gets damaged."""
    root = path.parent / "checkpoints"
    for step in (1, 2):
        save(root, step, lambda place: (place / "x.txt").write_text("x"), config={"a": step})
    path.write_bytes((root / "step-000002" / "manifest.json").read_bytes())


def _latest(path: Path) -> None:
    root = path.parent / "checkpoints"
    (root / "step-000002" / "manifest.json").write_bytes(path.read_bytes())
    found = latest(root, read_only=True)
    assert found is not None
    assert found.step in (1, 2)


def _state(path: Path) -> None:
    write_state(path.parent, "trainer", {"a": torch.ones(2), "b": [1, 2.5, None, (3,)], "c": {"d": "e", 7: True}})
    path.write_bytes((path.parent / "trainer.json").read_bytes())


def _read_state(path: Path) -> None:
    (path.parent / "trainer.json").write_bytes(path.read_bytes())
    try:
        read_state(path.parent, "trainer")
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _run(path: Path) -> None:
    (path.parent / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (path.parent / "config.json").write_text('{"steps": 3}')
    path.write_text(json.dumps({"format": 1, "command": "rl", "versions": {"rolecall": "0.1"}}))


def _read_run(path: Path) -> None:
    (path.parent / "run.json").write_bytes(path.read_bytes())
    read_run(path.parent)


def _all_rows(path: Path) -> None:
    rows = read_rows(path)
    for i in range(len(rows)):
        rows[i]


READERS: dict[str, tuple[str, Callable[[Path], None], Callable[[Path], Any]]] = {
    "rows-jsonl": ("rows.jsonl", _jsonl, _all_rows),
    "rows-json": ("rows.json", _json, _all_rows),
    "rows-csv": ("rows.csv", _csv, _all_rows),
    "rows-parquet": ("rows.parquet", _row_table, _all_rows),
    "yaml": ("settings.yaml", _yaml, read_settings),
    "rollouts": ("step-000001.parquet", lambda path: _records(path, ROLLOUTS), lambda path: read_table(path, ROLLOUTS)),
    "updates": ("step-000001.parquet", lambda path: _records(path, UPDATES), lambda path: read_table(path, UPDATES)),
    "safetensors": ("model.safetensors", _safetensors, check_safetensors),
    "gguf": ("model.gguf", _gguf, check_gguf),
    "metrics": ("metrics.jsonl", _lines, _append),
    "manifest": ("given.json", _checkpoint, _latest),
    "state": ("given.json", _state, _read_state),
    "run": ("given.json", _run, _read_run),
}
"""By name: the file's name, what writes a good one, what reads it."""


def damaged(good: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut out, put in, repeated or torn off, or numbers replaced by large ones."""
    held = bytearray(good)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, length = rng.randrange(len(held) + 1), rng.choice((1, 2, 8, 40))
        match rng.randrange(7):
            case 0 if held:
                held[min(at, len(held) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del held[at : at + length]
            case 2:
                held[at:at] = rng.randbytes(length)
            case 3:
                held[at:at] = held[at : at + length] * rng.choice((1, 50))
            case 4:
                del held[at:]
            case 5:
                held[at : at + 8] = struct.pack("<Q", rng.choice((0, 2**31, 2**40, 2**63 - 1, 2**64 - 1)))
            case 6:
                held[at:at] = rng.choice(
                    (b"[" * 3000, b"1e999", b"NaN", b"\x00", b"\xff\xfe", b'{"a":', b"&a *a ", b"9" * 5000)
                )
    return bytes(held)


def attempt(name: str, place: Path, seed: int) -> None:
    """Read one damaged file; raises if the reader raises anything but a sentence."""
    file, write, read = READERS[name]
    path = place / file
    if not path.exists():
        write(path)
        (place / "good").write_bytes(path.read_bytes())
        read(path)  # as it is, it can be read
    path.write_bytes(damaged((place / "good").read_bytes(), random.Random(seed)))
    try:
        read(path)
    except ALLOWED as error:
        said = str(error)
    else:
        return
    assert said
    assert "\n" not in said


def fuzz(name: str, place: Path, seeds: Iterable[int]) -> tuple[int, int]:
    """Read damaged files; returns how many, and the bytes by which the process was larger than before at its largest.

    Raises with the seed at which a reader raised anything but a sentence, or took more memory than `MOST`.
    """
    count, before = 0, 0
    for count, seed in enumerate(seeds, 1):
        try:
            attempt(name, place, seed)
            if count == 1:  # what a first use loads is there now
                Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is forgotten
                before = resident("VmRSS")
            assert resident("VmHWM") - before <= MOST, "too much memory"
        except Exception as error:
            raise AssertionError(f"{name}: seed {seed}") from error
    return count, max(0, resident("VmHWM") - before)


def resident(which: str) -> int:
    """Bytes of this process that are in memory: now (VmRSS), or at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith(which))


def _until(end: float, seed: int) -> Iterator[int]:
    while time.monotonic() < end:
        yield seed
        seed += 1


if __name__ == "__main__":
    np.seterr(all="ignore")
    name, seconds, first = sys.argv[1], float(sys.argv[2]), int((sys.argv[3:] or ["0"])[0])
    with tempfile.TemporaryDirectory() as folder:
        files, grown = fuzz(name, Path(folder), _until(time.monotonic() + seconds, first))
    sys.stdout.write(f"{name}: {files} files, nothing but sentences, {grown / 1e6:.1f} MB at most\n")
