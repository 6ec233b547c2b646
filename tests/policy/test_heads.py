import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rolecall.policy.heads import Critic, RewardModel, ScalarHead
from rolecall.policy.load import LoadError, load
from rolecall.policy.lora import add_adapter
from rolecall.policy.tiny import TURN_END_ID

IDS = torch.tensor([[*b"abcd"], [*b"xyz!"]])


@pytest.fixture
def reward_model():
    return RewardModel.from_policy(load("tiny"), std=0.1, seed=3)


def test_a_value_is_read_one_position_before_its_token():
    head = ScalarHead(2)
    head.weight.data = torch.tensor([[1.0, 10.0]])
    hidden = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]])
    values = head.values(hidden)
    assert values[0, 0].isnan()
    assert values[0, 1:].tolist() == [1.0, 2.0]
    assert head(hidden).tolist() == [[1.0, 2.0, 30.0]]


def test_the_value_of_a_token_does_not_know_the_token():
    critic = Critic.from_policy(load("tiny"), std=0.1)
    other = IDS.clone()
    other[:, 2] = 7
    before, after = critic(IDS), critic(other)
    assert torch.equal(before[:, 1:3], after[:, 1:3])
    assert not torch.equal(before[:, 3], after[:, 3])


def test_a_fresh_critic_predicts_zero_and_learns():
    critic = Critic.from_policy(load("tiny"))
    values = critic(IDS)
    assert torch.equal(values[:, 1:], torch.zeros(2, 3))
    values[:, 1:].sum().backward()
    assert critic.head.weight.grad.abs().sum() > 0


def test_the_trunk_is_a_copy_and_the_policy_stays_as_it_is():
    policy = load("tiny")
    critic = Critic.from_policy(policy)
    with torch.no_grad():
        critic.trunk.embed_tokens.weight.zero_()
    assert policy.model.model.embed_tokens.weight.abs().sum() > 0


def test_the_head_stays_in_float32_under_a_bfloat16_trunk():
    critic = Critic.from_policy(load("tiny", dtype="bfloat16"), std=0.1)
    assert critic.trunk.dtype == torch.bfloat16
    assert critic(IDS).dtype == critic.head.weight.dtype == torch.float32


def test_a_model_in_float64_scores_in_float64(reward_model):
    assert reward_model.double().scores(IDS, torch.tensor([4, 4])).dtype == torch.float64


def test_scores_are_read_at_the_last_token(reward_model):
    lengths = torch.tensor([2, 4])
    by_hand = reward_model.head(reward_model.hidden(IDS))
    torch.testing.assert_close(reward_model(IDS, lengths), torch.stack([by_hand[0, 1], by_hand[1, 3]]))


@pytest.mark.parametrize("filler", [0, TURN_END_ID])
def test_padding_has_no_influence_on_a_score(reward_model, filler):
    alone = reward_model.scores(IDS[:1], torch.tensor([4]))
    padded = torch.cat([IDS[:1], torch.full((1, 5), filler)], dim=1)
    torch.testing.assert_close(reward_model.scores(padded, torch.tensor([4])), alone)


@pytest.mark.parametrize("lengths", [[0, 2], [2, 5]])
def test_a_score_needs_a_last_token(reward_model, lengths):
    with pytest.raises(ValueError, match=r"lengths must lie in 1\.\.4"):
        reward_model.scores(IDS, torch.tensor(lengths))


def test_lengths_fit_the_rows(reward_model):
    with pytest.raises(ValueError, match="2 rows"):
        reward_model.scores(IDS, torch.tensor([1]))


def test_a_critic_can_start_as_the_reward_model(reward_model):
    critic = Critic.from_reward_model(reward_model)
    scores = reward_model.scores(IDS[:, :3], torch.tensor([3, 3]))
    torch.testing.assert_close(critic(IDS)[:, 3], scores)
    with torch.no_grad():
        critic.head.weight.zero_()
    assert reward_model.head.weight.abs().sum() > 0


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_activations_are_recomputed_only_if_it_is_said(reward_model, tmp_path, checkpointing):
    reward_model.save(tmp_path)
    how = {} if checkpointing is None else {"gradient_checkpointing": checkpointing}
    assert RewardModel.load(tmp_path, **how).trunk.is_gradient_checkpointing == bool(checkpointing)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_exact(tmp_path, dtype, capsys):
    model = RewardModel.from_policy(load("tiny", dtype=dtype), std=0.1, seed=3)
    model.save(tmp_path)
    again = RewardModel.load(tmp_path, dtype=dtype)
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    lengths = torch.tensor([3, 4])
    assert torch.equal(model.scores(IDS, lengths), again.scores(IDS, lengths))
    assert (tmp_path / "model.safetensors").is_file()
    assert capsys.readouterr().err == ""


def test_loaded_weights_lie_in_aligned_memory_of_their_own(tmp_path, reward_model):
    reward_model.save(tmp_path)
    assert {p.data_ptr() % 64 for p in RewardModel.load(tmp_path).parameters()} == {0}


def test_a_reward_model_carries_its_own_tokenizer_and_template(tmp_path, reward_model):
    reward_model.tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    reward_model.save(tmp_path)
    again = RewardModel.load(tmp_path)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert again.encode(chat) == tuple(b"[a][b]")
    assert again.encode("plain") == tuple(b"plain")
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == reward_model.tokenizer.chat_template


def test_transformers_reads_ours(tmp_path, reward_model):
    reward_model.save(tmp_path)
    theirs, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    logits = theirs(IDS, attention_mask=torch.ones_like(IDS)).logits
    torch.testing.assert_close(logits[:, 0], reward_model.scores(IDS, torch.tensor([4, 4])))


def test_ours_reads_that_of_transformers(tmp_path, reward_model):
    reward_model.save(tmp_path / "ours")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    reward_model.tokenizer.save_pretrained(tmp_path / "theirs")
    again = RewardModel.load(tmp_path / "theirs")
    assert torch.equal(again.head.weight, reward_model.head.weight)


def test_a_loaded_one_learns_every_embedding_row(tmp_path, reward_model):
    reward_model.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": TURN_END_ID}))
    again = RewardModel.load(tmp_path)
    again.scores(torch.tensor([[TURN_END_ID, 65]]), torch.tensor([2])).sum().backward()
    assert again.trunk.embed_tokens.weight.grad[TURN_END_ID].abs().sum() > 0


def test_a_language_model_is_not_a_reward_model(tmp_path):
    loaded = load("tiny")
    loaded.model.save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"has no 'score\.weight'"):
        RewardModel.load(tmp_path)


def test_several_labels_are_refused(tmp_path, reward_model):
    reward_model.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["score.weight"] = torch.zeros(3, 128)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match="gives 3 numbers"):
        RewardModel.load(tmp_path)


def test_a_directory_that_is_not_there():
    with pytest.raises(LoadError, match="no such directory"):
        Critic.load("nowhere")


def test_a_head_that_is_not_finite_is_named(tmp_path, reward_model):
    reward_model.head.weight.data[0, 0] = float("nan")
    reward_model.save(tmp_path)
    with pytest.raises(LoadError, match=r"'head\.weight' holds NaN"):
        RewardModel.load(tmp_path)


def test_an_adapter_is_merged_first():
    with pytest.raises(ValueError, match=r"lora\.merged"):
        Critic.from_policy(add_adapter(load("tiny"), rank=2))


@pytest.mark.usefixtures("fast_paths")
def test_asked_values_are_those_of_the_whole_and_so_are_their_gradients():
    critic = Critic.from_policy(load("tiny"), std=0.1)
    asked = torch.tensor([[True, False, True], [False, True, True]])
    found = []
    for read in (lambda: critic(IDS)[:, 1:][asked], lambda: critic(IDS, asked)):
        critic.zero_grad()
        values = read()
        (values * torch.arange(1.0, 5.0)).sum().backward()
        found.append((values.detach(), {name: p.grad.clone() for name, p in critic.named_parameters()}))
    (whole, gradients), (some, others) = found
    torch.testing.assert_close(some, whole)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-3, atol=1e-5)
    assert critic._reader.is_flat, "and they are read without the padded forward pass"
