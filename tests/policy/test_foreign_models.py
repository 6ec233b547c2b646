"""Model directories and files from somewhere: none runs code, hangs or ends in anything but one sentence."""

import json
import os
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from gguf import GGUFWriter

from rolecall.policy.headers import FormatError, check_gguf
from rolecall.policy.heads import RewardModel
from rolecall.policy.load import LoadError, load, save

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class TheirConfig(LlamaConfig):
    model_type = "theirs"
class TheirModel(LlamaForCausalLM):
    config_class = TheirConfig
class TheirTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def directory(tmp_path):
    save(load("tiny"), tmp_path / "model")
    return tmp_path / "model"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(name, match, **options):
    start = time.monotonic()
    with pytest.raises(LoadError, match=match) as caught:
        load(name, **options)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 30


def brings_code(directory, part):
    """Make the model or its tokenizer point to Python code that leaves a mark; returns where."""
    marker = directory.parent / "marker"
    (directory / "theirs.py").write_text(CODE.format(marker=str(marker)))
    if part == "model":
        names = {"AutoConfig": "theirs.TheirConfig", "AutoModelForCausalLM": "theirs.TheirModel"}
        edit(directory / "config.json", model_type="theirs", auto_map=names)
    else:
        names = {"AutoTokenizer": [None, "theirs.TheirTokenizer"]}
        edit(directory / "tokenizer_config.json", tokenizer_class="TheirTokenizer", auto_map=names)
    return marker


TWICE = """
import json, sys
from pathlib import Path
from rolecall.cli import main
marker, *words = sys.argv[1:]
refused, ran = main(words), Path(marker).exists()
print(json.dumps([refused, ran, main([*words, "--policy.trust_remote_code"])]))
"""


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_code_of_a_model_runs_only_if_it_is_trusted(directory, tmp_path, part):
    """A command without trust, then one with it, in a process that would answer every question with yes."""
    marker = brings_code(directory, part)
    words = ["generate", "--model", str(directory), "--prompt", "hi", "--sampling.max_new_tokens", "2"]
    home = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", TWICE, str(marker), *words],
        input="y\n" * 20,
        text=True,
        capture_output=True,
        timeout=120,
        env={**home, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1", "ROLECALL_KERNELS": "0"},
        check=True,
    )
    refused, ran, trusted = json.loads(ended.stdout.splitlines()[-1])
    assert not ran, ended.stderr
    if part == "model":  # a tokenizer may be had without its code
        assert refused != 0
        assert "--policy.trust_remote_code" in ended.stderr
        assert "Traceback" not in ended.stderr
    assert marker.exists(), ended.stderr
    assert trusted == 0, ended.stderr


def test_code_of_a_reward_model_does_not_run(directory):
    RewardModel.from_policy(load(directory)).save(directory.parent / "rm")
    marker = brings_code(directory.parent / "rm", "model")
    with pytest.raises(LoadError, match="trust_remote_code"):
        RewardModel.load(directory.parent / "rm")
    assert not marker.exists()


def test_a_header_of_many_tensors_is_not_parsed(directory):
    header = json.dumps({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)})
    header += " " * (-len(header) % 8)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    refused(directory, "at most 4,194,304 are read")
    with pytest.raises(LoadError, match="at most 4,194,304 are read"):
        RewardModel.load(directory)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 10_000_000}, "10,000,000, but the weights are"),
        ({"num_hidden_layers": 1e7}, "not a number of layers"),
        ({"num_hidden_layers": "many"}, "not a number of layers"),
        ({"num_hidden_layers": -1}, "not a number of layers"),
        ({"num_hidden_layers": 3}, "model"),
        ({"num_attention_heads": 0}, "cannot be read"),
        ({"num_attention_heads": "four"}, "cannot be read"),
        ({"num_key_value_heads": 0}, "cannot be read"),
        ({"hidden_size": None}, "cannot be read"),
        ({"hidden_size": [128]}, "cannot be read"),
        ({"vocab_size": -5}, "cannot be read"),
        ({"rope_parameters": 7}, "cannot be read"),
        ({"model_type": {}}, "cannot be read"),
        ({"model_type": "nonesuch"}, "cannot be read"),
    ],
    ids=str,
)
def test_an_impossible_config(directory, changes, match):
    edit(directory / "config.json", **changes)
    if changes != {"num_hidden_layers": 3}:  # fewer layers than the files have is for transformers to report
        refused(directory, match)


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "[" * 100_000, "\x00", ""])
def test_a_config_that_is_no_object(directory, text):
    (directory / "config.json").write_text(text)
    refused(directory, "config.json cannot be read")


def whole_gguf(path, *, layers=1):
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda b: b"", "does not begin with GGUF"),
        (lambda b: b[:10], "does not begin with GGUF"),
        (lambda b: b"GGML" + b[4:], "does not begin with GGUF"),
        (lambda b: b[:4] + struct.pack("<I", 99) + b[8:], "version 99"),
        (lambda b: b[:8] + struct.pack("<Q", 1 << 60) + b[16:], "at most 65,536"),
        (lambda b: b[:16] + struct.pack("<Q", 1 << 60) + b[24:], "at most 65,536"),
        (lambda b: b[:16] + struct.pack("<Q", 60_000) + b[24:], "cut short or damaged"),
        (lambda b: b[: len(b) - 700], "cut short or damaged"),
        (lambda b: b[:60], "cut short or damaged"),
        (lambda b: b[:24] + b"\xff" * 40 + b[64:], "cut short or damaged"),
        (lambda b: b, "cannot be read as GGUF(?!.* layers )"),  # as many layers as tensors
    ],
    ids=["empty", "short", "magic", "version", "tensors", "entries", "more", "cut", "cut-early", "noise", "no-model"],
)
def test_a_bad_gguf(tmp_path, damage, match):
    good = whole_gguf(tmp_path / "good.gguf")
    (tmp_path / "bad.gguf").write_bytes(damage(good))
    refused(tmp_path / "bad.gguf", match, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<IIQ", 9, 4, 2**40),  # an array of numbers
        struct.pack("<IIQ", 9, 8, 2**40),  # of texts
        struct.pack("<IIQ", 9, 9, 1),  # of arrays
        struct.pack("<IQ", 8, 2**60),
        struct.pack("<I", 99),
    ],
)
def test_a_gguf_whose_entry_claims_more_than_there_is(tmp_path, value):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + value + bytes(64))
    refused(path, "cut short or damaged", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("version", [2, 3])
def test_a_gguf_is_whole_only_with_all_its_entries(tmp_path, version):
    """One entry of every kind and an array of each: a file that ends anywhere inside them is cut short."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    values = [struct.pack("<I", kind) + bytes(size) for kind, size in sizes.items()]
    values += [struct.pack("<IIQ", 9, kind, 3) + bytes(3 * size) for kind, size in sizes.items()]
    text = struct.pack("<Q", 2) + b"ab"
    values += [struct.pack("<I", 8) + text, struct.pack("<IIQ", 9, 8, 2) + text + text]
    path = tmp_path / "model.gguf"
    for count, value in enumerate(values, 1):
        entries = b"".join(struct.pack("<Q", 1) + b"a" + v for v in (*values[: count - 1], value))
        start = b"GGUF" + struct.pack("<IQQ", version, 0, count)
        path.write_bytes(start + entries)
        check_gguf(path)
        for missing in (1, len(value)):
            path.write_bytes(start + entries[:-missing])
            with pytest.raises(FormatError, match="cut short"):
                check_gguf(path)


def test_a_gguf_of_ten_million_layers(tmp_path):
    whole_gguf(tmp_path / "deep.gguf", layers=10_000_000)
    refused(tmp_path / "deep.gguf", "10,000,000 layers but has 1 tensors", cache_dir=tmp_path / "cache")
