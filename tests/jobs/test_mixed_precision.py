"""Forward and backward in bfloat16 through Accelerate, with float32 weights."""

import torch
from safetensors.torch import load_file

import rolecall
from rolecall.train.exit_codes import ExitCode
from rolecall.train.progress import Quiet


def test_runs_in_one_process_may_differ_in_precision(tmp_path):
    grads = {}
    for precision in ("no", "bf16", "no"):
        run = rolecall.sft(
            model="tiny",
            rows="sorting:length=2",
            steps=2,
            batch=8,
            policy={"mixed_precision": precision},
            out=str(tmp_path / precision),
            overwrite=True,
            progress=Quiet(),
        )
        assert run.outcome.exit_code is ExitCode.DONE
        grads.setdefault(precision, run.metrics[0]["grad_norm"])
        assert run.metrics[0]["grad_norm"] == grads[precision]
        assert all(t.dtype == torch.float32 for t in load_file(run.model / "model.safetensors").values())
    assert grads["no"] != grads["bf16"]
    assert abs(grads["no"] - grads["bf16"]) < 0.05 * grads["no"]


def test_rl_in_mixed_precision_trips_no_wire(tmp_path):
    run = rolecall.rl(
        preset="ppo",
        model="tiny",
        rows="sorting:length=2",
        steps=2,
        prompts=4,
        sampling={"max_new_tokens": 6},
        policy={"mixed_precision": "bf16"},
        algorithm={"kl_coef": 0.1, "entropy_coef": 0.01},
        out=str(tmp_path / "rl"),
        progress=Quiet(),
    )
    assert run.outcome.exit_code is ExitCode.DONE
    assert 0 < run.metrics[0]["sampling/sampling_logp_difference/mean"] < 0.05
