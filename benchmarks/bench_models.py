"""The models and prompts of the benchmarks, as directories that every peer can load.

Their end-of-sequence token is one that is as good as never drawn, so that answers have the length a benchmark gives them.
"""

import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rolecall.policy.load import load

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from smollm2 import smollm2_path

PLACE = Path(__file__).parents[1] / "runs" / "bench"
SMALL_VOCABULARY = 4096


def smollm2() -> str:
    """SmolLM2-135M-Instruct."""
    place = PLACE / "models" / "smollm2"
    if not (place / "tokenizer_config.json").is_file():
        loaded = load(smollm2_path())
        tokenizer = loaded.tokenizer
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(16)  # a marker of source files
        loaded.model.generation_config.eos_token_id = loaded.model.config.eos_token_id = tokenizer.eos_token_id
        loaded.model.save_pretrained(place)
        tokenizer.save_pretrained(place)
    return str(place)


def small(vocabulary: int = SMALL_VOCABULARY) -> str:
    """4 layers, 256 wide, random weights; its words are w3, w4, …"""
    place = PLACE / "models" / f"small-{vocabulary}"
    if not (place / "tokenizer_config.json").is_file():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
        model = LlamaForCausalLM(config)
        model.save_pretrained(place)
        named = {0: "<pad>", 1: "<eos>", 2: "<unk>"}
        words = Tokenizer(models.WordLevel({named.get(i, f"w{i}"): i for i in range(vocabulary)}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=1024
        ).save_pretrained(place)
    return str(place)


def prompts(directory: str, count: int, length: int, *, seed: int = 0) -> list[str]:
    """Texts of exactly so many tokens."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    drawn = random.Random(seed)
    if directory.endswith("smollm2"):
        tokens = tokenizer.convert_ids_to_tokens(list(range(1000, 8000)))
        words = [" " + token[1:] for token in tokens if token[0] == "Ġ" and token[1:].isascii() and token[1:].isalpha()]
        words = [word for word in words if len(tokenizer(word)["input_ids"]) == 1]
        texts = ["".join(drawn.choices(words, k=length)) for _ in range(count)]
    else:
        texts = [" ".join(f"w{drawn.randrange(3, SMALL_VOCABULARY)}" for _ in range(length)) for _ in range(count)]
    assert {len(tokenizer(text)["input_ids"]) for text in texts} == {length}, "prompts have another number of tokens"
    return texts
