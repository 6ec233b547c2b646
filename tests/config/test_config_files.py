"""Files read as people expect."""

import pytest

from rolecall.config.files import read_settings, read_value, write_value
from rolecall.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("5E3", 5000.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("010", 10),
        ("1_000", 1000),
        ("off", "off"),
        ("no", "no"),
        ("true", True),
        ("12:30:40", "12:30:40"),
        ("2026-01-01", "2026-01-01"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("[1, 2e0]", [1, 2.0]),
    ],
)
def test_plain_values(text, value):
    found = read_value(text, where="it")
    assert found == value
    assert type(found) is type(value)


def test_a_file_of_settings(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("optim:\n  lr: 1e-5\n# nothing\n")
    assert read_settings(path) == {"optim": {"lr": 1e-5}}
    path.write_text("# nothing\n")
    assert read_settings(path) == {}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a: 1\na: 2\n", "line 2: key `a` appears twice"),
        (b"a:\n  - b\n c: [\n", "is not valid YAML in line"),
        (b"- a\n", "holds a list; write settings as `key: value` lines"),
        (b"\xff\xfe\x00", "is not a text file in UTF-8"),
        (b"a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        (b"a: !!int x\n", "is not valid YAML"),
        (b"a: \x00\n", "is not valid YAML"),
        (b"[" * 1_200, "nested too deeply"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match="run") as caught:
        read_settings(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml' cannot be read: No such file"):
        read_settings(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    "value",
    [
        "1e-5",
        "off",
        "yes",
        "010",
        "null",
        "",
        " a ",
        "a: b",
        "# x",
        "12:30",
        "é\n\u2028\x1b",
        "\U0001f600",
        "-",
        "'",
        '"',
        "...",
        "a\n",
    ],
)
def test_a_text_written_is_read_as_that_text(value):
    assert read_value(write_value(value), where="it") == value
    assert read_value(f"k: {write_value([value])}", where="it") == {"k": [value]}
    assert "\n" not in write_value(value)
