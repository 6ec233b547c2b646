"""An advantage or a loss of the user's own that returns something else than it should."""

import pytest
from learners import learner_of, options_of, weights_of

from rolecall.errors import UserError
from rolecall.train.step import Term, trained

SHORT = {"prompts": 2, "samples": 2, "sampling.max_new_tokens": 4}


def column(batch):
    return batch.scores[:, None]


def mean(outputs, batch):
    return outputs.logprobs.mean()


def per_answer(outputs, batch):
    return {"policy": Term(values=outputs.logprobs.sum(1), mask=trained(batch), mode="token-mean")}


def averaged(outputs, batch):
    return {"policy": Term(values=outputs.logprobs, mask=trained(batch), mode="mean")}


@pytest.mark.parametrize(
    ("preset", "own", "said"),
    [
        ("grpo", {"advantage": column}, "the advantage function `column` returned a tensor of shape [4, 1]; it must return "
         "a tensor of shape [batch] = [4] or [batch, time] = [4, "),
        ("grpo", {"advantage": lambda batch: batch.scores.tolist()}, "returned a list; it must"),
        ("grpo", {"advantage": lambda batch: batch.scores[:2]}, "returned a tensor of shape [2]; it must"),
        ("ppo", {"advantage": lambda batch: batch.scores}, "must return a pair (advantages, returns [batch, time])"),
        ("ppo", {"advantage": lambda batch: (batch.scores, batch.scores)}, "a tuple of 2 (a tensor of shape [4],"),
        ("grpo", {"loss": mean}, "the loss function `mean` returned a single number (a tensor of shape []); it must return "
         "{name: Term} with a value for every position"),
        ("grpo", {"loss": lambda out, batch: {"policy": out.logprobs}}, "a dict in which 'policy' is a tensor of shape [4,"),
        ("grpo", {"loss": lambda out, batch: {}}, "returned an empty dict; it must return {name: Term}"),
        ("grpo", {"loss": per_answer}, "the loss function `per_answer` returned a tensor of shape [4] as values of the term "
         "'policy'; they must have the shape [batch, time] = [4, "),
        ("grpo", {"loss": averaged}, "the term 'policy' has mode 'mean'; choose one of token-mean"),
    ],
)  # fmt: skip
def test_a_wrong_shape_is_a_sentence_before_anything_is_trained(preset, own, said):
    learner = learner_of(options_of(preset, **SHORT), lambda sample: float(sample.sample_index), **own)
    before = weights_of(learner)
    with pytest.raises(UserError) as caught:
        learner.update(learner.collect(0))
    assert said in str(caught.value)
    after = weights_of(learner)
    assert all(after[name].equal(weight) for name, weight in before.items())


def test_a_pair_is_taken_with_a_critic_and_a_number_per_token_without():
    def pair(batch):
        return batch.scores, batch.values

    def per_token(batch):
        return batch.scores[:, None].expand(batch.ids.shape)

    for preset, advantage in (("ppo", pair), ("grpo", per_token)):
        learner = learner_of(
            options_of(preset, **SHORT), lambda sample: float(sample.sample_index), advantage=advantage
        )
        learner.update(learner.collect(0))
        assert learner.metrics()["grad_norm"] > 0
