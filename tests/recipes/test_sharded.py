"""`--train.shard fsdp2`: what lies in parts on several processes is what one process has whole, and so are its checkpoints."""

import hashlib
import itertools
import json
import logging
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial, partialmethod
from pathlib import Path

import pytest
import torch
from forked_ranks import ended, processes, started
from safetensors.torch import load_file

from rolecall.cli import main
from rolecall.errors import UserError
from rolecall.jobs import models
from rolecall.policy import sharding
from rolecall.policy.load import load
from rolecall.policy.sharded import whole

REWARD = """
def letters(completions, **columns):
    texts = [c if isinstance(c, str) else " ".join(m["content"] for m in c) for c in completions]
    return [len(set(text)) / 6 + text.count("1") for text in texts]
"""
SHORT = ["--rows", "sorting:length=2", "--prompts", "4", "--samples", "4", "--steps", "2", "--quiet"]
SHORT += ["--reward", "rewards.py:letters", "--sampling.max_new_tokens", "6", "--optim.lr", "3e-4"]
ROWS = ["--rows", "addition", "--steps", "2", "--batch", "5", "--quiet", "--eval.every", "2", "--eval.rows", "5"]
CASES = {
    "ppo": ["rl", "--preset", "ppo", *SHORT, "--algorithm.kl_coef", "0.05", "--algorithm.minibatches", "3"],
    "exact KL, new reference": [
        *("rl", "--preset", "grpo", *SHORT, "--algorithm.kl_coef", "0.05", "--algorithm.kl_kind", "exact"),
        *("--algorithm.epochs", "2", "--algorithm.reference_every", "1"),
    ],
    "lora, KL": ["rl", "--preset", "grpo", *SHORT, "--policy.lora_rank", "4", "--algorithm.kl_coef", "0.05"],
    "recomputed activations": ["rl", "--preset", "grpo", *SHORT, "--policy.gradient_checkpointing"],
    "agents": [
        *("rl", "--preset", "grpo", "--env", "guessing", "--prompts", "4", "--samples", "3", "--steps", "2", "--quiet"),
        *("--reward", "rewards.py:letters", "--sampling.max_new_tokens", "6", "--algorithm.minibatches", "2"),
        *("--algorithm.kl_coef", "0.05", "--eval.every", "2", "--eval.rows", "1", "--eval.samples", "2"),
    ],
    "replay": ["rl", "--preset", "grpo", *SHORT, "--steps", "3", "--replay.share", "0.5"],
    "hf": ["rl", "--preset", "ppo", *SHORT, "--algorithm.critic", "shared", "--engine.name", "hf"],
    "sft": ["sft", *ROWS],
    "rm": ["rm", *ROWS],
    "dpo": ["dpo", *ROWS, "--optim.lr", "1e-3"],
    "expert iteration": [
        *("expert-iteration", *SHORT, "--prompts", "5", "--keep", "best"),
    ],
}
SHARDED = ("--train.shard", "fsdp2")
SLOW = {*CASES} - {"ppo", "agents"}
"""What differs from another case in little that sharding touches."""


def model_of(run):
    found = {}
    for path in sorted((run / "model").glob("*.safetensors")):
        found |= load_file(path)
    return found


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else [])
        for case in CASES
        if case != "ppo"  # test_ranks_exact.py
    ],
)
def test_what_two_processes_hold_in_parts_trains_as_one_process_does(place, case):
    processes(1, place, *CASES[case], "--out", "whole")
    processes(2, place, *CASES[case], "--out", "parts", *SHARDED)
    whole, parts = model_of(place / "whole"), model_of(place / "parts")
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=0, atol=1e-5)
    for alone, together in zip(metrics_of(place / "whole"), metrics_of(place / "parts"), strict=True):
        assert alone.keys() == together.keys()
        assert together == pytest.approx(alone, rel=2e-3, abs=2e-5)


@pytest.mark.slow
def test_in_mixed_precision_parts_train_as_the_whole_does_within_its_rounding(place):
    bf16 = [*CASES["ppo"], "--policy.mixed_precision", "bf16"]
    processes(2, place, *bf16, "--out", "whole")
    processes(2, place, *bf16, "--out", "parts", *SHARDED)
    whole, parts = model_of(place / "whole"), model_of(place / "parts")
    start = {name: p.detach() for name, p in load("tiny").model.named_parameters()}
    apart, moved = (sum(float((one[n] - whole[n]).square().sum()) for n in whole) ** 0.5 for one in (parts, start))
    assert apart < 0.25 * moved, "0.13, measured once: early steps of Adam turn rounding into whole steps"
    for one, other in zip(metrics_of(place / "whole"), metrics_of(place / "parts"), strict=True):
        assert other["reward"] == pytest.approx(one["reward"], abs=1e-6), "the same answers"
        assert other["loss"] == pytest.approx(one["loss"], abs=2e-2)


def test_in_one_process_the_only_part_is_the_whole_bit_for_bit_and_that_is_said(place, caplog):
    processes(1, place, *CASES["ppo"], "--out", "whole")
    offload = ["--train.offload", "reference"]
    with caplog.at_level("INFO", logger="rolecall"):
        assert main([*(word for word in CASES["ppo"] if word != "--quiet"), "--out", "part", *SHARDED, *offload]) == 0
    assert "fsdp2 with one process: its only part is the whole model" in caplog.messages
    assert (
        "train.offload moves data from an accelerator to the host's memory: on the CPU it has no effect"
        in caplog.messages
    )
    assert (place / "whole/model/model.safetensors").read_bytes() == (
        place / "part/model/model.safetensors"
    ).read_bytes()
    assert (place / "whole/metrics.jsonl").read_text() == (place / "part/metrics.jsonl").read_text()


def files_of(run, step):
    found = run / f"checkpoints/step-{step:06d}"
    return {
        str(path.relative_to(found)): path.read_bytes()
        for path in sorted(found.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


LONG = [*CASES["ppo"], "--algorithm.reference_every", "2", "--save.every", "1"]


def telling():
    """Rank 0 says which tensors, put together again, its processes saved last and which they began with."""
    from rolecall.train.parts import Parts

    def told(real, name, self, *given):
        real(self, *given)
        found = {name: hash_of(whole(tensor)) for name, tensor in self._tensors().items()}
        if self.ranks.number == 0:
            Path(f"{name}-{self.ranks.count}.json").write_text(json.dumps(found))

    Parts._save = partialmethod(partial(told, Parts._save, "save"))
    Parts.read = partialmethod(partial(told, Parts.read, "read"))


def hash_of(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.slow
def test_parts_of_one_number_of_processes_are_read_by_another(place):
    processes(1, place, *LONG, "--steps", "4", "--out", "whole")
    processes(2, place, *LONG, "--out", "run", *SHARDED, before=telling)
    saved = files_of(place / "run", 2)
    assert {name for name in saved if name.startswith("parts/")} == {
        f"parts/shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)
    }
    processes(1, place, "rl", "--resume", "--steps", "3", "--out", "run", "--quiet", before=telling)
    processes(4, place, "rl", "--resume", "--steps", "4", "--out", "run", "--quiet", before=telling)
    for before, after in ((2, 1), (1, 4)):
        saved_by, read_by = (
            json.loads((place / name).read_text()) for name in (f"save-{before}.json", f"read-{after}.json")
        )
        assert {name.partition(".")[0] for name in saved_by} == {"weights", "optimizer", "more"}
        assert read_by == saved_by
    for name, tensor in model_of(place / "whole").items():
        torch.testing.assert_close(model_of(place / "run")[name], tensor, rtol=0, atol=1e-5)
    resumed = json.loads((place / "run/run.json").read_text())["resumed"]
    assert [one["bit_exact"] for one in resumed] == [False, False]
    assert [["processes", 2, 1] in one["changed"] for one in resumed] == [True, False]


def killed_in_save(number, delay):
    """This rank ends so many seconds after its part of a checkpoint began to be written."""
    from rolecall.train.parts import Parts

    save, saves = Parts._save, itertools.count(1)

    def dying(self, directory):
        if next(saves) == number:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return save(self, directory)

    Parts._save = dying


@pytest.mark.parametrize("tries", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_sharded_run_that_is_killed_at_any_moment_ends_in_the_same_bytes(place, tries):
    """All ranks, at any moment and, every other time, while both write their parts."""
    rng, torn = random.Random(tries), 0
    begun = time.monotonic()
    processes(2, place, *LONG, "--steps", "5", "--out", "whole", *SHARDED)
    took = time.monotonic() - begun
    for number in range(tries):
        run, words = place / f"killed-{number}", [*LONG, "--steps", "5", "--out", f"killed-{number}", *SHARDED]
        if number % 2:
            children = started(2, place, *words, before=partial(killed_in_save, rng.randint(1, 5), rng.uniform(0, 0.1)))
        else:
            children = started(2, place, *words)
            time.sleep(rng.uniform(0.3, 1.0) * took)
            for child in children:
                os.kill(child, signal.SIGKILL)
        assert set(ended(children)) <= {-9, 0, 75}, "75: it noticed that the other was gone"
        torn += any(run.glob("checkpoints/*.tmp-*"))
        if not (run / "config.json").is_file():  # killed before it was a run
            continue
        processes(2, place, "rl", "--resume", "--quiet", "--out", run.name)
        assert files_of(run, 5) == files_of(place / "whole", 5)
        assert model_of(run).keys() == model_of(place / "whole").keys()
        assert (run / "model/model.safetensors").read_bytes() == (place / "whole/model/model.safetensors").read_bytes()
        assert metrics_of(run) == metrics_of(place / "whole")
    logging.getLogger("ranks").info("%d of %d kills left an unfinished checkpoint", torn, tries)
    assert torn or tries < 10, "no kill came while a checkpoint was being written"


def test_what_is_kept_in_the_hosts_memory_trains_to_the_same_bytes(place):
    """On the CPU nothing moves, but what torch does to off-load is what runs."""
    words = ["rl", "--preset", "grpo", *SHORT, "--prompts", "2", "--algorithm.kl_coef", "0.05", *SHARDED]
    processes(2, place, *words, "--out", "without")
    processes(2, place, *words, "--out", "with", "--train.offload", "reference,optimizer", before=offloading)
    assert files_of(place / "with", 2) == files_of(place / "without", 2)
    assert model_of(place / "with").keys() == model_of(place / "without").keys()
    assert metrics_of(place / "with") == metrics_of(place / "without")


def offloading():
    """Policy and reference are both sharded with torch's policy for that."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    from rolecall.policy import sharding

    real = sharding.fully_shard

    def watch(module, **how):
        assert isinstance(how["offload_policy"], CPUOffloadPolicy)
        return real(module, **how)

    sharding.fully_shard = watch


def test_what_is_freed_goes_back_to_the_system_from_before_the_model_is_read(place, monkeypatch):
    """Else every process would keep the room of the whole model, of which it holds a part."""
    seen = []

    def read(*_, **__):
        seen.append("read")
        raise UserError("far enough")

    monkeypatch.setattr(sharding, "give_back_memory", lambda: seen.append("given back"))
    monkeypatch.setattr(models, "_open", read)
    assert main([*CASES["sft"], "--out", "run", *SHARDED]) == 2
    assert seen == ["given back", "read"]
    seen.clear()
    assert main([*CASES["sft"], "--out", "run"]) == 2
    assert seen == ["read"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how memory is given back is glibc's")
def test_freed_blocks_of_any_size_go_back_to_the_system():
    code = """
import torch
from pathlib import Path
from rolecall.policy.sharding import give_back_memory

def held():
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmRSS:") + 1]) // 1024

def taken_and_freed(size):
    before, kept = held(), []
    for _ in range(200):  # with smaller blocks in between that stay
        kept += [torch.ones(size), torch.ones(2**13)]
    taken, kept[::2] = held() - before, [None] * 200
    return taken, held() - before, kept

del [torch.ones(2**22)][:]  # glibc now takes what is smaller than this from its heap
for size in (2**16, 2**17):  # the larger ones do not fit into the holes that the others leave
    taken, left, kept = taken_and_freed(size)
    print(taken, left)
    give_back_memory()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert before[0] > 50
    assert before[1] > 0.9 * before[0], "what this is for"
    assert after[0] > 100
    assert after[1] < 0.2 * after[0]


@pytest.mark.parametrize(
    ("count", "given", "says"),
    [
        (2, ["--train.shard", "none"], "train.shard none is for one process, and there are 2: give ddp or fsdp2"),
        (1, ["--train.offload", "reference"], "train.offload is for parts of a sharded model: give train.shard fsdp2"),
        (1, [*SHARDED, "--policy.lora_rank", "4", "--policy.quantize", "int8"], "quantised weights cannot be sharded"),
    ],
)
def test_what_cannot_be_held_so_is_refused_in_a_sentence(place, capfd, count, given, says):
    codes = ended(started(count, place, *CASES["ppo"], "--out", "run", *given))
    assert codes == [2] * count
    told = capfd.readouterr().err
    assert says in told
    assert "Traceback" not in told
    assert not (place / "run").exists()


TURNS = {
    "ppo": [*CASES["ppo"], "--algorithm.reference_every", "2"],
    "lora": CASES["lora, KL"],
    "rm": ["rm", "--rows", "addition", "--steps", "2", "--batch", "5", "--quiet"],
}


@pytest.mark.parametrize("case", ["rm", *(pytest.param(c, marks=pytest.mark.slow) for c in TURNS if c != "rm")])
def test_a_run_may_be_sharded_or_not_from_one_resume_to_the_next(place, case):
    """In one process, where both are the same bit for bit."""
    command, how = TURNS[case][0], [*TURNS[case], "--optim.schedule", "constant"]
    assert main([*how, "--steps", "4", "--out", "straight"]) == 0
    assert main([*how, "--out", "turns", *SHARDED]) == 0
    assert any(name.startswith("parts/") for name in files_of(place / "turns", 2))
    assert main([command, "--resume", "--steps", "3", "--out", "turns", "--quiet", "--train.shard", "none"]) == 0
    assert not any(name.startswith("parts/") for name in files_of(place / "turns", 3))
    assert main([command, "--resume", "--steps", "4", "--out", "turns", "--quiet", *SHARDED]) == 0
    assert (place / "turns/model/model.safetensors").read_bytes() == (
        place / "straight/model/model.safetensors"
    ).read_bytes()
    assert metrics_of(place / "turns") == metrics_of(place / "straight")
    resumed = json.loads((place / "turns/run.json").read_text())["resumed"]
    assert [one["bit_exact"] for one in resumed] == [True, True]


@pytest.mark.slow
def test_two_processes_go_on_sharded_with_what_they_held_whole_and_say_that_it_is_not_bit_exact(place):
    processes(2, place, *LONG, "--steps", "2", "--out", "run")
    processes(2, place, "rl", "--resume", "--steps", "3", "--out", "run", "--quiet", *SHARDED)
    processes(2, place, "rl", "--resume", "--steps", "4", "--out", "run", "--quiet", "--train.shard", "ddp")
    processes(1, place, *LONG, "--steps", "4", "--out", "whole")
    for name, tensor in model_of(place / "whole").items():
        torch.testing.assert_close(model_of(place / "run")[name], tensor, rtol=0, atol=1e-5)
    resumed = json.loads((place / "run/run.json").read_text())["resumed"]
    assert [one["bit_exact"] for one in resumed] == [False, False]
