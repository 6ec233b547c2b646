"""Sampling speed: the native engine against transformers' generate, same weights, same dtype, no stop ids.

    python benchmarks/generate.py [--repeats 5] [--quick]

Runs alternate (ours, theirs, ours, …) because a shared machine's speed swings from minute to minute: only ratios of
neighbours mean anything. transformers runs at its best: sampling on, the faster of its dynamic and static caches.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

# Threads that spin while they wait make every variant many times slower on a busy machine. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolecall.policy.load import cast_weights, load, make_trainable
from rolecall.rollout.native import NativeEngine
from rolecall.types import Request, Sampling

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from smollm2 import smollm2_path

ROWS, PROMPT = 32, 32


def small_llama():
    """4 layers, 256 wide, vocabulary 4,096, random weights."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    make_trainable(model)
    return model


def requests(vocabulary: int, new: int, step: int) -> list[Request]:
    """32 different prompts, so that no prompt is shared: the comparison is of the loops."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, vocabulary, (ROWS, PROMPT), generator=generator).tolist()
    sampling = Sampling(max_new_tokens=new, stop_ids=())
    return [Request(prompt_ids=tuple(row), sampling=sampling, prompt=i, step=step) for i, row in enumerate(ids)]


def theirs(model, batch: list[Request], new: int, cache: str | None) -> None:
    """transformers' generate on the same prompts."""
    ids = torch.tensor([r.prompt_ids for r in batch])
    extra = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=new,
            min_new_tokens=None,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
            **extra,
        )
    assert out.shape == (ROWS, PROMPT + new)


def seconds(run, *arguments) -> float:
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


def compare(name: str, model, dtype: torch.dtype, new: int, repeats: int) -> float:
    """Print one line of the table; the median ratio."""
    model = cast_weights(model, dtype)
    model.generation_config.eos_token_id = None
    engine = NativeEngine(model, None, stop_ids=(), context_length=1024, max_rows=ROWS)
    vocabulary = model.config.vocab_size
    engine.generate(requests(vocabulary, 4, 0))
    caches: list[str | None] = [None, "static"]
    trial = {}
    for cache in caches:
        theirs(model, requests(vocabulary, 4, 0), 4, cache)
        trial[cache] = seconds(theirs, model, requests(vocabulary, 24, 1), 24, cache)
    best = min(caches, key=trial.__getitem__)
    ours_s, theirs_s = [], []
    for step in range(repeats):
        batch = requests(vocabulary, new, step)
        ours_s.append(seconds(engine.generate, batch))
        theirs_s.append(seconds(theirs, model, batch, new, best))
    tokens = ROWS * new
    ratios = sorted(t / o for o, t in zip(ours_s, theirs_s, strict=True))
    print(
        f"| {name} | {str(dtype).removeprefix('torch.')} | {tokens / statistics.median(ours_s):,.0f} "
        f"| {tokens / statistics.median(theirs_s):,.0f} ({best or 'dynamic'} cache) "
        f"| {statistics.median(ratios):.2f} | {ratios[0]:.2f}-{ratios[-1]:.2f} |",
        flush=True,
    )
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the small model only, 32 new tokens, one repeat")
    parser.add_argument("--only", choices=("small", "smollm2"), help="one of the two models")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    new, repeats = (32, 1) if options.quick else (128, options.repeats)
    print(
        f"{ROWS} x ({PROMPT} + {new}) tokens, {options.threads} threads, {repeats} repeats, load {os.getloadavg()[0]:.1f}"
    )
    print("| model | dtype | native tok/s | transformers tok/s | median ratio | range |\n|---|---|---|---|---|---|")
    ratios = []
    for dtype in (torch.float32, torch.bfloat16):
        if options.only != "smollm2":
            ratios.append(compare("4 x 256, vocabulary 4,096", small_llama(), dtype, new, repeats))
        if options.only != "small" and not options.quick:
            ratios.append(compare("SmolLM2-135M", load(smollm2_path()).model, dtype, new, repeats))
    print(f"load {os.getloadavg()[0]:.1f}; smallest median ratio {min(ratios):.2f} (wanted: 2)")


if __name__ == "__main__":
    main()
