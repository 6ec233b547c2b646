import json
from math import nan

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from rolecall.policy.heads import RewardModel, ScalarHead
from rolecall.policy.load import LoadError
from rolecall.rewards.model import (
    RewardModelReward,
    RewardSettings,
    encode_answer,
    read_settings,
    score_ids,
    write_settings,
)
from rolecall.rewards.records import Sample

WORDS = ["<unk>", "<end>", "Q", "A", "good", "bad", "what", "is", "it", "S"]
CONTEXT = 12


@pytest.fixture
def model():
    """A reward model that reads words, where the policy of the library's other tests reads bytes."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    return RewardModel(
        trunk=LlamaModel(config).eval(),
        head=ScalarHead(16, std=1.0, seed=1),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token="<end>",
            unk_token="<unk>",
            chat_template=(
                "{% for m in messages %}{{ {'user': 'Q ', 'assistant': 'A ', 'system': 'S '}[m.role] + m.content + ' ' }}"
                "{% endfor %}"
            ),
        ),
    )


def ids(*words):
    return tuple(WORDS.index(word) for word in words)


def by_hand(model, *words):
    return model.scores(torch.tensor([ids(*words)]), torch.tensor([len(words)])).item()


def test_it_reads_the_text_with_its_own_tokenizer_and_template(model):
    reward = RewardModelReward(model)
    chat = [{"role": "user", "content": "what is it"}]
    samples = [
        Sample(prompt="what is it ", completion="good", completion_ids=(103, 111, 111, 100, 258)),
        Sample(prompt=chat, completion=[{"role": "assistant", "content": "bad"}], completion_ids=(98, 97, 100, 258)),
        Sample(prompt=chat, completion="bad"),
    ]
    first, second, third = reward.score(samples, state={"global_step": 3})
    assert first.total == pytest.approx(by_hand(model, "what", "is", "it", "good", "<end>"), abs=1e-6)
    assert second.total == pytest.approx(by_hand(model, "Q", "what", "is", "it", "A", "bad"), abs=1e-6)
    assert third == second
    assert reward.names == ("reward_model",)
    assert first.scores == {"reward_model": first.total}
    assert reward.take_metrics() == {"rewards/reward_model/failed": 0.0}


def test_scores_do_not_depend_on_the_micro_batches(model):
    samples = [Sample(prompt="what " * n, completion="good") for n in range(6)]
    together = RewardModelReward(model).score(samples)
    alone = RewardModelReward(model, token_budget=1).score(samples)
    assert [s.total for s in together] == pytest.approx([s.total for s in alone], abs=1e-6)
    assert len({s.total for s in together}) == 6


def test_nothing_is_remembered_for_a_gradient(model):
    assert not score_ids(model, [ids("good")], token_budget=8).requires_grad


def test_no_answers_have_no_scores(model):
    assert RewardModelReward(model).score([]) == []


def test_an_answer_that_is_too_long_fails_by_name_and_the_others_are_scored(model, caplog):
    reward = RewardModelReward(model, name="taste")
    long = Sample(prompt="what " * CONTEXT, completion="good", prompt_index=2, sample_index=1)
    short = Sample(prompt="what ", completion="good")
    failed, scored = reward.score([long, short])
    assert failed.failure == (
        "reward `taste` failed on prompt 2 sample 1: it has 14 tokens, the reward model can read 12"
    )
    assert (failed.total, failed.scores) == (None, {"taste": None})
    assert scored.total == pytest.approx(by_hand(model, "what", "good", "<end>"), abs=1e-6)
    assert reward.take_metrics() == {"rewards/taste/failed": 1.0}
    assert reward.take_metrics() == {"rewards/taste/failed": 0.0}
    assert failed.failure in caplog.text


def test_an_answer_that_its_template_does_not_know_fails_by_name(model):
    odd = Sample(prompt=[{"role": "tool", "content": "it"}], completion="good")
    (failed,) = RewardModelReward(model).score([odd])
    assert "cannot be rendered in the reward model's template" in failed.failure


def test_a_score_that_is_not_finite_is_a_failure(model):
    with torch.no_grad():
        model.head.weight[0, 0] = nan
    (failed,) = RewardModelReward(model).score([Sample(prompt="what ", completion="good")])
    assert failed.failure == "reward `reward_model` failed on prompt 0 sample 0: its score is nan, which is not finite"


def test_offset_and_weight(model):
    sample = Sample(prompt="what ", completion="good")
    raw = by_hand(model, "what", "good", "<end>")
    (scored,) = RewardModelReward(model, settings=RewardSettings(offset=2.0), weight=0.5).score([sample])
    assert scored.scores["reward_model"] == pytest.approx(raw - 2.0, abs=1e-6)
    assert scored.total == pytest.approx(0.5 * (raw - 2.0), abs=1e-6)


def test_a_saved_one_scores_as_it_was_trained(model, tmp_path):
    settings = RewardSettings(system_prompt="good", chat_template_kwargs={"thinking": False}, offset=0.25)
    model.save(tmp_path)
    write_settings(tmp_path, settings)
    reward = RewardModelReward.load(tmp_path, name="taste")
    assert reward.settings == settings
    (scored,) = reward.score([Sample(prompt=[{"role": "user", "content": "it"}], completion="bad")])
    assert scored.total == pytest.approx(by_hand(model, "S", "good", "Q", "it", "A", "bad") - 0.25, abs=1e-6)
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())


def test_one_from_elsewhere_has_no_settings(model, tmp_path):
    model.save(tmp_path)
    assert read_settings(tmp_path) == RewardSettings()


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"shift": 1}), json.dumps({"offset": "high"})])
def test_settings_that_cannot_be_read(tmp_path, text):
    (tmp_path / "reward_model.json").write_text(text)
    with pytest.raises(LoadError, match=r"reward_model\.json cannot be read .* system_prompt"):
        read_settings(tmp_path)


def test_a_tokenizer_without_an_end_token_closes_nothing(model):
    model.tokenizer.eos_token = None
    assert encode_answer(model, "what ", "good", RewardSettings()) == ids("what", "good")
