"""A reward model that scores the answers of a sharded run lies in parts, too, and scores as the whole one does."""

import json
import os
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from forked_ranks import ended, forked, nothing, processes, ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rolecall.policy import weight_files
from rolecall.policy.heads import RewardModel
from rolecall.policy.load import load
from rolecall.policy.sharded import in_parts
from rolecall.policy.sharding import mesh_of, shard
from rolecall.rewards.model import RewardModelReward, score_ids
from rolecall.train.manifest import check_model

SEQUENCES = [tuple(range(5 + n, 14 + 3 * n)) for n in range(7)]


@pytest.fixture
def place(tmp_path):
    RewardModel.from_policy(load("tiny"), std=0.5).save(tmp_path / "judge")
    return tmp_path


def scores_of_parts(words):
    """One of two ranks: its scores of all sequences, of a share, and of none while the other has some, beside the whole model's."""
    dtype, rank = getattr(torch, words[0]), int(os.environ["RANK"])
    model = RewardModel.load("judge").to(dtype).requires_grad_(False)
    expected = score_ids(model, SEQUENCES, token_budget=40)
    dist.init_process_group("gloo")
    with ExitStack() as stack:
        shard(model, mesh_of(torch.device("cpu"), stack))
        assert all(hasattr(p, "full_tensor") for p in model.parameters())
        share = [5, 6] if rank else [0, 1, 2, 3, 4]
        found = [score_ids(model, SEQUENCES, token_budget=40)]
        found.append(score_ids(model, [SEQUENCES[i] for i in share], token_budget=20))
        found.append(score_ids(model, [] if rank else SEQUENCES[:3], token_budget=20))
    dist.destroy_process_group()
    apart = [found[0] - expected, found[1] - expected[share], found[2] - expected[: 0 if rank else 3]]
    worst = float(torch.cat(apart).abs().max())
    assert float(expected.std()) > 0.1
    return 0 if worst <= float(words[1]) else 1


@pytest.mark.parametrize(("dtype", "band"), [("float64", "1e-12"), ("float32", "1e-5")])
def test_a_reward_model_in_parts_gives_the_scores_of_the_whole_one(place, dtype, band):
    assert ended([forked(one, place, dtype, band, call=scores_of_parts) for one in ranks(2)]) == [0, 0]


RL = ["rl", "--preset", "grpo", "--rows", "sorting:length=2", "--prompts", "3", "--samples", "4", "--steps", "2"]
RL += ["--reward", "judge", "--sampling.max_new_tokens", "6", "--optim.lr", "3e-4", "--quiet"]
RL += ["--eval.every", "2", "--eval.rows", "1", "--algorithm.resample", "2"]


def watched():
    """Every time it scores, the reward model lies in parts; and files are small."""
    weight_files.FILE_BYTES = 10**6
    score = RewardModelReward.score

    def watch(self, samples, **how):
        assert in_parts(self.model)
        return score(self, samples, **how)

    RewardModelReward.score = watch


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_sharded_run_that_a_reward_model_scores_trains_as_one_process_does(place):
    """An evaluation of one row leaves the second rank nothing to score. The final model has several files."""
    processes(1, place, *RL, "--out", "whole", before=nothing)
    processes(2, place, *RL, "--out", "parts", "--train.shard", "fsdp2", before=watched)
    final = place / "parts/model"
    assert len(list(final.glob("model-*.safetensors"))) > 3
    check_model(final)
    assert {path.name for path in final.iterdir()} > {"manifest.json", "model.safetensors.index.json", "config.json"}
    whole = load_file(place / "whole/model/model.safetensors")
    for name, tensor in AutoModelForCausalLM.from_pretrained(final).named_parameters():
        torch.testing.assert_close(tensor.data, whole[name], rtol=0, atol=1e-5)
    for alone, together in zip(metrics_of(place / "whole"), metrics_of(place / "parts"), strict=True):
        assert alone.keys() == together.keys()
        assert together == pytest.approx(alone, rel=2e-3, abs=2e-5)
