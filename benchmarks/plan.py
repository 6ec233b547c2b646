"""How far the cost model of `rolecall plan` is off, on this CPU.

    python benchmarks/plan.py [--page]

The two shares that the model needs (of matrix products and of memory bandwidth) are measured with one model, batch and length; then
updates and sampling of other models, batches and lengths are predicted and timed, and steps of whole runs of `rolecall rl`. One thread,
float32, the native engine for sampling, the hf model for updates that are timed alone; seconds are those of this process on its core
(of runs, by the clock). Prints the ratio of predicted to measured seconds; `--page` puts it into docs/plan.md.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ahead import letters
from in_page import put
from transformers import LlamaConfig, LlamaForCausalLM

import rolecall
from rolecall.experience.store import read_rollouts
from rolecall.planning.cost import Batch, Reached, Shape, decode_seconds, generate_seconds, train_seconds
from rolecall.planning.hardware import Device
from rolecall.policy.tiny import tiny_tokenizer
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


STEPS = 4


def whole_run(model: LlamaForCausalLM, *, prompts: int, samples: int, length: int) -> tuple[Batch, float]:
    """(what a step of a run sampled and trained on, on average; seconds of a step, without the first)."""
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(f"{place}/model")
        tiny_tokenizer().save_pretrained(f"{place}/model")
        out = Path(place) / "run"
        rolecall.rl(
            model=f"{place}/model", rows="addition", reward=letters, prompts=prompts, samples=samples, steps=STEPS, out=str(out),
            quiet=True, **{"sampling.max_new_tokens": length, "save.every": 0},
        )  # fmt: skip
        lines = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()][1:]
        steps = [read_rollouts(out / "rollouts" / f"step-{n:06d}.parquet").trajectories for n in range(2, STEPS + 1)]
    answers = [sum(t.sampled) for step in steps for t in step]
    found = Batch(
        answers=prompts * samples,
        prompt=statistics.mean(len(t.ids) - sum(t.sampled) for step in steps for t in step),
        answer=statistics.mean(answers),
        longest=statistics.mean(max(sum(t.sampled) for t in step) for step in steps),
        same_prompt=samples,
        scoring=0,  # one optimiser step for each rollout: nothing is scored before
        recompute=False,
    )
    return found, statistics.mean(line["step_time"] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="put the figures into docs/plan.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    nominal = Reached(products=1.0, bandwidth=0.5)  # weights are read as 4 bytes here, and the model counts 2
    model, shape = made("a")
    share = train_seconds(shape, batch(8, 128), NOMINAL, gpus=1, reached=nominal) / update(model, 8, 128)
    read = decode_seconds(shape, NOMINAL, growing=1, context=80, gpus=1, reached=nominal) / sampling(model, 1, 128)
    reached = Reached(products=share, bandwidth=0.5 * read)
    how = {"gpus": 1, "reached": reached}
    said = f"Calibrated on a: {share * NOMINAL.flops / 1e9:.1f} GFLOP/s, {read * NOMINAL.bandwidth / 1e9:.1f} GB/s."
    print(said, flush=True)
    rows, ratios = ["| | model | | predicted | measured | predicted / measured |", "|---|---|---|---|---|---|"], []

    def compared(what: str, name: str, size: str, predicted: float, measured: float) -> None:
        ratios.append(predicted / measured)
        rows.append(f"| {what} | {name} | {size} | {predicted:.3g} s | {measured:.3g} s | {ratios[-1]:.2f} |")
        print(rows[-1], flush=True)

    for name, count, length in (("a", 16, 64), ("b", 8, 128), ("b", 4, 512), ("c", 8, 128), ("c", 16, 256)):
        model, shape = made(name)
        predicted = train_seconds(shape, batch(count, length), NOMINAL, **how)
        compared("an update", name, f"{count} x {length} tokens", predicted, update(model, count, length))
    for name, count, length in (("b", 1, 64), ("b", 8, 64), ("c", 1, 64), ("c", 32, 64)):
        model, shape = made(name)
        predicted = decode_seconds(shape, NOMINAL, growing=count, context=16 + length / 2, **how)
        compared("a token of every answer", name, f"{count} at a time", predicted, sampling(model, count, length))
    for name, prompts, samples, length in (("a", 4, 8, 64), ("b", 4, 8, 64), ("c", 4, 4, 128)):
        model, shape = made(name)
        one, measured = whole_run(model, prompts=prompts, samples=samples, length=length)
        predicted = max(generate_seconds(shape, one, NOMINAL, **how)) + train_seconds(shape, one, NOMINAL, **how)
        compared("a step of a run", name, f"{prompts} x {samples} answers, up to {length} tokens", predicted, measured)
    said += (
        f" Predicted / measured: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}."
    )
    print(said)
    if given.page:
        models = ", ".join(f"{name} {w} wide with {layers} layers" for name, (w, layers, _) in SHAPES.items())
        head = f"`python benchmarks/plan.py --page`, {time.strftime('%Y-%m-%d')}. Models: {models}. {said}"
        put("plan.md", "plan", head + "\n\n" + "\n".join(rows))


if __name__ == "__main__":
    main()
