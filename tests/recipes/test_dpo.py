"""DPO: its gradient through all logits, its independence of cuts, and what it logs."""

import pytest
import torch
from accelerate import Accelerator
from test_metrics_docs import unknown

from rolecall.config.merge import make
from rolecall.config.parts import ChatOptions
from rolecall.config.training import DPOOptions
from rolecall.errors import UserError
from rolecall.policy.load import load
from rolecall.policy.model import PolicyModel
from rolecall.recipes.dpo import DPOLearner
from rolecall.recipes.rendering import rendered_pairs
from rolecall.tasks.rows import ListRows
from rolecall.train.optim import make_optimizer
from rolecall.train.reference import Reference
from rolecall.train.step import Updater

ROWS = [
    {"prompt": "go:", "chosen": "ab", "rejected": "c"},
    {"prompt": "on and on:", "chosen": "a", "rejected": "abc"},
    {"prompt": "up:", "chosen": "bbbb", "rejected": "b"},
]


def learner_of(*, policy=None, dtype=None, **settings):
    policy = policy or load("tiny")
    if dtype is not None:
        policy.model.to(dtype)
    options = make(DPOOptions, {"batch": 3, "optim.lr": 1e-3, "optim.max_grad_norm": None, **settings})
    pairs = rendered_pairs(ListRows(ROWS), policy, ChatOptions(), max_length=100).pairs
    module = PolicyModel(policy.model)
    reference = Reference(module)
    with torch.no_grad():  # away from the reference, so that margins are not 0
        for p in policy.model.parameters():
            p.mul_(1.3)
    accelerator = Accelerator(cpu=True)
    module, optimizer = accelerator.prepare(module, make_optimizer(module, options.optim))
    updater = Updater(
        accelerator,
        module,
        optimizer,
        token_budget=options.optim.token_budget,
        max_grad_norm=options.optim.max_grad_norm,
    )
    return DPOLearner(options, updater=updater, reference=reference, pairs=pairs), policy


def answer_logprob(model, tokenizer, prompt, answer, stop):
    start, rest = tokenizer(prompt)["input_ids"], tokenizer(answer)["input_ids"]
    ids = torch.tensor([[*start, *rest, stop]])
    logprobs = model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    return logprobs[len(start) - 1 :].sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_gradient_is_that_of_the_formula_through_all_logits(smoothing):
    learner, policy = learner_of(dtype=torch.float64, beta=0.7, label_smoothing=smoothing)
    other, frozen = load("tiny").model.double(), load("tiny").model.double()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.3)
    learner.update(learner.collect(0))

    total = torch.zeros((), dtype=torch.float64)
    for row in ROWS:
        sides = [
            answer_logprob(other, policy.tokenizer, row["prompt"], row[side], policy.stop_ids[0])
            - answer_logprob(frozen, policy.tokenizer, row["prompt"], row[side], policy.stop_ids[0]).detach()
            for side in ("chosen", "rejected")
        ]
        margin = 0.7 * (sides[0] - sides[1])
        total = total - ((1 - smoothing) * margin.sigmoid().log() + smoothing * (-margin).sigmoid().log()) / 3
    total.backward()
    assert learner.metrics()["loss"] == pytest.approx(total.item(), rel=1e-5)
    found = dict(policy.model.named_parameters())
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)


def test_micro_batches_do_not_matter():
    whole, policy = learner_of(dtype=torch.float64)
    cut, other = learner_of(dtype=torch.float64, **{"optim.token_budget": 20})
    whole.update(whole.collect(0))
    cut.update(cut.collect(0))
    assert whole.metrics() == pytest.approx(cut.metrics(), rel=1e-6)
    for (name, a), b in zip(policy.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-10, msg=name)


@pytest.mark.parametrize(("budget", "rows"), [(20, [2, 2, 2]), (32, [2, 4]), (56, [4, 2]), (84, [6])])
def test_both_sides_of_a_pair_count_against_the_token_budget(monkeypatch, budget, rows):
    """The longer sides have 14, 8 and 6 tokens, which is also what the shorter ones are filled up to."""
    learner, _ = learner_of(**{"optim.token_budget": budget})
    seen, logprobs = [], learner._logprobs
    monkeypatch.setattr(
        learner, "_logprobs", lambda batch, rows, mask: seen.append(len(rows)) or logprobs(batch, rows, mask)
    )
    learner.update(learner.collect(0))
    assert seen == rows


def test_policy_equal_to_the_reference_has_loss_log_2_and_no_margin():
    learner, policy = learner_of()
    with torch.no_grad():
        for p, frozen in zip(policy.model.parameters(), learner.reference.weights.values(), strict=True):
            p.copy_(frozen)
    learner.update(learner.collect(0))
    assert learner.metrics()["loss"] == pytest.approx(0.693147, rel=1e-5)
    assert learner.metrics()["rewards/margins"] == pytest.approx(0, abs=1e-5)
    for step in range(1, 30):
        learner.update(learner.collect(step))
    assert learner.metrics()["rewards/accuracies"] == 1
    assert learner.metrics()["rewards/chosen"] > 0 > learner.metrics()["rewards/rejected"]
    held = learner.evaluate(learner.rows)
    assert held["loss"] < 0.5
    assert held["rewards/accuracies"] == 1


def test_the_rule_decides_whether_the_stop_token_counts():
    with_stop, _ = learner_of(dtype=torch.float64)
    without, _ = learner_of(dtype=torch.float64, train_stop=False)
    for learner in (with_stop, without):
        learner.update(learner.collect(0))
    assert with_stop.metrics()["num_tokens"] - without.metrics()["num_tokens"] == 6
    assert with_stop.metrics()["logps/chosen"] < without.metrics()["logps/chosen"]


def test_every_number_is_documented():
    learner, _ = learner_of()
    learner.update(learner.collect(0))
    assert unknown(set(learner.metrics()), "Preference optimisation") == set()
    assert unknown({f"eval_{name}" for name in learner.evaluate(learner.rows)}, "Evaluations") == set()


def test_pairs_that_say_nothing_or_are_too_long_are_left_out_and_counted():
    policy = load("tiny")
    rows = [
        *ROWS,
        {"prompt": "a:", "chosen": "x", "rejected": "x"},
        {"prompt": "a" * 50, "chosen": "x", "rejected": "y"},
    ]
    found = rendered_pairs(ListRows(rows), policy, ChatOptions(), max_length=30)
    pairs, said = found.pairs, found.in_words()
    assert len(pairs) == 3
    assert said == "3 pairs; left out: 1 too long, 1 the same twice"
    with pytest.raises(UserError, match="no pair is left of 3 rows"):
        rendered_pairs(ListRows(ROWS), policy, ChatOptions(), max_length=2)
    with pytest.raises(UserError, match="a preference needs"):
        rendered_pairs(ListRows([{"prompt": "a", "completion": "b"}]), policy, ChatOptions(), max_length=20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta must be above 0"),
        ({"label_smoothing": 0.5}, r"in \[0, 0.5\)"),
        ({"batch": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        make(DPOOptions, settings)
