"""Checkpoints: complete or invisible, verified, kept, and refused for a reason."""

import json
import logging
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from rolecall.policy.headers import MAX_HEADER_BYTES, FormatError
from rolecall.train import checkpoint, manifest
from rolecall.train.checkpoint import cut_after, differences, latest, save, sweep, verify
from rolecall.train.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    RefusedCheckpointError,
    check_format,
    check_model,
    seal_model,
)

CONFIG = {"model": {"hidden": 8, "layers": 2}, "lr": 0.1, "steps": 10}


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def writer(mark: str):
    def write(directory: Path) -> None:
        weights = {"w": {"dtype": "U8", "shape": [len(mark)], "data_offsets": [0, len(mark)]}}
        (directory / "model.safetensors").write_bytes(safetensors(weights, mark.encode()))
        (directory / "trainer").mkdir()
        (directory / "trainer" / "state.json").write_text(json.dumps({"mark": mark}))

    return write


def saved(root: Path, *steps: int, mark: str = "", **options) -> None:
    for step in steps:
        save(root, step, writer(mark or f"step {step}"), config=CONFIG, **options)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_was_saved_is_found_with_its_step_config_and_files(tmp_path):
    root = tmp_path / "checkpoints"
    assert latest(root) is None
    path = save(root, 10, writer("x"), config=CONFIG)
    found = latest(root)
    assert found.path == path == root / "step-000010"
    assert (found.step, found.config) == (10, CONFIG)
    assert found.files == {name: (path / name).stat().st_size for name in ("model.safetensors", "trainer/state.json")}
    assert names(root) == ["step-000010"]
    assert verify(path) == found


def test_the_latest_is_by_number_not_by_time_or_by_name(tmp_path):
    saved(tmp_path, 1_000_000, 999_999, 2)
    assert latest(tmp_path).step == 1_000_000


def test_retention_keeps_the_newest_and_the_protected(tmp_path):
    for step in range(1, 7):
        saved(tmp_path, step, keep=2, protect=[2])
    assert names(tmp_path) == ["step-000002", "step-000005", "step-000006"]
    with pytest.raises(ValueError, match="keep must be at least 2"):
        saved(tmp_path, 7, keep=1)


def test_retention_never_removes_what_was_just_saved(tmp_path):
    saved(tmp_path, 8, 9, 3)
    assert names(tmp_path) == ["step-000003", "step-000008", "step-000009"]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(tmp_path, monkeypatch, caplog):
    saved(tmp_path, 1, 2)

    def refuse(path):
        raise PermissionError(13, "no", str(path))

    monkeypatch.setattr(checkpoint, "_remove", refuse)
    saved(tmp_path, 3)
    assert latest(tmp_path).step == 3
    assert "could not remove the old checkpoint" in caplog.text


def test_saving_a_step_again_replaces_it(tmp_path):
    saved(tmp_path, 1, 2, mark="old")
    saved(tmp_path, 2, mark="new")
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert b"new" in (latest(tmp_path).path / "model.safetensors").read_bytes()


def test_a_step_that_was_being_replaced_is_put_back(tmp_path):
    saved(tmp_path, 1, 2)
    for tidy in (sweep, latest):
        (tmp_path / "step-000002").rename(tmp_path / "step-000002.old-abc")
        (tmp_path / "step-000002.tmp-abc").mkdir()
        tidy(tmp_path)
        assert latest(tmp_path).path == tmp_path / "step-000002"


def test_the_replaced_one_stands_in_if_the_new_one_is_damaged(tmp_path):
    saved(tmp_path, 2, mark="old")
    (tmp_path / "step-000002").rename(tmp_path / "step-000002.old-abc")
    saved(tmp_path, 1)
    (tmp_path / "step-000001").rename(tmp_path / "step-000002")  # a manifest of another step
    assert latest(tmp_path).step == 2
    assert names(tmp_path) == ["step-000002", "step-000002.corrupt"]


def test_a_writer_that_fails_leaves_nothing_and_its_error_is_passed_on(tmp_path):
    saved(tmp_path, 1)

    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, fail, config=CONFIG)
    with pytest.raises(FileNotFoundError):  # the writer's own mistake, not the disk's
        save(tmp_path, 2, lambda directory: (directory / "no" / "such").touch(), config=CONFIG)
    with pytest.raises(ValueError, match="nothing was written"):
        save(tmp_path, 2, lambda directory: None, config=CONFIG)
    with pytest.raises(ValueError, match="the checkpoint's own"):
        save(tmp_path, 2, lambda directory: (directory / "manifest.json").write_text("{}"), config=CONFIG)
    assert names(tmp_path) == ["step-000001"]


def test_each_file_is_hashed_once_by_a_verified_load(tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)
    hashed = []
    real = manifest._sha256
    monkeypatch.setattr(manifest, "_sha256", lambda path: hashed.append(path.name) or real(path))
    latest(tmp_path)
    assert sorted(hashed) == ["model.safetensors", "state.json"]


# Damage: each of these happens to the newer of two checkpoints.


def flip_bit(path: Path) -> None:
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def replace_by_link(path: Path) -> None:
    (path / "model.safetensors").rename(path.parent / "elsewhere")
    (path / "model.safetensors").symlink_to(path.parent / "elsewhere")


def lie_about_config(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"lr": 0.1', '"lr": 0.2'))


DAMAGE = {
    "bit flip": (flip_bit, "model.safetensors changed"),
    "truncated": (lambda p: os.truncate(p / "model.safetensors", 20), "model.safetensors has 20 bytes instead of"),
    "missing": (lambda p: (p / "trainer" / "state.json").unlink(), "trainer/state.json is missing"),
    "extra": (lambda p: (p / "evil.pkl").write_bytes(b"x"), "evil.pkl is not in its manifest"),
    "link": (replace_by_link, "is a link"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json cannot be read"),
    "empty manifest": (lambda p: os.truncate(p / "manifest.json", 0), "manifest.json cannot be read"),
    "nested manifest": (lambda p: (p / "manifest.json").write_text("[" * 100_000), "manifest.json cannot be read"),
    "edited manifest": (lie_about_config, "manifest.json changed"),
    "list as manifest": (lambda p: (p / "manifest.json").write_text("[1]"), "manifest.json cannot be read"),
}


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_named_set_aside_and_passed_over(tmp_path, caplog, damage, sentence):
    saved(tmp_path, 1, 2)
    damage(tmp_path / "step-000002")
    with pytest.raises(DamagedCheckpointError, match=sentence):
        latest(tmp_path, strict=True)
    assert latest(tmp_path, read_only=True).step == 1
    assert (tmp_path / "step-000002").is_dir(), "neither strict nor read_only renames anything"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path).step == 1
    assert sentence in caplog.text
    assert "step-000002.corrupt" in names(tmp_path)
    saved(tmp_path, 2)
    assert latest(tmp_path, strict=True).step == 2, "the step can be saved again"


def test_every_single_bit_of_a_manifest_counts(tmp_path):
    saved(tmp_path, 1, 2)
    file = tmp_path / "step-000002" / "manifest.json"
    good = file.read_bytes()
    for i in range(len(good)):
        bad = bytearray(good)
        bad[i] ^= 1 << (i % 8)
        file.write_bytes(bad)
        try:
            found = checkpoint.verify(file.parent)
        except (DamagedCheckpointError, RefusedCheckpointError):
            continue
        # White space between tokens may change without changing what is said.
        assert json.loads(bytes(bad)) == json.loads(good), f"byte {i}"
        assert found.step == 2


def test_damage_upon_damage_gets_names_of_its_own(tmp_path):
    for _ in range(3):
        saved(tmp_path, 2)
        flip_bit(tmp_path / "step-000002")
        assert latest(tmp_path) is None
    assert names(tmp_path) == ["step-000002.corrupt", "step-000002.corrupt-2", "step-000002.corrupt-3"]


def test_what_cannot_be_read_for_another_reason_is_not_called_damaged(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def refuse(path):
        raise OSError(24, "Too many open files", str(path))

    monkeypatch.setattr(manifest, "_sha256", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        latest(tmp_path)
    assert names(tmp_path) == ["step-000001"]


def test_a_future_schema_is_refused_naming_both_versions(tmp_path):
    saved(tmp_path, 1, 2)
    file = tmp_path / "step-000002" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 7}))
    with pytest.raises(RefusedCheckpointError, match=r"schema version 7 but .* up to version 1"):
        latest(tmp_path)
    assert names(tmp_path) == ["step-000001", "step-000002"]


@dataclass(frozen=True)
class Config:
    hidden: int = 8
    betas: tuple[float, float] = (0.9, 0.99)
    where: Path = Path("runs")
    limit: float = float("inf")


def test_differences_name_fields_by_their_path():
    old = {"a": {"b": 1, "gone": None}, "same": [1, 2], "flag": 1, "n": 1, "empty": {}}
    new = {"a": {"b": 2}, "same": (1, 2), "flag": True, "n": 1.0, "empty": {}, "new": "x"}
    assert differences(old, new) == [
        ("a.b", 1, 2),
        ("a.gone", None, "(absent)"),
        ("flag", 1, True),
        ("new", "(absent)", "x"),
    ]
    assert differences(Config(), Config()) == []
    with pytest.raises(TypeError, match=r"config\.f is a function"):
        differences({"f": lambda: 0}, {})


def test_going_back_sets_later_checkpoints_aside(tmp_path, caplog):
    saved(tmp_path, 1, 2)
    saved(tmp_path, 3, protect=[1])
    assert [path.name for path in cut_after(tmp_path, 1)] == ["step-000002.cut", "step-000003.cut"]
    assert latest(tmp_path).step == 1
    assert "goes back to step 1" in caplog.text
    assert cut_after(tmp_path, 1) == []


# Formats.


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def pickled(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(marker)))


def zipped(path: Path, marker: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(marker)))


@pytest.mark.parametrize("make", [pickled, zipped])
@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.bin", "x.pkl", "x.ckpt", "x.json", "x", "x.safetensors"])
def test_a_pickle_is_refused_under_any_name_and_never_run(tmp_path, make, name):
    marker = tmp_path / "marker"
    given = tmp_path / "given"
    given.mkdir()
    make(given / name, marker)
    with pytest.raises(FormatError, match=r"pickle|zip|safetensors file"):
        check_format(given / name)
    with pytest.raises(FormatError):
        save(tmp_path, 1, lambda directory: make(directory / name, marker), config=CONFIG)
    assert names(tmp_path) == ["given"]
    assert not marker.exists()
    if make is pickled:
        pickle.loads((given / name).read_bytes())
        assert marker.exists(), "it would have run, had anybody read it"


@pytest.mark.parametrize("name", ["x.PT", "x.Pickle", "x.npz", "x.JOBLIB", "x.distcp"])
def test_a_name_that_pickles_have_is_refused_whatever_is_in_it(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps([1], protocol=0))  # begins like a text
    with pytest.raises(FormatError, match="looks like a pickle"):
        check_format(tmp_path / name)


def test_a_distributed_checkpoint_of_torch_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    with pytest.raises(FormatError, match="distributed checkpoint"):
        check_format(tmp_path / ".metadata")
    assert not (tmp_path / "marker").exists()


def test_a_header_whose_length_looks_like_a_pickle_is_no_pickle(tmp_path):
    header = json.dumps({"w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode()
    data = safetensors(header + b" " * (0x280 - len(header)))
    assert data.startswith(b"\x80\x02")
    (tmp_path / "w.safetensors").write_bytes(data)
    check_format(tmp_path / "w.safetensors")


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


many = {str(i): entry([0], 0, 0) for i in range(100_000)}
LIES = {
    "length": struct.pack("<Q", 2**62) + b"{}",
    "longer than the file": struct.pack("<Q", 1000) + b"{}",
    "too many tensors": safetensors(many),
    "shape": safetensors({"a": entry([3], 0, 8)}, bytes(8)),
    "huge shape": safetensors({"a": entry([2**62, 8], 0, 8)}, bytes(8)),
    "dtype": safetensors({"a": entry([2], 0, 8, "F99")}, bytes(8)),
    "overlap": safetensors({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
    "twice": safetensors({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, bytes(8)),
    "gap": safetensors({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
    "behind the end": safetensors({"a": entry([2], 8, 16)}, bytes(8)),
    "more data": safetensors({"a": entry([2], 0, 8)}, bytes(12)),
    "not JSON": safetensors(b"{" * 1000),
    "deep JSON": safetensors(b'{"a":' * 200_000),
    "empty": b"",
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES.keys())
def test_a_safetensors_header_that_lies_is_refused(tmp_path, content):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match="header"):
        check_format(path)


def test_header_bombs_cost_little_memory(tmp_path):
    bomb = b'{"0":' * (4 << 20)
    (tmp_path / "deep.safetensors").write_bytes(safetensors(bomb))
    (tmp_path / "many.safetensors").write_bytes(safetensors({str(i): entry([0], 0, 0) for i in range(200_000)}))
    count = MAX_HEADER_BYTES // len(json.dumps({"10000": entry([0], 0, 0)}))
    (tmp_path / "most.safetensors").write_bytes(safetensors({str(i): entry([0], 0, 0) for i in range(count)}))
    code = f"""
import resource
from pathlib import Path
from rolecall.policy.headers import FormatError
from rolecall.train.manifest import check_format
import numpy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
refused = 0
for path in sorted(Path({str(tmp_path)!r}).iterdir()):
    try:
        check_format(path)
    except FormatError:
        refused += 1
print(refused, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    refused, megabytes = map(int, out.split())
    assert refused == 2
    assert megabytes < 100


def test_these_modules_do_without_torch():
    modules = "checkpoint, rundir, signals, exit_codes, jsonl, lock, manifest"
    code = f"import sys; from rolecall import files; from rolecall.train import {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_final_model_is_judged_by_its_weights_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"name": "Bücher"}', encoding="utf-8")
    (tmp_path / "a.safetensors").write_bytes(safetensors({}))
    check_model(tmp_path)  # no manifest: not ours to judge
    seal_model(tmp_path, 7)
    sealed = json.loads((tmp_path / MANIFEST).read_text(encoding="utf-8"))
    assert {name: sealed[name] for name in ("format", "schema", "step")} == {
        "format": "rolecall model",
        "schema": 1,
        "step": 7,
    }
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    check_model(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(safetensors({"x": 1}))
    with pytest.raises(DamagedCheckpointError, match=r"is damaged: a\.safetensors has .* take a checkpoint of the run"):
        check_model(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"a\.safetensors is missing"):
        check_model(tmp_path)
    for content in (json.dumps(sealed | {"step": 8}), "{}", "[]", "{"):
        (tmp_path / MANIFEST).write_text(content)
        with pytest.raises(DamagedCheckpointError, match=r"its manifest\.json (changed|cannot be read)"):
            check_model(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps(sealed | {"schema": 2}))
    check_model(tmp_path)
