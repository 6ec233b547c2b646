"""Models that are no names: objects, runs, adapters; and LoRA's settings."""

import copy
import json
import logging
import subprocess
import sys

import pytest
import torch

import rolecall
from rolecall.config.parts import PolicyOptions
from rolecall.config.training import SFTOptions
from rolecall.errors import UserError
from rolecall.jobs.models import open_model, open_policy
from rolecall.policy import lora
from rolecall.policy.load import load, save
from rolecall.policy.tiny import tiny_model, tiny_tokenizer

TASK = "sorting:length=2"
SHORT = {"max_new_tokens": 2}
STEP = {"rows": TASK, "steps": 1, "batch": 2, "quiet": True}
ASK = {"rows": TASK, "steps": 1, "prompts": 2, "samples": 2, "sampling": SHORT, "quiet": True}
RL = {**ASK, "algorithm.entropy_coef": 0.01}  # trains although an untrained model's answers all score 0
IDS = torch.tensor([[*b"hello world"]])


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def weights(run):
    return (run.model / "model.safetensors").read_bytes()


def facts(model):
    """All that a user could notice of a model."""
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()},
        {name: module.training for name, module in model.named_modules()},
        model.config.to_dict(),
        model.get_input_embeddings().padding_idx,
    )


def same(first, second):
    return first[1:] == second[1:] and all(torch.equal(first[0][name], second[0][name]) for name in first[0])


CALLS = {
    "sft": lambda how, out: rolecall.sft(out=out, **STEP, **how),
    "rm": lambda how, out: rolecall.rm(out=out, **STEP, **how),
    "dpo": lambda how, out: rolecall.dpo(out=out, **STEP, **how),
    "rl": lambda how, out: rolecall.rl(out=out, **RL, **how),
    "best_of_n": lambda how, out: rolecall.best_of_n(
        out=out, rows=TASK, count=2, n=2, sampling=SHORT, quiet=True, **how
    ),
    "expert_iteration": lambda how, out: rolecall.expert_iteration(out=out, keep="best", **ASK, **how),
    "eval": lambda how, out: rolecall.eval(rows=TASK, n=2, sampling=SHORT, **how),
    "generate": lambda how, out: rolecall.generate(prompts=["a"], sampling=SHORT, **how),
    "play": lambda how, out: rolecall.play(env="guessing", agent={"max_turns": 1}, sampling=SHORT, **how),
    "audit": lambda how, out: rolecall.audit(rows=TASK, groups=2, samples=2, sampling=SHORT, **how),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_model_object_is_taken_and_left_as_it_is(name, tmp_path):
    model, tokenizer = tiny_model().train(), tiny_tokenizer()
    model.config.attention_dropout = 0.5
    before = facts(model)
    made = CALLS[name]({"model": model, "tokenizer": tokenizer}, tmp_path / "run")
    assert same(facts(model), before)
    if hasattr(made, "path"):
        assert json.loads((made.path / "config.json").read_text())["model"] == "(given in Python) LlamaForCausalLM"


def test_an_object_trains_as_the_same_model_by_name(tmp_path):
    by_name = rolecall.rl(model="tiny", out=tmp_path / "name", **RL)
    as_object = rolecall.rl(model=(tiny_model(), tiny_tokenizer()), out=tmp_path / "object", **RL)
    assert weights(by_name) == weights(as_object)


def test_a_run_given_as_a_model_is_its_final_model(tmp_path):
    start = rolecall.sft(model="tiny", out=tmp_path / "start", optim={"lr": 1e-2, "warmup_steps": 0}, **STEP)
    judge = rolecall.rm(model=start, out=tmp_path / "judge", **STEP)
    by_run = rolecall.rl(model=start, reward=judge, out=tmp_path / "run", **RL)
    by_path = rolecall.rl(model=str(start.path), reward=str(judge.path), out=tmp_path / "path", **RL)
    assert weights(by_run) == weights(by_path) != weights(start)
    found = rolecall.eval(model=by_run, against=start, rows=TASK, n=2, samples=2, sampling=SHORT)
    assert found.numbers["kl"] is not None
    assert rolecall.report(by_run).path == by_run.report


def test_a_run_of_an_object_is_resumed_with_it(tmp_path):
    how = {**RL, "save": {"every": 1}, "algorithm": {"kl_coef": 0.1}}
    model, tokenizer = tiny_model(), tiny_tokenizer()
    whole = rolecall.rl(model=model, tokenizer=tokenizer, out=tmp_path / "whole", **{**how, "steps": 2})
    rolecall.rl(model=model, tokenizer=tokenizer, out=tmp_path / "part", **how)
    again = {"out": tmp_path / "part", "resume": True, "extend": 1, "quiet": True}
    with pytest.raises(UserError, match="this run's model came from Python: resume it from Python too"):
        rolecall.rl(**again)
    assert weights(rolecall.rl(model=model, tokenizer=tokenizer, **again)) == weights(whole)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": tiny_model()}, "a LlamaForCausalLM without a tokenizer"),
        ({"model": "tiny", "tokenizer": tiny_tokenizer()}, "tokenizer goes with a model object"),
        ({"tokenizer": tiny_tokenizer()}, "tokenizer goes with a model object"),
        ({"model": torch.nn.Linear(2, 2), "tokenizer": tiny_tokenizer()}, "a Linear is not a causal language model"),
        ({"model": tiny_model().model, "tokenizer": tiny_tokenizer()}, "a LlamaModel is not a causal language model"),
        ({"model": tiny_model(), "tokenizer": "tiny"}, "a str is not a tokenizer"),
    ],
)
def test_what_is_no_model_with_its_tokenizer_is_one_sentence(settings, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence) as error:
        rolecall.rl(out=tmp_path / "run", **settings, **RL)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


# -- adapters ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """(an adapter's directory, its base's, what base and adapter answer together)"""
    place = tmp_path_factory.mktemp("adapter")
    save(load("tiny"), place / "base")
    adapted = lora.add_adapter(load(place / "base"), rank=4, alpha=8)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    lora.save_adapter(adapted, place / "adapter")
    return place / "adapter", place / "base", logits(adapted.model)


def options(**policy):
    return SFTOptions(policy=PolicyOptions(**policy))


def test_an_adapter_is_merged_where_all_weights_train_or_none(adapter, caplog):
    caplog.set_level(logging.INFO, logger="rolecall")
    directory, base, together = adapter
    plain = open_model(str(directory))
    assert not lora.has_adapter(plain)
    assert all(p.requires_grad for p in plain.model.parameters())
    torch.testing.assert_close(logits(plain.model), together, atol=1e-5, rtol=0)
    assert not torch.allclose(logits(load(base).model), together, atol=1e-3)
    assert "is merged into its base model" in caplog.text


def test_training_goes_on_with_an_adapter_of_the_same_rank(adapter, caplog):
    caplog.set_level(logging.INFO, logger="rolecall")
    directory, _, together = adapter
    policy = open_policy(str(directory), options(lora_rank=4))
    assert "continues with the adapter" in caplog.text
    assert torch.equal(logits(policy.model), together)
    trains = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert trains
    assert all("lora_" in name for name in trains)
    assert not lora.is_fresh(policy.model)


@pytest.mark.parametrize(
    "policy", [{"lora_rank": 2}, {"lora_rank": 4, "lora_rs": True}, {"lora_rank": 4, "lora_targets": ("q_proj",)}]
)
def test_an_adapter_of_other_settings_is_merged_and_said(adapter, policy, caplog):
    directory, _, together = adapter
    made = open_policy(str(directory), options(**policy))
    assert "is merged, and a new one goes on top: its LoRA settings are others" in caplog.text
    torch.testing.assert_close(logits(made.model), together, atol=1e-5, rtol=0)
    assert lora.is_fresh(made.model)


def test_the_reference_of_an_adapter_that_goes_on_is_what_training_began_with(adapter, tmp_path):
    """Not its bare base: the KL to where training starts is 0 at the first step."""
    how = {**RL, "algorithm": {"kl_coef": 0.1}}
    run = rolecall.rl(model=adapter[0], policy={"lora_rank": 4}, out=tmp_path / "run", **how)
    assert abs(run.metrics[0]["kl"]) < 1e-6
    assert run.outcome.exit_code == 0


def test_a_peft_object_is_as_good_as_its_directory(adapter, tmp_path):
    directory, base, _ = adapter
    carried = lora.load_adapter(load(base), directory)
    before = copy.deepcopy(carried.model.state_dict())
    how = {"policy": {"lora_rank": 4}, "optim": {"lr": 1e-2, "warmup_steps": 0}, **STEP}
    by_object = rolecall.sft(model=carried.model, tokenizer=carried.tokenizer, out=tmp_path / "object", **how)
    by_name = rolecall.sft(model=directory, out=tmp_path / "name", **how)
    assert weights(by_object) == weights(by_name)
    assert all(torch.equal(before[name], tensor) for name, tensor in carried.model.state_dict().items())


def test_every_kind_of_job_takes_an_adapter(adapter, tmp_path):
    assert rolecall.generate(model=adapter[0], prompts=["a"], sampling=SHORT)
    assert rolecall.rm(model=adapter[0], out=tmp_path / "rm", **STEP).model.is_dir()
    plain = rolecall.sft(model=adapter[0], out=tmp_path / "sft", **STEP)
    assert not (plain.model / "adapter_config.json").exists()


def test_an_adapter_whose_base_is_gone_says_so(adapter, tmp_path):
    import shutil

    moved = shutil.copytree(adapter[0], tmp_path / "moved")
    about = json.loads((moved / "adapter_config.json").read_text())
    for base, sentence in (
        ("./gone", r"on './gone': model './gone': no such directory"),
        (None, "does not name its base"),
    ):
        (moved / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": base}))
        with pytest.raises(UserError, match=sentence):
            open_model(str(moved))


# -- LoRA's settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [("q_proj", "v_proj"), ("q_proj,v_proj",)])
def test_an_adapter_is_put_on_the_targets_alone(given):
    made = open_policy("tiny", options(lora_rank=4, lora_targets=given))
    trains = {
        name.split(".lora_")[0].rpartition(".")[2] for name, p in made.model.named_parameters() if p.requires_grad
    }
    assert trains == {"q_proj", "v_proj"}


def test_the_rank_stabilised_scale():
    scale = {rs: open_policy("tiny", options(lora_rank=4, lora_alpha=8, lora_rs=rs)) for rs in (False, True)}
    scale = {
        rs: p.model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] for rs, p in scale.items()
    }
    assert scale == {False: 8 / 4, True: 8 / 2}


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ({"lora_dropout": 1.0, "lora_rank": 4}, "from 0 to below 1, got 1"),
        ({"lora_dropout": 0.1}, "give lora_rank too"),
        ({"lora_targets": ["q_proj"]}, "give lora_rank too"),
        ({"lora_alpha": 4.0}, "give lora_rank too"),
        ({"lora_rs": True}, "give lora_rank too"),
        ({"quantize": "int8"}, "give lora_rank too"),
        ({"lora_rank": 0}, "lora_rank must be at least 1"),
        ({"lora_rank": 4, "lora_targets": ["nope"]}, r"LoRA finds no layers .*nope.* it has .*q_proj"),
    ],
)
def test_lora_settings_that_cannot_be_used_are_refused(policy, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        rolecall.sft(policy=policy, out=tmp_path / "run", **STEP)
    assert not (tmp_path / "run").exists()


def test_ppo_with_an_adapter_has_a_critic_of_its_own(tmp_path):
    how = {**RL, "policy": {"lora_rank": 2}, "algorithm": {"critic": "separate"}}
    assert rolecall.rl(preset="ppo", out=tmp_path / "run", **how).outcome.exit_code == 0


def test_lora_without_peft_is_one_sentence(tmp_path):
    hidden = "import sys; sys.modules['peft'] = None; from rolecall.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["rl", "--policy.lora_rank", "4", "--steps", "1", "--out", "runs/x"]
    done = subprocess.run(
        [sys.executable, "-c", hidden, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "rolecall rl: LoRA adapters need the peft package: pip install 'rolecall[lora]'\n"
    assert not (tmp_path / "runs").exists()
