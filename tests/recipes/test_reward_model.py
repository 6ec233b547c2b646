import copy
import dataclasses
import json
from contextlib import nullcontext
from math import log
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from rolecall.config.merge import to_dict
from rolecall.config.parts import ChatOptions, HeldOutOptions, OptimOptions, PolicyOptions
from rolecall.config.training import RMOptions
from rolecall.jobs.data import preferences
from rolecall.jobs.models import start_reward_model
from rolecall.maths.losses import bradley_terry
from rolecall.policy.heads import Critic, RewardModel
from rolecall.policy.load import load
from rolecall.recipes.rendering import Pair
from rolecall.recipes.reward_model import (
    RewardModelLearner,
    calibration_error,
    centre,
    evaluate_reward_model,
    make_pairs,
    reward_model_files,
    save_reward_model,
    settings_of,
)
from rolecall.rewards.model import RewardModelReward, score_ids
from rolecall.rewards.records import Sample
from rolecall.tasks.rows import ListRows, RowError
from rolecall.train.checkpoint import latest
from rolecall.train.exit_codes import ExitCode
from rolecall.train.loop import Loop, LoopOptions
from rolecall.train.manifest import RefusedCheckpointError
from rolecall.train.optim import make_optimizer
from rolecall.train.persist import read_checkpoint, write_checkpoint
from rolecall.train.progress import Quiet
from rolecall.train.rundir import RunDir
from rolecall.train.state import NotFinite
from rolecall.train.step import Updater
from rolecall.train.timing import Timer

PLAIN = ChatOptions()
UNEVEN = (
    Pair(chosen=(*b"1+1=2", 258), rejected=(*b"1+1=333", 258)),
    Pair(chosen=(*b"a", 258), rejected=(*b"b", 258), margin=0.3),
    Pair(chosen=(*b"12345678901234567890", 258), rejected=(*b"0", 258)),
    Pair(chosen=tuple(b"xyz"), rejected=tuple(b"xy"), margin=-1.0),
    Pair(chosen=tuple(b"hello there"), rejected=tuple(b"hello then")),
)


def reward_model(std=0.1):
    return RewardModel.from_policy(load("tiny"), std=std, seed=3)


def learner_of(model, options, pairs, *, token_budget=8192, max_grad_norm=None, updater=Updater, accelerator=None):
    made = updater(
        accelerator or Accelerator(cpu=True),
        model,
        make_optimizer(model, options.optim),
        token_budget=token_budget,
        max_grad_norm=max_grad_norm,
    )
    return RewardModelLearner(options, updater=made, pairs=pairs)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def rows_of(*rows):
    return ListRows(rows)


def test_it_learns_to_rank_the_held_out_pairs_of_a_task():
    options = RMOptions(
        rows="sorting:length=3",
        steps=36,
        batch=16,
        optim=OptimOptions(lr=3e-3, warmup_steps=2),
        eval=HeldOutOptions(every=1, rows=100),
    )
    model = start_reward_model(options.model, options)
    train, held_out = preferences(options)
    pairs = make_pairs(model, train, chat=PLAIN, max_length=64).pairs
    unseen = make_pairs(model, held_out, chat=PLAIN, max_length=64).pairs
    before = evaluate_reward_model(model, unseen)
    assert (before["accuracy"], before["log_loss"], before["calibration_error"]) == (0.5, pytest.approx(log(2)), 0.0)
    learner = learner_of(model, options, pairs, max_grad_norm=1.0)
    for step in range(options.steps):
        learner.update(learner.collect(step))
    after = evaluate_reward_model(model, unseen)
    assert after["accuracy"] > 0.75
    assert after["log_loss"] < 0.6
    assert after["margin"] > 0


def test_the_gradient_does_not_depend_on_the_micro_batches():
    options = RMOptions(batch=len(UNEVEN))
    model = reward_model().double()
    alone = copy.deepcopy(model)
    losses = [
        bradley_terry(
            alone.scores(torch.tensor([p.chosen]), torch.tensor([len(p.chosen)])),
            alone.scores(torch.tensor([p.rejected]), torch.tensor([len(p.rejected)])),
            margin=p.margin,
        )
        for p in UNEVEN
    ]
    mean = torch.cat(losses).mean()
    mean.backward()
    for token_budget in (1, 30, 8192):
        cut = copy.deepcopy(model)
        learner = learner_of(cut, options, UNEVEN, token_budget=token_budget)
        learner.update(learner.collect(0))
        assert learner.metrics()["loss"] == pytest.approx(mean.item(), abs=1e-10)
        for mine, wanted in zip(gradients(cut), gradients(alone), strict=True):
            torch.testing.assert_close(mine, wanted, atol=1e-10, rtol=0)


class OneOfTwo(Updater):
    """A rank that is told what both ranks have together: five pairs, and four rounds."""

    def _over_ranks(self, x, how):
        if how == "max":
            return torch.tensor(4.0)
        return torch.tensor(float(len(UNEVEN))) if x.dtype == torch.float32 else x


def test_the_gradient_does_not_depend_on_the_ranks():
    options = RMOptions(batch=len(UNEVEN))
    model = reward_model().double()
    ranks = []
    for rank in range(2):
        accelerator = SimpleNamespace(
            num_processes=2,
            process_index=rank,
            device=torch.device("cpu"),
            no_sync=lambda module: nullcontext(),
            backward=lambda loss: loss.backward(),
            clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
        )
        mine = copy.deepcopy(model)
        learner = learner_of(mine, options, UNEVEN, token_budget=30, updater=OneOfTwo, accelerator=accelerator)
        learner.update(learner.collect(0))
        ranks.append(mine)
    whole = copy.deepcopy(model)
    learner = learner_of(whole, options, UNEVEN)
    learner.update(learner.collect(0))
    for one, other, wanted in zip(*map(gradients, ranks), gradients(whole), strict=True):
        torch.testing.assert_close((one + other) / 2, wanted, atol=1e-10, rtol=0)  # as DDP averages


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone():
    model = reward_model()
    with torch.no_grad():
        model.trunk.norm.weight[0] = torch.inf
    before = copy.deepcopy(model.state_dict())
    learner = learner_of(model, RMOptions(batch=2), UNEVEN, max_grad_norm=1.0)
    learner.update(learner.collect(0))
    assert learner.metrics()["skipped"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_numbers_of_a_step_worked_by_hand():
    scores = {(*b"a", 258): 1.0, (*b"b", 258): 3.0, (*b"c", 258): 2.0}
    options = RMOptions(batch=2)
    a, b, c = scores
    pairs = (Pair(chosen=b, rejected=a), Pair(chosen=a, rejected=c))

    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, ids, lengths):
            rows = [tuple(row[:n].tolist()) for row, n in zip(ids, lengths, strict=True)]
            return self.scale * torch.tensor([scores[row] for row in rows])

    learner = learner_of(Table(), options, pairs)
    learner.update(learner.collect(0))
    found = learner.metrics()
    # margins 2 and -1
    assert found["loss"] == pytest.approx((0.126928 + 1.313262) / 2, abs=1e-5)
    assert (found["accuracy"], found["margin"]) == (0.5, 0.5)
    assert (found["rewards/chosen/mean"], found["rewards/chosen/std"]) == (2.0, 1.0)
    assert (found["rewards/rejected/mean"], found["rewards/rejected/std"]) == (1.5, 0.5)
    assert found["num_tokens"] == 8
    # d loss / d scale = mean of - margin sigmoid(- margin) = (-2 x 0.119203 + 1 x 0.731059) / 2
    assert found["grad_norm"] == pytest.approx(0.246326, abs=1e-5)
    assert found["skipped"] == 0
    assert learner.explain() == "loss 0.7201, 50% ranked right, margin 0.5"


def test_calibration_worked_by_hand():
    # confidences 0.5 (tie: half right), 0.52 twice (one right), 0.97 (wrong), 1 (right)
    logit = lambda p: log(p / (1 - p))
    margins = torch.tensor([0.0, logit(0.52), -logit(0.52), -logit(0.97), torch.inf])
    # bin 0: |1.5 - 1.54|; bin 9: |1 - 1.97|
    assert calibration_error(margins) == pytest.approx((0.04 + 0.97) / 5)


def test_confidences_on_both_sides_of_a_bins_end_do_not_cancel():
    # ten bins of 0.05: 0.74 (right) lies below the end at 0.75, 0.76 (wrong) above it
    margins = torch.tensor([log(0.74 / 0.26), -log(0.76 / 0.24)])
    assert calibration_error(margins) == pytest.approx((0.26 + 0.76) / 2)


def test_calibration_does_not_care_which_side_is_called_chosen_if_half_are_right():
    margins = torch.tensor([1.0, -1.0, 2.0, -2.0])
    assert calibration_error(margins) == pytest.approx(calibration_error(-margins))
    confident = torch.tensor([1.0, 2.0]).sigmoid().double()
    assert calibration_error(margins) == pytest.approx(float((confident - 0.5).abs().mean()))


def test_a_model_that_is_as_right_as_it_is_sure_has_no_error():
    margins = torch.tensor([log(3.0)] * 3 + [-log(3.0)])  # confidence 3/4, right in 3 of 4
    assert calibration_error(margins) == pytest.approx(0.0, abs=1e-7)
    assert calibration_error(-margins) == pytest.approx(0.5, abs=1e-7)


def kept(model):
    """How the model is kept in a checkpoint."""
    return {"files": reward_model_files(model, settings_of(PLAIN)), "module": model}


def test_k_steps_a_checkpoint_and_the_rest_are_the_same_as_all_steps(tmp_path):
    options = RMOptions(batch=2, steps=4, optim=OptimOptions(lr=1e-3, warmup_steps=2, schedule="linear"))

    def run(learner, start, stop):
        for step in range(start, stop):
            learner.update(learner.collect(step))

    straight = reward_model()
    run(learner_of(straight, options, UNEVEN), 0, 4)
    first = reward_model()
    learner = learner_of(first, options, UNEVEN)
    run(learner, 0, 2)
    write_checkpoint(
        tmp_path,
        **kept(first),
        optimizer=learner.updater.optimizer,
        learner=learner.state_dict(),
        extra={"step": 2},
    )
    second = reward_model(std=0.0)
    learner = learner_of(second, options, UNEVEN)
    state, extra = read_checkpoint(tmp_path, **kept(second), optimizer=learner.updater.optimizer)
    learner.load_state_dict(state)
    run(learner, extra["step"], 4)
    wanted = straight.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in second.state_dict().items())


def test_a_run_of_the_loop_leaves_numbers_and_a_reward_model_behind(tmp_path):
    options = RMOptions(batch=2, steps=2)
    model = reward_model()
    learner = learner_of(model, options, UNEVEN)

    def write(directory, extra):
        write_checkpoint(
            directory,
            **kept(model),
            optimizer=learner.updater.optimizer,
            learner=learner.state_dict(),
            extra=extra,
        )

    with RunDir(tmp_path, "first") as run:
        loop = Loop(
            learner,
            LoopOptions(steps=2, save_every=0, keep=2, eval_every=2, main="accuracy"),
            run=run,
            config=to_dict(options),
            write=write,
            evaluate=lambda step: evaluate_reward_model(model, UNEVEN),
            progress=Quiet(),
            timer=Timer(),
        )
        outcome = loop.go(start=0, title="reward model")
    assert outcome.exit_code == ExitCode.DONE
    assert outcome.best == evaluate_reward_model(model, UNEVEN)["accuracy"]
    lines = [json.loads(line) for line in (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2]
    assert {"eval_accuracy", "eval_calibration_error", "eval_log_loss"} <= lines[-1].keys()
    reward = RewardModelReward.load(latest(tmp_path / "first" / "checkpoints").path)
    assert torch.equal(reward.model.head.weight, model.head.weight)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    model = reward_model()
    optimizer = make_optimizer(model, OptimOptions())
    write_checkpoint(tmp_path, **kept(model), optimizer=optimizer, learner={}, extra={})
    model.head.weight = torch.nn.Parameter(torch.zeros(1, 64))
    with pytest.raises(RefusedCheckpointError, match=r"head\.weight is \(1, 128\) there and \(1, 64\) here"):
        read_checkpoint(tmp_path, **kept(model), optimizer=optimizer)


def test_broken_weights_are_not_saved(tmp_path):
    model = reward_model()
    model.head.weight.data[0, 0] = torch.nan
    with pytest.raises(NotFinite, match=r"head\.weight is not finite"):
        write_checkpoint(
            tmp_path / "new",
            **kept(model),
            optimizer=make_optimizer(model, OptimOptions()),
            learner={},
            extra={},
        )
    assert not (tmp_path / "new").exists()


def test_what_was_saved_scores_the_same_and_starts_a_critic(tmp_path):
    model = reward_model()
    offset = centre(model, UNEVEN, token_budget=64)
    save_reward_model(model, tmp_path, settings_of(PLAIN, offset=offset))
    sequences = [side for pair in UNEVEN for side in (pair.chosen, pair.rejected)]
    before = score_ids(model, sequences, token_budget=64)
    assert offset == pytest.approx(before.mean().item())
    assert torch.equal(score_ids(RewardModel.load(tmp_path), sequences, token_budget=64), before)
    assert torch.equal(score_ids(start_reward_model(str(tmp_path), RMOptions()), sequences, token_budget=64), before)
    (scored,) = RewardModelReward.load(tmp_path).score([Sample(prompt="1+1=", completion="2")])
    assert scored.total == pytest.approx(before[0].item() - offset, abs=1e-5)

    critic = Critic.from_reward_model(RewardModel.load(tmp_path))
    ids = torch.tensor([[*UNEVEN[0].chosen, 7]])
    assert critic(ids)[0, -1].item() == pytest.approx(before[0].item(), abs=1e-5)
    assert torch.equal(Critic.load(tmp_path)(ids)[:, 1:], critic(ids)[:, 1:])


def test_texts_are_joined_and_closed_and_messages_go_through_the_template():
    model = reward_model()
    made = make_pairs(
        model,
        rows_of(
            {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 2},
            {"prompt": [{"role": "user", "content": "hi"}], "chosen": "yo", "rejected": "no", "margin": None},
            {"chosen": "1+2= 3", "rejected": "1+2= 4", "prompt": None},
        ),
        chat=PLAIN,
        max_length=64,
    )
    assert made.pairs[0] == Pair(chosen=(*b"1+1=2", 258), rejected=(*b"1+1=3", 258), margin=2.0)
    chat = model.tokenizer("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n")["input_ids"]
    assert made.pairs[1].chosen == tuple(chat)
    assert made.pairs[2].rejected == (*b"1+2= 4", 258)
    assert made.in_words() == "3 pairs"


def test_the_chat_options_reach_the_model():
    model = reward_model()
    rows = rows_of({"prompt": [{"role": "user", "content": "hi"}], "chosen": "yo", "rejected": "no"})
    (pair,) = make_pairs(model, rows, chat=ChatOptions(system_prompt="Be kind."), max_length=99).pairs
    assert model.tokenizer.decode(pair.chosen).startswith("<|im_start|>system\nBe kind.<|im_end|>")


def test_pairs_that_cannot_teach_are_left_out_and_counted():
    model = reward_model()
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    chat = [{"role": "user", "content": "hi"}]
    made = make_pairs(
        model,
        rows_of(
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            {"prompt": chat, "chosen": "yes", "rejected": "yes "},
            {"prompt": "a", "chosen": "b", "rejected": "c" * 20},
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        ),
        chat=PLAIN,
        max_length=16,
    )
    assert (len(made.pairs), made.same, made.too_long) == (1, 2, 1)
    assert made.in_words() == "1 pairs; left out: 1 too long, 2 the same twice"


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "a"}, "a preference needs `chosen` and `rejected`"),
        ({"chosen": "b", "rejected": None, "prompt": "a"}, "row 0: `rejected` must be a text or a list of messages"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "2"}, "row 0: `margin` must be a finite number"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "no pair is left of 1 rows: 0 have a side longer than 8"),
        ({"prompt": "a" * 9, "chosen": "b", "rejected": "c"}, "1 have a side longer than 8 tokens"),
    ],
)
def test_bad_rows_get_a_sentence(row, sentence):
    with pytest.raises(RowError, match=sentence):
        make_pairs(reward_model(), rows_of(row), chat=PLAIN, max_length=8)


def test_a_row_that_cannot_be_rendered_is_named():
    rows = rows_of({"prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(RowError, match="row 0 cannot be rendered: a system prompt needs messages"):
        make_pairs(reward_model(), rows, chat=ChatOptions(system_prompt="Be kind."), max_length=8)


def test_rows_of_a_file_are_split_only_if_the_run_evaluates(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}=", "chosen": "{i}", "rejected": "x"}}\n' for i in range(40)))
    options = RMOptions(rows=str(path), eval=HeldOutOptions(every=5, held_out=0.25))
    train, held_out = preferences(options)
    assert len(train) + len(held_out) == 40
    assert len(held_out) > 0
    everything, nothing = preferences(dataclasses.replace(options, eval=HeldOutOptions(every=0)))
    assert (len(everything), nothing) == (40, None)


def test_options_that_cannot_be_used():
    with pytest.raises(ValueError, match="at least 1"):
        RMOptions(batch=0)
    with pytest.raises(ValueError, match=r"leave out policy\.lora_rank"):
        RMOptions(policy=PolicyOptions(lora_rank=4))
