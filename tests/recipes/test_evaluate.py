"""Evaluations count what they say, repeat themselves, and leave no trace in training."""

import pytest
import torch
from learners import ROWS, STOP, Plain

from rolecall.config.parts import ChatOptions
from rolecall.policy.load import load
from rolecall.policy.lora import add_adapter
from rolecall.policy.model import PolicyModel
from rolecall.recipes.evaluate import Evaluator
from rolecall.rollout.native import NativeEngine
from rolecall.rollout.scripted import ScriptedEngine
from rolecall.tasks.rows import ListRows
from rolecall.train.reference import Reference
from rolecall.types import Sampling

A, B = ord("a"), ord("b")


def evaluator(reward, *, engine=None, script=None, samples=1, policy=None, **more):
    policy = policy or load("tiny")
    engine = engine or ScriptedEngine(script, stop_ids=(STOP,))
    return Evaluator(
        policy=policy,
        engine=engine,
        reward=reward,
        rows=ListRows(ROWS),
        sampling=Sampling(max_new_tokens=4),
        chat=ChatOptions(),
        samples=samples,
        **more,
    )


def native(policy):
    return NativeEngine(policy.model, policy.tokenizer, stop_ids=policy.stop_ids, context_length=policy.context_length)


def test_the_numbers_of_greedy_answers():
    answers = [(A, STOP), (A, A, STOP), (B, B, B, B), (STOP,)]
    scores = {"a": 1.0, "aa": 0.5, "bbbb": None, "": 0.0}
    found = evaluator(
        Plain(lambda s: scores[s.completion]), script=lambda request, sample: answers[request.prompt]
    ).run()
    assert found.answers == list(scores)
    assert found.scores == list(scores.values())
    assert found.numbers == {
        "reward": 0.5,
        "accuracy": 0.25,
        "mean_length": (2 + 3 + 4 + 1) / 4,
        "clipped_ratio": 0.25,
        "failed": 0.25,
    }


def test_without_any_score_there_is_no_reward():
    numbers = evaluator(Plain(lambda s: None), script=lambda request, sample: (A, STOP)).run().numbers
    assert "reward" not in numbers
    assert numbers["failed"] == 1.0


def test_avg_and_pass_at_k_count_over_samples():
    def script(request, sample):
        return (A, STOP) if sample < request.prompt else (B, STOP)

    numbers = evaluator(Plain(lambda s: float(s.completion == "a")), script=script, samples=4)(0)
    assert numbers["avg@4"] == (0 + 1 + 2 + 3) / 16
    assert numbers["pass@4"] == 3 / 4
    assert numbers["accuracy"] == 3 / 4, "greedy: sample 0 alone"


def test_kl_is_that_of_the_samples_against_the_reference():
    def script(request, sample):
        return (A, B, STOP)

    policy = load("tiny")
    reference = Reference(PolicyModel(policy.model))
    found = evaluator(Plain(lambda s: 1.0), script=script, samples=2, policy=policy, reference=reference)(0)["kl"]
    total = 0.0
    with torch.no_grad():
        for row in ROWS:
            ids = torch.tensor([[*policy.tokenizer(row["prompt"])["input_ids"], A, B, STOP]])
            logprobs = policy.model(input_ids=ids).logits.log_softmax(-1)[0, :-1]
            total += (-1.0 - logprobs.gather(-1, ids[0, 1:, None])[-3:, 0]).sum().item()  # the script says -1 each
    assert found == pytest.approx(total / len(ROWS), rel=1e-4)


def test_evaluating_twice_gives_the_same_and_other_weights_something_else():
    policy = load("tiny")
    engine = native(policy)
    reward = Plain(lambda s: sum(s.completion_ids) / 1000)
    evaluate = evaluator(reward, engine=engine, policy=policy, samples=3)
    first = evaluate.run()
    assert evaluate.run() == first
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in policy.model.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    engine.load({name: p.detach() for name, p in policy.model.named_parameters()}, 1)
    assert evaluate.run() != first


def test_what_an_evaluation_logs_does_not_reach_the_next_training_step():
    reward = Plain(lambda s: 1.0)
    evaluator(reward, script=lambda request, sample: (A, STOP), samples=2)(0)
    assert reward.taken == 2, "once for greedy answers, once for samples"


def test_the_training_reward_is_told_beside_the_one_that_decides():
    training = Plain(lambda s: -2.0 if s.prompt_index == 0 else None)
    found = evaluator(
        Plain(lambda s: 1.0), script=lambda request, sample: (A, STOP), train_reward=training, samples=2
    ).run()
    assert found.numbers["reward"] == found.numbers["pass@2"] == 1.0
    assert found.numbers["train_reward"] == -2.0
    assert training.taken == 1, "what it logged meanwhile is not training's"


def test_answers_are_the_likeliest_whatever_training_samples_with():
    policy = load("tiny")
    engine = native(policy)
    found = evaluator(Plain(lambda s: 0.0), engine=engine, policy=policy).run()
    for row, answer in zip(ROWS, found.answers, strict=True):
        ids = policy.tokenizer(row["prompt"])["input_ids"]
        for _ in range(4):
            with torch.no_grad():
                ids = [*ids, int(policy.model(torch.tensor([ids])).logits[0, -1].argmax())]
            if ids[-1] in policy.stop_ids:
                break
        said = ids[len(policy.tokenizer(row["prompt"])["input_ids"]) :]
        assert answer == policy.tokenizer.decode([i for i in said if i not in policy.stop_ids])


@pytest.mark.parametrize(
    ("given", "expected"), [(None, {"global_step": 5}), (lambda step: {"at": step}, {"at": 5})], ids=["none", "given"]
)
def test_rewards_are_told_how_far_the_run_is(given, expected):
    told = []

    class Told(Plain):
        def score(self, samples, *, state=None):
            told.append(dict(state))
            return super().score(samples, state=state)

    evaluator(Told(lambda s: 1.0), script=lambda request, sample: (A, STOP), state_at=given)(5)
    assert told == [expected]


def test_the_reference_of_a_fresh_adapter_is_no_second_copy():
    adapted = add_adapter(load("tiny"), rank=2)
    assert Reference(PolicyModel(adapted.model)).weights is None
    assert Reference(PolicyModel(load("tiny").model)).weights is not None
