"""A sharded run of two processes of which one is killed, stopped or has a NaN of its own: all end, in time, and nothing is lost."""

import json
import os
import signal
import time

import pytest
import torch
from forked_ranks import ended, forked, processes, ranks, started
from safetensors.torch import load_file

SFT = ["sft", "--rows", "addition", "--batch", "4", "--quiet", "--save.every", "1", "--train.shard", "fsdp2"]
TIMEOUT = ["--rank-timeout", "2", "--grace", "2"]


def lines(run):
    log = run / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []


def slowly():
    """A tenth of a second to every step, so that there is a moment to disturb it in."""
    from rolecall.recipes.sft import SFTLearner

    collect = SFTLearner.collect

    def slow(self, step):
        time.sleep(0.1)
        return collect(self, step)

    SFTLearner.collect = slow


@pytest.mark.parametrize(("how", "victim"), [("KILL", 1), pytest.param("STOP", 0, marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_ends_a_sharded_run_with_75_and_it_goes_on_exactly(tmp_path, capfd, how, victim):
    children = started(2, tmp_path, *SFT, *TIMEOUT, "--steps", "60", "--out", "run", before=slowly)
    run = tmp_path / "run"
    for _ in range(1200):
        if len(lines(run)) >= 3:
            break
        time.sleep(0.05)
    begun = time.monotonic()
    os.kill(children[victim], getattr(signal, f"SIG{how}"))
    assert ended([children[1 - victim]]) == [75]
    assert time.monotonic() - begun < 30, "the rest is this machine being busy"
    os.kill(children[victim], signal.SIGKILL)
    ended([children[victim]])
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert "the same command with --resume continues" in told
    saved = sorted(path.name for path in (run / "checkpoints").glob("step-*") if "." not in path.name)
    steps = int(saved[-1].removeprefix("step-")) + 2
    processes(2, tmp_path, "sft", "--resume", "--out", "run", "--quiet", "--steps", str(steps))
    if how == "KILL":
        processes(2, tmp_path, *SFT, "--steps", str(steps), "--out", "straight")
        assert lines(run) == lines(tmp_path / "straight")
        (mine, theirs) = ((tmp_path / name / "model/model.safetensors").read_bytes() for name in ("run", "straight"))
        assert mine == theirs


def spoilt():
    """In its second step this rank's gradient holds a NaN before it is exchanged."""
    from rolecall.train.step import Updater

    step, calls = Updater.step, []

    def bad(self, batch, loss, **options):
        calls.append(1)

        def worse(outputs, part):
            terms = dict(loss(outputs, part))
            for name, term in terms.items():
                values = torch.where(term.mask, torch.nan, term.values)
                terms[name] = type(term)(values=values, mask=term.mask, mode=term.mode, coef=term.coef, norm=term.norm)
            return terms

        return step(self, batch, worse if len(calls) == 2 else loss, **options)

    Updater.step = bad


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all_of_a_sharded_run(tmp_path):
    first, second = ranks(2)
    words = [*SFT, "--steps", "3", "--save.keep", "3", "--out", "run"]
    assert ended([forked(first, tmp_path, *words), forked(second, tmp_path, *words, before=spoilt)]) == [0, 0]
    assert [line["skipped"] for line in lines(tmp_path / "run")] == [0.0, 1.0, 0.0]
    for rank in (1, 2):
        name = f"parts/shard-{rank:05d}-model-00001-of-00001.safetensors"
        held = [load_file(tmp_path / f"run/checkpoints/step-{step:06d}" / name) for step in (1, 2, 3)]
        assert all(torch.equal(held[0][key], held[1][key]) for key in held[0]), "a skipped step moves nothing"
        assert any(not torch.equal(held[1][key], held[2][key]) for key in held[1])
