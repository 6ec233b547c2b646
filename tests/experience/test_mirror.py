"""Rollouts at an address: copied whole, merged, thinned, cut, and read as from a directory."""

import sys
from dataclasses import replace

import fsspec
import pytest
from test_store import two

from rolecall.config.experience import StoreOptions
from rolecall.errors import UserError
from rolecall.experience import places
from rolecall.experience.mirror import Mirror
from rolecall.experience.parquet import StoreError
from rolecall.experience.places import Place
from rolecall.experience.store import write_rollouts
from rolecall.experience.stored import RolloutStore, step_files

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def empty():
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def run(tmp_path):
    """A run's directory with the rollouts of six steps."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for name in ("config.json", "run.json"):
        (tmp_path / name).write_text("{}")
    for step in range(1, 7):
        record(folder, step)
    return folder


def record(folder, step, *, cut=False):
    trajectories, batch, details = two()
    if not cut:  # the file of a cut vocabulary is of another version
        whole = {"top_k": None, "top_p": None, "min_p": None}
        details = [replace(d, sampling=d.sampling and replace(d.sampling, **whole)) for d in details]
        trajectories = [replace(t, supports=None) for t in trajectories]
    path = folder / f"step-{step:06d}.parquet"
    write_rollouts(path, trajectories, batch, step=step, details=details, model=f"m-{step}", tokenizer="t")


def mirrored(run, url=URL, *, resume=False, overwrite=False, steps=range(1, 7), **how):
    mirror = Mirror(StoreOptions(url=url, **how), resume=resume, overwrite=overwrite)
    mirror.watch(run)
    for step in steps:
        mirror.add(f"step-{step:06d}.parquet")
        mirror.finish()
    mirror.close()
    return mirror


def same(found, expected):
    assert (found.step, found.model, found.tokenizer, found.details) == (
        *(expected.step, expected.model, expected.tokenizer),
        expected.details,
    )
    assert repr(found.trajectories) == repr(expected.trajectories)  # a NaN is no other NaN
    for (name, x), (_, y) in zip(found.batch.tensors(), expected.batch.tensors(), strict=True):
        assert x.nan_to_num(-9).equal(y.nan_to_num(-9)), name


@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_store_elsewhere_reads_as_the_run_does(run, where, tmp_path):
    url = URL if where == "memory" else f"file://{tmp_path}/there"
    mirrored(run, url, merge=4)
    assert (Place(url) / "rollouts").names() == [
        "step-000005.parquet",
        "step-000006.parquet",
        "steps-000001-000004.parquet",
    ]
    assert set(Place(url).names()) >= {"config.json", "run.json"}
    here, there = RolloutStore(run), RolloutStore(url)
    assert there.names == here.names
    for found, expected in zip(there, here, strict=True):
        same(found, expected)
    assert (Place(url) / "rollouts").read("step-000005.parquet") == (run / "step-000005.parquet").read_bytes()


def test_steps_with_and_without_a_cut_vocabulary_go_into_one_file(run):
    (run / "step-000002.parquet").unlink()
    record(run, 2, cut=True)
    mirrored(run, merge=6)
    for found, expected in zip(RolloutStore(URL), RolloutStore(run), strict=True):
        same(found, expected)


def test_old_steps_go_and_whole_files_of_several_with_their_last(run):
    mirrored(run, keep=2)
    assert RolloutStore(URL).names == ["step-000005.parquet", "step-000006.parquet"]
    mirrored(run, "memory://other", merge=2, keep=3)
    assert RolloutStore("memory://other").names == [f"step-00000{n}.parquet" for n in (3, 4, 5, 6)]


@pytest.mark.parametrize("step", [-1, 2, 3, 4, 5])
def test_what_is_cut_and_copied_again_ends_in_the_same_bytes(run, step):
    mirrored(run, "memory://whole", merge=4)
    mirrored(run, merge=4)
    again = Mirror(StoreOptions(url=URL, merge=4), resume=True, overwrite=False)
    again.watch(run)
    again.cut_after(step)
    assert [file.step for file in step_files(Place(URL) / "rollouts")] == list(range(1, step + 1))
    for later in range(max(1, step + 1), 7):
        again.add(f"step-{later:06d}.parquet")
        again.finish()
    again.close()
    whole, found = Place("memory://whole") / "rollouts", Place(URL) / "rollouts"
    assert {n: found.read(n) for n in found.names()} == {n: whole.read(n) for n in whole.names()}


def test_what_a_killed_run_had_not_copied_is_copied_when_it_is_resumed(run):
    mirrored(run, steps=[1, 2])
    mirror = Mirror(StoreOptions(url=URL), resume=True, overwrite=False)
    mirror.watch(run)
    mirror.finish()
    assert RolloutStore(URL).names == RolloutStore(run).names


def test_a_store_that_holds_another_run_is_refused_unless_it_is_overwritten(run):
    mirrored(run)
    with pytest.raises(UserError, match=r"memory://bucket/run holds rollouts of step 1 to 6 already: give another"):
        mirrored(run)
    mirrored(run, overwrite=True, steps=[1])
    assert RolloutStore(URL).names == RolloutStore(run).names


def test_a_store_that_fails_for_a_while_loses_nothing(run, monkeypatch, caplog):
    mirror = Mirror(StoreOptions(url=URL), resume=False, overwrite=False)
    mirror.watch(run)
    monkeypatch.setattr(places, "sleep", lambda seconds: None)
    written, failing = Place._write, [True] * 6
    monkeypatch.setattr(Place, "_write", lambda *given: 1 / 0 if failing and failing.pop() else written(*given))
    mirror.add("step-000001.parquet")
    assert "step-000001.parquet" in mirror.pending, "so that it is not removed from the run's directory"
    mirror.finish()
    assert RolloutStore(URL).names == RolloutStore(run).names
    assert (
        "is behind and will be tried again: memory://bucket/run/config.json cannot be written: division by zero"
        in caplog.text
    )


def test_a_store_that_stays_away_ends_the_run_with_a_sentence(run, monkeypatch):
    mirror = Mirror(StoreOptions(url=URL), resume=False, overwrite=False)
    mirror.watch(run)
    monkeypatch.setattr(places, "sleep", lambda seconds: None)
    monkeypatch.setattr(Place, "_write", lambda *given: 1 / 0)
    monkeypatch.setattr("rolecall.experience.mirror._END_S", 0.2)
    with pytest.raises(
        UserError, match=r"6 of the run's rollouts are not in memory://bucket/run .*--resume copies"
    ) as raised:
        mirror.finish()
    assert raised.value.exit_code == 75


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("nowhere://x", "nowhere://x is not an address that can be opened: Protocol not known: nowhere"),
        ("file:///proc/nothing", "cannot be written: .*; check the address, the network and your keys"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_sentence(url, sentence):
    with pytest.raises(UserError, match=sentence):
        Mirror(StoreOptions(url=url), resume=False, overwrite=False)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(
        "fsspec.core.url_to_fs", lambda *_, **__: (_ for _ in ()).throw(ImportError("Install s3fs to access S3"))
    )
    with pytest.raises(StoreError, match=r"Install s3fs to access S3\): pip install 'rolecall\[store\]'"):
        Place("s3://bucket/x")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StoreError, match="pip install 'gcsfs'"):
        Place("gs://bucket/x")


def test_a_damaged_file_of_several_steps_is_named(run):
    mirrored(run, merge=6)
    (Place(URL) / "rollouts").write("steps-000001-000006.parquet", b"PAR1 no")
    with pytest.raises(StoreError, match=r"steps-000001-000006\.parquet is not a whole file of several steps"):
        RolloutStore(URL)
