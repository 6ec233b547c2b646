"""Whenever the process is killed or the power is cut, the latest checkpoint is the one before or the new one, whole."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from crash_driver import write
from power import PowerModel, build

from rolecall.train import checkpoint, manifest
from rolecall.train.checkpoint import latest, save, sweep
from rolecall.train.manifest import DamagedCheckpointError

DRIVER = Path(__file__).with_name("crash_driver.py")


def drive(*arguments: object) -> list[dict]:
    command = [sys.executable, str(DRIVER), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kill_before_any_call_of_a_save_leaves_the_old_or_the_new_step(tmp_path):
    first, again = drive("boundaries", tmp_path)
    for result, before in ((first, "before 2"), (again, "before 3")):
        marks = result["marks"]
        assert result["finished"]
        assert len(marks) > 25, "the calls were counted"
        turn = marks.index("new save")
        assert marks == [before] * turn + ["new save"] * (len(marks) - turn)
        assert 0 < turn < len(marks) - 1


def test_sixty_kills_at_random_moments_leave_the_old_or_the_new_step(tmp_path):
    results = drive("moments", tmp_path / "checkpoints", 7, 60)
    assert len(results) == 60
    before = None
    for result in results:
        # The save that was going on may have taken its name right before the kill.
        done = result["done"]
        allowed = (done[-1], successor(done[-1])) if done else (before, first_after(before))
        assert result["found"] in allowed
        before = result["found"]
    assert sum(result["unfinished"] for result in results) > 10, "kills fell into saves"
    assert len({result["found"] for result in results}) > 10, "saves went on between kills"


def first_after(mark: str | None) -> str:
    """What the driver saves first when it starts from this one."""
    return f"{int(mark[:6]) + 1 if mark else 1:06d}.0"


def successor(mark: str) -> str:
    """What the driver saves next while it runs: every third step twice."""
    return f"{mark[:6]}.1" if int(mark[:6]) % 3 == 0 and mark.endswith(".0") else first_after(mark)


def damaged_disks(root: Path, work, monkeypatch, scratch: Path) -> tuple[int, int]:
    """How many disks a power cut may leave, and on how many of them the latest checkpoint is neither old nor new.

    Once the save has returned, only the new one will do.
    """
    model = PowerModel(root)
    model.record(monkeypatch, work)
    count = bad = 0
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # only what is found matters from here on
    for over, disk in model.disks(seed=0, draws=60):
        place = scratch / "disk"
        build(disk, place)
        count += 1
        try:
            sweep(place)
            found = latest(place, strict=True)
            mark = (found.path / "a.txt").read_text()[:8] if found else None
            bad += mark not in ({"new save"} if over else {"before 2", "new save"})
        except DamagedCheckpointError:
            bad += 1
        shutil.rmtree(place)
    return count, bad


@pytest.mark.parametrize("step", [3, 2], ids=["new step", "same step again"])
def test_a_power_cut_after_any_operation_leaves_the_old_or_the_new_step(tmp_path, monkeypatch, step):
    root = tmp_path / "checkpoints"
    for number in (1, 2):
        save(root, number, write(f"before {number}", 80), config={})

    def work() -> None:
        save(root, step, write("new save", 80), config={})

    count, bad = damaged_disks(root, work, monkeypatch, tmp_path)
    assert count > 25
    assert bad == 0


@pytest.mark.parametrize("skipped", range(6))
def test_the_model_finds_each_fsync_that_is_left_out(tmp_path, monkeypatch, skipped):
    """Two files, the manifest, the inner directory, the directory, its parent: none of the six can be spared."""
    root = tmp_path / "checkpoints"
    save(root, 2, write("before 2", 80), config={})
    real, calls = manifest.fsync_path, []

    def all_but_one(path: Path) -> None:
        calls.append(path)
        if len(calls) != skipped + 1:
            real(path)

    def work() -> None:
        with monkeypatch.context() as patch:
            for module in (checkpoint, manifest):
                patch.setattr(module, "fsync_path", all_but_one)
            save(root, 3, write("new save", 80), config={})

    _, bad = damaged_disks(root, work, monkeypatch, tmp_path)
    assert bad > 0
    assert len(calls) == 6


def test_the_model_finds_a_save_that_removes_the_old_step_first(tmp_path, monkeypatch):
    root = tmp_path / "checkpoints"
    save(root, 2, write("before 2", 80), config={})

    def publish(unfinished: Path, final: Path) -> None:
        shutil.rmtree(final)
        unfinished.rename(final)

    def work() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_publish", publish)
            save(root, 2, write("new save", 80), config={})

    _, bad = damaged_disks(root, work, monkeypatch, tmp_path)
    assert bad > 0


def test_unfinished_work_is_invisible_and_swept(tmp_path):
    save(tmp_path, 1, write("step one"), config={})
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000002.tmp-0123")
    (tmp_path / "stray.tmp-9").write_text("x")
    assert latest(tmp_path).step == 1
    assert {path.name for path in sweep(tmp_path)} == {"step-000002.tmp-0123", "stray.tmp-9"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
