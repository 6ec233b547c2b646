"""A disk that is full, read-only or gone: what was there stays, and the sentence says how much room is missing."""

import errno
import json
import os
import resource
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rolecall.errors import UserError
from rolecall.files import DiskError, disk_errno, write_atomically
from rolecall.train.checkpoint import latest, save
from rolecall.train.jsonl import JsonLines, read_lines
from rolecall.train.rundir import RunDir, disk_errors
from rolecall.train.state import read_state, write_state


@contextmanager
def largest_file(size: int):
    """Writes beyond `size` bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one megabyte."""
    place = tmp_path / "small"
    place.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True).returncode
    ):
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def weights(size: int):
    state = {"w": torch.ones(size, dtype=torch.uint8)}
    return lambda directory: write_state(directory, "trainer", state)


def test_a_full_disk_fails_the_save_and_nothing_else(small_disk):
    root = small_disk / "checkpoints"
    save(root, 1, weights(300_000), config={})
    save(root, 2, weights(300_000), config={})
    for attempt in range(2):
        with pytest.raises(
            DiskError, match=r"checkpoint step-000003 .* No space left.*needs at least .* are free.*make room"
        ) as e:
            save(root, 3, weights(600_000), config={})
        assert e.value.need >= 600_000, attempt
        assert 300_000 < e.value.free < 600_000, "what was written is removed before the free bytes are counted"
        assert sorted(path.name for path in root.iterdir()) == ["step-000001", "step-000002"]
    assert latest(root, strict=True).step == 2
    save(root, 3, weights(100_000), config={})
    assert latest(root, strict=True).step == 3, "the next try succeeds once there is room"


def plain_writer(directory: Path) -> None:
    (directory / "big.json").write_bytes(b" " * 50_000)


def pretrained_writer(directory: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(50_000, dtype=torch.uint8)}, directory / "model.safetensors")


@pytest.mark.parametrize("write", [plain_writer, pretrained_writer, weights(50_000)])
def test_a_file_that_may_not_grow_is_a_disk_error_whoever_writes_it(tmp_path, write):
    root = tmp_path / "checkpoints"
    save(root, 1, weights(10), config={})
    with largest_file(20_000), pytest.raises(DiskError, match="needs at least"):
        save(root, 2, write, config={})
    assert [path.name for path in root.iterdir()] == ["step-000001"]


def test_every_size_of_disk_gives_a_whole_save_or_none(tmp_path):
    root = tmp_path / "checkpoints"
    save(root, 1, weights(2000), config={"some": "config"})
    outcomes = set()
    for limit in range(0, 2800, 150):
        with largest_file(limit):
            try:
                save(root, 2, weights(2000), config={"some": "config"})
                outcomes.add("saved")
            except DiskError:
                outcomes.add("full")
                assert [path.name for path in root.iterdir()] == ["step-000001"]
    assert outcomes == {"saved", "full"}
    assert read_state(latest(root, strict=True).path, "trainer")["w"].sum() == 2000


def test_a_vanished_directory_is_a_disk_error(tmp_path):
    with pytest.raises(DiskError, match="No such file"):
        save(tmp_path / "gone" / "checkpoints", 1, weights(10), config={})
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)

    def vanish(directory: Path) -> None:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        weights(10)(directory)

    with pytest.raises(DiskError, match="check that the directory exists"):
        save(root, 1, vanish, config={})


def test_a_read_only_disk_is_found_at_the_start(small_disk):
    (small_disk / "runs").mkdir()
    RunDir(small_disk / "runs", "old").close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for name, options in (("new", {}), ("old", {"resume": True})):
        with pytest.raises(DiskError, match="Read-only file system"):
            RunDir(small_disk / "runs", name, **options)
    with pytest.raises(DiskError, match="Read-only file system"):
        save(small_disk / "runs" / "old" / "checkpoints", 1, weights(10), config={})


def test_an_atomic_write_keeps_the_old_file_when_the_disk_is_full(tmp_path):
    path = tmp_path / "config.json"
    write_atomically(path, b"old")
    for content in (b"x" * 5000, lambda target: target.write_bytes(b"x" * 5000)):
        with largest_file(1000), pytest.raises(DiskError, match=r"config\.json .* File too large"):
            write_atomically(path, content)
        assert path.read_bytes() == b"old"
    write_atomically(path, lambda target: target.write_bytes(b"new"))
    assert path.read_bytes() == b"new"
    with pytest.raises(ZeroDivisionError):
        write_atomically(path, lambda target: 1 // 0)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_log_that_is_full_never_raises_counts_the_gap_and_tears_no_line(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    text = "x" * 30
    for step in range(1, 11):
        with largest_file(200 if step < 8 else 10_000):
            log.append({"step": step, "text": text})
        for line in path.read_bytes().splitlines(keepends=True):
            assert line.endswith(b"\n")
            json.loads(line)
    lines = read_lines(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 8, 9, 10]
    assert [line.get("lost_lines") for line in lines] == [None, None, None, 4, None, None]
    assert log.lost == 4
    assert caplog.text.count("takes no more lines") == 1, "said once, not at every step"
    log.close()


def test_a_log_on_a_device_without_room():
    log = JsonLines(Path("/dev/full"))
    assert [log.append({"step": step}) for step in range(3)] == [False] * 3
    assert log.lost == 3
    log.close()


def test_part_of_a_line_that_could_not_be_taken_back_is_taken_back_later(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    log.append({"step": 1})
    size = path.stat().st_size

    def refuse(descriptor, length):
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch, largest_file(size + 4):
        patch.setattr(os, "ftruncate", refuse)
        assert not log.append({"step": 2})
    assert path.stat().st_size == size + 4, "the line is torn for now"
    assert [line["step"] for line in read_lines(path)] == [1], "and a reader does not see it"
    assert log.append({"step": 3})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]
    log.close()


def test_only_errors_of_the_disk_are_disk_errors(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    for error, code in [
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (RuntimeError("I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (PermissionError(errno.EACCES, "no", str(here / "x")), errno.EACCES),
        (PermissionError(errno.EACCES, "no", "/elsewhere/x"), None),
        (FileNotFoundError(errno.ENOENT, "no", str(here / "x")), None),
        (OSError(errno.EMFILE, "too many"), None),
        (ValueError("wrong"), None),
    ]:
        assert disk_errno(error, place=here) == code
    wrapped = RuntimeError("could not save")
    wrapped.__cause__ = OSError(errno.EDQUOT, "quota")
    assert disk_errno(wrapped, place=here) == errno.EDQUOT


def test_what_fails_while_a_run_is_open_is_a_disk_error_only_if_the_disk_is_to_blame(tmp_path):
    """A run whose directory was emptied under it is gone; a file of the user's that is missing is not."""
    missing = FileNotFoundError(errno.ENOENT, "no such file", "rows.jsonl")
    given = UserError("rows.jsonl is not there")
    given.__cause__ = OSError(errno.ENOSPC, "full")
    for files, error, expected in [
        (("metrics.jsonl",), missing, FileNotFoundError),
        ((), missing, DiskError),
        (None, missing, DiskError),
        ((), NotADirectoryError(errno.ENOTDIR, "no"), DiskError),
        ((), ValueError("wrong"), ValueError),
        ((), OSError(errno.EMFILE, "too many"), OSError),
        (("metrics.jsonl",), OSError(errno.ENOSPC, "full"), DiskError),
        (("metrics.jsonl",), given, UserError),
    ]:
        place = tmp_path / "run"
        if files is not None:
            place.mkdir()
            for name in files:
                (place / name).touch()
        with pytest.raises(Exception) as raised, disk_errors(place):  # noqa: PT011 - which one is the question
            raise error
        assert type(raised.value) is expected
        assert (raised.value is error) == (expected is not DiskError)
        shutil.rmtree(place, ignore_errors=True)
