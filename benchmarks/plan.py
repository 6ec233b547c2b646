"""How far the cost model of `rolecall plan` is off, on this CPU.

    python benchmarks/plan.py

The two shares that the model needs (of matrix products and of memory bandwidth) are measured with one model, batch and length; then
updates and sampling of other models, batches and lengths are predicted and timed. One thread, float32, the hf model for updates and the
native engine for sampling; seconds are those of this process on its core. Prints the ratio of predicted to measured seconds.
"""

import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolecall.planning.cost import Batch, Reached, Shape, decode_seconds, train_seconds
from rolecall.planning.hardware import Device
from rolecall.rollout.native import NativeEngine
from rolecall.types import Request, Sampling

SHAPES = {"a": (256, 4, 8), "b": (512, 6, 8), "c": (768, 4, 12)}
"""Width, layers and heads."""
NOMINAL = Device(flops=1e11, memory=8e9, bandwidth=2e10, source="any: the shares are measured against it")


def made(name: str) -> tuple[LlamaForCausalLM, Shape]:
    width, layers, heads = SHAPES[name]
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2, vocab_size=4096, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval(), Shape.of(config.to_dict())


def timed(work: Callable[[], object], *, times: int = 3) -> float:
    work()
    found = []
    for _ in range(times):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    return statistics.median(found)


def update(model: LlamaForCausalLM, rows: int, length: int) -> float:
    ids = torch.randint(0, 4096, (rows, length))

    def work() -> None:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()

    return timed(work)


def sampling(model: LlamaForCausalLM, rows: int, length: int) -> float:
    """Seconds of a token of every answer."""
    engine = NativeEngine(model, None, stop_ids=(), context_length=2048, max_rows=rows)
    request = Request(
        prompt_ids=tuple(range(16)),
        sampling=Sampling(max_new_tokens=length, stop_ids=()),
        n=rows,
        prompt=0,
        seed=0,
        step=0,
    )
    return timed(lambda: engine.generate([request])) / length


def batch(rows: int, length: int) -> Batch:
    return Batch(answers=rows, prompt=0.0, answer=float(length), longest=float(length), recompute=False, scoring=0)


def main() -> None:
    torch.set_num_threads(1)
    nominal = Reached(products=1.0, bandwidth=0.5)  # weights are read as 4 bytes here, and the model counts 2
    model, shape = made("a")
    share = train_seconds(shape, batch(8, 128), NOMINAL, gpus=1, reached=nominal) / update(model, 8, 128)
    read = decode_seconds(shape, NOMINAL, growing=1, context=80, gpus=1, reached=nominal) / sampling(model, 1, 128)
    reached = Reached(products=share, bandwidth=0.5 * read)
    print(f"calibrated on a: {share * NOMINAL.flops / 1e9:.1f} GFLOP/s, {read * NOMINAL.bandwidth / 1e9:.1f} GB/s")
    ratios = []
    for name, rows, length in (("a", 16, 64), ("b", 8, 128), ("b", 4, 512), ("c", 8, 128), ("c", 16, 256)):
        model, shape = made(name)
        predicted = train_seconds(shape, batch(rows, length), NOMINAL, gpus=1, reached=reached)
        measured = update(model, rows, length)
        ratios.append(predicted / measured)
        print(
            f"update   {name} {rows:3} x {length:3}: predicted {predicted:.3f} s, measured {measured:.3f} s, {ratios[-1]:.2f}"
        )
    for name, rows, length in (("b", 1, 64), ("b", 8, 64), ("c", 1, 64), ("c", 32, 64)):
        model, shape = made(name)
        predicted = decode_seconds(shape, NOMINAL, growing=rows, context=16 + length / 2, gpus=1, reached=reached)
        measured = sampling(model, rows, length)
        ratios.append(predicted / measured)
        print(
            f"sampling {name} {rows:3} rows: predicted {predicted * 1e3:.2f} ms, measured {measured * 1e3:.2f} ms a token, "
            f"{ratios[-1]:.2f}"
        )
    print(f"predicted / measured: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
