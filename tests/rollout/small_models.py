"""Small random models that behave like grown ones, and the trainer's view of what an engine sampled."""

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rolecall.policy.load import cast_weights, make_trainable
from rolecall.policy.logprobs import token_logprobs
from rolecall.policy.tiny import tiny_tokenizer
from rolecall.rollout.hf import HFEngine
from rolecall.rollout.native import NativeEngine
from rolecall.types import Request, Sampling

VOCABULARY, CONTEXT = 300, 160
STOP = 258

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": STOP,
    "pad_token_id": STOP,  # as in many models: no engine may care
    "attn_implementation": "sdpa",
}

FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=True)),
    "llama-biases": lambda: LlamaForCausalLM(
        LlamaConfig(
            **_SHAPE,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
            rope_parameters={  # the one here that scales what it rotates
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 8.0,
                "original_max_position_embeddings": 20,
            },
        )
    ),
    "llama-rope3": lambda: LlamaForCausalLM(
        LlamaConfig(
            **_SHAPE,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 40,
            },
        )
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=32)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SHAPE, head_dim=24, sliding_window=None)),
}


def small_model(family="llama", *, dtype=torch.float32, seed=0):
    """A random model of a family whose answers are neither constant nor noise: large weights, uneven norms, biases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[family]() if family != "gpt2" else _gpt2()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.3)
                elif "norm" in name or "ln_" in name:
                    parameter.normal_(1.0, 0.2)
                else:
                    parameter.normal_(
                        0.0, 0.3 if parameter.shape[0] == VOCABULARY else 1.5 * parameter.shape[1] ** -0.5
                    )
    make_trainable(model)
    return cast_weights(model, dtype)


def _gpt2():
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=STOP
    )
    return GPT2LMHeadModel(config)


def native(model, **options):
    """The native engine on a small model."""
    return NativeEngine(model, tiny_tokenizer(), **{"stop_ids": (STOP,), "context_length": CONTEXT} | options)


def hf(model, **options):
    """The hf engine on a small model."""
    return HFEngine(model, tiny_tokenizer(), **{"stop_ids": (STOP,), "context_length": CONTEXT} | options)


ENGINES = {"native": native, "hf": hf}


def prompt(length, *, start=7):
    """A prompt of that many different-looking tokens."""
    return tuple((start + 37 * i + i * i) % 256 for i in range(length))


def ragged_requests(lengths=(5, 1, 17, 9), *, n=3, **sampling):
    """One request per prompt length, n samples each."""
    settings = Sampling(**{"max_new_tokens": 16} | sampling)
    return [
        Request(prompt_ids=prompt(length, start=3 * i), sampling=settings, n=n, prompt=i, seed=5)
        for i, length in enumerate(lengths)
    ]


@torch.no_grad()
def trainer_logprobs(model, prompt_ids, ids, temperature):
    """What training computes: trunk hidden states of the whole sequence, then `token_logprobs` at t - 1 for token t."""
    sequence = torch.tensor([[*prompt_ids, *ids]])
    hidden = model.get_decoder()(sequence).last_hidden_state[0, len(prompt_ids) - 1 : -1]
    head = model.get_output_embeddings()
    scores = token_logprobs(hidden, head.weight, torch.tensor(ids), temperature=temperature, bias=head.bias)
    return scores.logprobs


@torch.no_grad()
def kept_mass(model, request, completion):
    """log of the probability of all that could be drawn in each token's place, by what the engine has recorded."""
    sequence = torch.tensor([[*request.prompt_ids, *completion.ids]])
    logits = model(sequence).logits[0, len(request.prompt_ids) - 1 : -1] / request.sampling.temperature
    kept = [torch.frombuffer(bytearray(ids), dtype=torch.int32).long() for ids in completion.supports]
    return torch.stack([row.log_softmax(-1)[ids].logsumexp(-1) for row, ids in zip(logits, kept, strict=True)])


def gaps(model, requests, completions):
    """|behaviour log-prob - the trainer's| of every sampled token; where sampling cuts the vocabulary, among what is left."""
    by_prompt = {r.prompt: r for r in requests}
    found = []
    for c in completions:
        r = by_prompt[c.prompt]
        expected = trainer_logprobs(model, r.prompt_ids, c.ids, r.sampling.temperature)
        if c.supports is not None:
            expected = expected - kept_mass(model, r, c)
        found.append((torch.tensor(c.behaviour_logprobs, dtype=expected.dtype) - expected).abs())
    return torch.cat(found)
