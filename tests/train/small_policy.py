"""A policy of a few thousand weights in float64, scripted batches for it, and an updater around it."""

import dataclasses

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rolecall.config.rl import AlgorithmOptions
from rolecall.experience.batches import collate
from rolecall.maths.roles import Role, TrainRule
from rolecall.policy.heads import Critic, ScalarHead
from rolecall.policy.load import make_trainable
from rolecall.policy.model import PolicyModel
from rolecall.policy.tiny import tiny_tokenizer
from rolecall.recipes.algorithms import Coefficients, algorithm_of
from rolecall.train.step import Loss, Updater
from rolecall.types import Batch, Trajectory

VOCABULARY, WIDTH = 37, 16
GRPO = AlgorithmOptions(kl_coef=0.1, entropy_coef=0.05, old_logprobs="recompute")
PPO = AlgorithmOptions(
    name="ppo", critic="shared", kl_coef=0.1, entropy_coef=0.05, aggregate="token-mean", old_logprobs="recompute"
)


def small_model(seed: int = 0) -> LlamaForCausalLM:
    """Two layers with weights large enough that tokens differ."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    make_trainable(model)
    return model


def small_policy(*, critic: str = "none", seed: int = 0) -> PolicyModel:
    """In float64, without a critic, with one on its trunk, or with one of its own."""
    model = small_model(seed)
    if critic == "shared":
        return PolicyModel(model, value_head=ScalarHead(WIDTH, std=0.5, seed=1)).double()
    if critic == "separate":
        other = small_model(seed + 1)
        own = Critic(trunk=other.base_model, head=ScalarHead(WIDTH, std=0.5, seed=1), tokenizer=tiny_tokenizer())
        return PolicyModel(model, critic=own).double()
    return PolicyModel(model).double()


def updater(module: PolicyModel, *, token_budget: int = 10_000, lr: float = 0.0, norm: float | None = None) -> Updater:
    """SGD, so that the gradient stays where the step left it."""
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9))
    return Updater(accelerator, wrapped, optimizer, token_budget=token_budget, max_grad_norm=norm)


def scripted_batch(rows: int = 7, *, seed: int = 0) -> Batch:
    """Answers of 1 to 9 tokens behind prompts of 1 to 4, the last row without any answer, everything computed."""
    g = torch.Generator().manual_seed(seed)
    trajectories = []
    for row in range(rows):
        prompt = int(torch.randint(1, 5, (), generator=g))
        answer = 0 if row == rows - 1 else int(torch.randint(1, 10, (), generator=g))
        roles = [Role.PROMPT] * prompt + [Role.CONTENT] * answer
        if answer and row % 2:
            roles[-1] = Role.STOP
        if answer > 4:
            roles[prompt + 2] = Role.OBSERVATION  # a hole inside the answer
        trajectories.append(
            Trajectory(
                ids=tuple(torch.randint(0, VOCABULARY, (prompt + answer,), generator=g).tolist()),
                roles=tuple(int(role) for role in roles),
                behaviour_logprobs=(-1.0,) * (prompt + answer),
                group=row // 2,
            )
        )
    batch = collate(trajectories)
    shape = batch.ids.shape

    def drawn(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=g, dtype=torch.float64)

    failed = torch.zeros(rows, dtype=torch.bool)
    failed[2] = True
    verdicts = TrainRule().verdicts(batch.roles, reward_failed=failed)
    return dataclasses.replace(
        batch,
        verdicts=verdicts,
        old_logprobs=-3.6 + drawn(0.3),
        ref_logprobs=-3.6 + drawn(0.3),
        values=drawn(0.3),
        returns=drawn(1.0),
        advantages=drawn(1.0),
    )


def loss_of(options: AlgorithmOptions = GRPO, **coefficients: float) -> Loss:
    """The loss of an algorithm."""
    numbers = {"kl_coef": options.kl_coef, "entropy_coef": options.entropy_coef, "max_new_tokens": 9, **coefficients}
    return algorithm_of(options, Coefficients(**{"max_new_tokens": 4} | numbers)).loss


def gradient(module: torch.nn.Module) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in module.parameters()])
