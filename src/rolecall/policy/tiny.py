"""The built-in model: a Llama-style network of about a million parameters that reads and writes bytes.

It is an ordinary transformers model with an ordinary fast tokenizer, made from a seed without any download. Token ids
0..255 are the bytes themselves; three special tokens follow.
"""

from math import sqrt
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD_ID, TURN_START_ID, TURN_END_ID = 256, 257, 258
"""The special tokens. The end of a turn is the one stop id."""

CONTEXT_LENGTH = 1024
"""Positions the model can attend to; one byte each."""

_SPECIAL = {PAD_ID: "<|pad|>", TURN_START_ID: "<|im_start|>", TURN_END_ID: "<|im_end|>"}

# Every message renders on its own, so the text of a conversation is always a prefix of the text of a longer one.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_INIT_STD = 0.02


def tiny_config() -> Any:
    """The configuration: 4 layers, 128 wide, 4 heads of 32, tied embeddings."""
    return LlamaConfig(
        vocab_size=256 + len(_SPECIAL),
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=TURN_END_ID,
        pad_token_id=PAD_ID,
        attn_implementation="sdpa",
    )


def tiny_model(seed: int = 0) -> Any:
    """A fresh `LlamaForCausalLM` in float32: the same seed gives the same weights, whatever the global random state.

    Matrices are drawn from N(0, 0.02²); those that write to the residual stream are smaller by sqrt(2 * layers), so
    that its size does not grow with depth.
    """
    config = tiny_config()
    with torch.random.fork_rng(devices=[]):  # building the modules draws numbers of its own
        model = LlamaForCausalLM(config).float()
    model.get_input_embeddings().padding_idx = None  # else the pad token's embedding would never learn
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)  # norms
                continue
            writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = _INIT_STD / sqrt(2 * config.num_hidden_layers) if writes_residual else _INIT_STD
            parameter.normal_(0.0, std, generator=generator)
    return model


def tiny_tokenizer() -> Any:
    """The byte tokenizer. Decoding what was encoded gives back any text, character for character."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_SPECIAL[i] for i in sorted(_SPECIAL)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_SPECIAL[PAD_ID],
        eos_token=_SPECIAL[TURN_END_ID],
        additional_special_tokens=[_SPECIAL[TURN_START_ID]],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in the vocabulary file of a byte-level tokenizer: itself where
    it is printable Latin-1, else the next free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
