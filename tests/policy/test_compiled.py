"""Where compiled kernels are kept, and when one that is kept may be loaded."""

import errno
import logging
import os
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rolecall.policy import compiled
from rolecall.policy.load import LoadError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")

FOREIGN = 4711
"""A user id that is not ours; only root can give files away."""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A C file that compiles at once, and an empty cache."""
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    monkeypatch.setenv("ROLECALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    for cached in (compiled.library, compiled._fall_back, compiled._refuse):
        cached.cache_clear()
    yield path
    compiled.library.cache_clear()


def answer(source: Path) -> int:
    compiled.library.cache_clear()
    return compiled.library(source).answer()


def kept(source: Path) -> Path:
    (found,) = (source.parent / "cache" / "kernels").glob("*.so")
    return found


def test_a_library_is_built_once_in_a_directory_of_our_own(source, monkeypatch):
    assert answer(source) == 42
    assert stat.S_IMODE(kept(source).parent.stat().st_mode) == 0o700
    monkeypatch.setattr(compiled, "_build", None)  # a second build would fail
    assert answer(source) == 42


@pytest.mark.parametrize("damage", ["empty", "truncated", "other code"])
def test_a_damaged_library_is_built_again(source, damage):
    assert answer(source) == 42
    path, whole = kept(source), kept(source).read_bytes()
    if damage == "other code":
        compiled.compile_to(path, _other(source), compiler="cc", target="native")
    else:
        # Aside: the library that is loaded is mapped from the old file.
        aside = path.with_suffix(".aside")
        aside.write_bytes(whole[: len(whole) // 2] if damage == "truncated" else b"")
        aside.replace(path)
    assert path.read_bytes() != whole
    assert answer(source) == 42
    assert kept(source).read_bytes() == whole


def _other(source: Path) -> Path:
    other = source.with_name("other.c")
    other.write_text("int answer(void) { return 666; }\n")
    return other


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_not_used(source, caplog):
    planted = source.parent / "cache" / "kernels"
    planted.mkdir(parents=True, mode=0o755)
    os.chown(planted, FOREIGN, FOREIGN)
    _refused(source, planted, caplog, f"belongs to user {FOREIGN}")


def test_a_directory_others_can_write_to_is_not_used(source, caplog):
    open_to_all = source.parent / "cache" / "kernels"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    _refused(source, open_to_all, caplog, "others may write to it")


def test_nor_is_one_that_others_could_replace(source, caplog):
    (source.parent / "cache").mkdir()
    (source.parent / "cache").chmod(0o777)
    _refused(source, source.parent / "cache" / "kernels", caplog, "everybody may write to")


def test_nor_is_a_link_to_elsewhere(source, caplog):
    (source.parent / "elsewhere").mkdir(mode=0o700)
    (source.parent / "cache").mkdir()
    link = source.parent / "cache" / "kernels"
    link.symlink_to(source.parent / "elsewhere")
    _refused(source, link, caplog, "not a directory")


def _refused(source, directory, caplog, why):
    with caplog.at_level(logging.WARNING):
        assert answer(source) == 42
        assert answer(source) == 42
    (line,) = [r.getMessage() for r in caplog.records]
    assert str(directory) in line
    assert why in line
    assert not list(directory.glob("*"))
    (private,) = (source.parent / "temporary").iterdir()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert list(private.glob("answer-*.so"))


def test_an_older_cache_that_others_can_only_read_is_closed(source):
    directory = source.parent / "cache" / "kernels"
    directory.mkdir(parents=True, mode=0o755)
    assert answer(source) == 42
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(directory.glob("answer-*.so"))


def test_a_closed_cache_is_left_as_it_is(source, monkeypatch):
    """Such as one on a disk that can only be read."""
    assert answer(source) == 42

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "chmod", refuse)
    monkeypatch.setattr(compiled, "_build", None)
    assert answer(source) == 42


def test_builds_at_the_same_time_leave_one_whole_library(source):
    directory = source.parent / "cache" / "kernels"
    directory.mkdir(parents=True, mode=0o700)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: compiled._build("cc", source, "native", directory, "answer-key"), range(4)))
    assert set(made) == set(directory.iterdir())
    assert compiled._built(directory, "answer-key") in made


def test_the_target_is_part_of_the_key(source, monkeypatch):
    source.write_text("int answer(void) {\n#ifdef __AVX2__\nreturn 3;\n#else\nreturn 2;\n#endif\n}\n")
    if os.uname().machine != "x86_64":
        pytest.skip("the targets are those of x86-64")
    found = {}
    for target in ("x86-64-v2", "x86-64-v3"):
        monkeypatch.setenv("ROLECALL_MARCH", target)
        found[target] = answer(source)
    assert found == {"x86-64-v2": 2, "x86-64-v3": 3}


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("#include <no/such.h>\n", "no/such.h: No such file"),
        ("int answer(void) { return f(1, 2 }\n", "error: expected"),
    ],
)
def test_what_cannot_be_compiled_is_one_line_with_the_compilers_reason(source, broken, expected, caplog):
    source.write_text(broken)
    assert compiled.library(source) is None
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("no compiled kernels")
    assert "answer.c" in line
    assert expected in line
    assert "\n" not in line


@pytest.mark.parametrize("path", sorted(Path(compiled.__file__).parents[1].rglob("*.c")), ids=lambda path: path.name)
@pytest.mark.parametrize("target", ["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "native"])
def test_every_file_is_c_for_every_target(path, target):
    if target != "native" and os.uname().machine != "x86_64":
        pytest.skip("the targets are those of x86-64")
    command = [
        "cc",
        "-fsyntax-only",
        "-Wall",
        "-Werror",
        "-fopenmp",
        f"-march={target}",
        f"-I{compiled._HEADER.parent}",
    ]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_home_they_are_kept_in_the_temporary_directory(source, monkeypatch, caplog):
    def homeless():
        raise LoadError("user 54321 has no home directory")

    monkeypatch.setattr(compiled, "cache_root", homeless)
    assert answer(source) == 42
    assert list((source.parent / "temporary").rglob("answer-*.so"))
    assert caplog.records == []
