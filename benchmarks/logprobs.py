"""Log-probs and entropies through the head: chunked and fused against full logits, forward and backward.

    python benchmarks/logprobs.py [--repeats 5] [--quick]

Time: one process, variants alternating. Memory: each variant in a fresh process; the kernel's high-water mark is reset
when the hidden states, the head and the targets exist, so what is counted is what the computation adds to them,
gradients included.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Threads that spin while they wait make every variant many times slower on a busy machine. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

from rolecall.policy.head_ops import Head
from rolecall.policy.logprobs import fused_loss, token_logprobs

ENTROPY = 0.01


def inputs(rows: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, targets and advantages of `rows` sequences of 256 tokens."""
    torch.manual_seed(0)
    n = rows * 256
    hidden = torch.randn(n, width).requires_grad_()
    weight = (torch.randn(vocab, width) * width**-0.5).requires_grad_()
    return hidden, weight, torch.randint(vocab, (n,)), torch.randn(n)


def full(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """All logits at once, the way it is usually written."""
    logprobs = (hidden @ weight.T).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    loss = -(advantages * chosen + ENTROPY * entropy).mean()
    loss.backward()
    return loss.detach()


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """`token_logprobs`."""
    chosen, entropy = token_logprobs(hidden, weight, targets)
    loss = -(advantages * chosen + ENTROPY * entropy).mean()
    loss.backward()
    return loss.detach()


def fused(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """`fused_loss`."""
    n = len(targets)

    def part(logprobs: Tensor, entropy: Tensor, values: Tensor | None, start: int, stop: int) -> Tensor:
        return -(advantages[start:stop] * logprobs + ENTROPY * entropy).sum() / n

    result = fused_loss(hidden, Head(weight=weight), targets, part, row_ends=range(256, n + 1, 256))
    result.loss.backward()
    return result.loss.detach()


VARIANTS: dict[str, Callable[..., Tensor]] = {"full": full, "token_logprobs": chunked, "fused_loss": fused}


def high_water() -> int:
    """The most memory this process has held since the mark was last reset, in bytes."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def run_for_memory(name: str, shape: tuple[int, int, int]) -> None:
    """Print what one forward and backward adds to the inputs."""
    tensors = inputs(*shape)
    hidden, weight = (torch.zeros(300, shape[1], requires_grad=True), torch.zeros(300, shape[1], requires_grad=True))
    VARIANTS[name](hidden, weight, torch.zeros(300, dtype=torch.long), torch.zeros(300))  # thread pools, code pages
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    VARIANTS[name](*tensors)
    print(high_water() - before)


def peak(name: str, options: argparse.Namespace) -> float:
    """Megabytes, measured in a fresh process."""
    command = [sys.executable, __file__, "--memory-of", name, *(["--quick"] if options.quick else [])]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1e6


def times(shape: tuple[int, int, int], repeats: int) -> dict[str, list[float]]:
    """Seconds of every variant, alternating; also checks that they agree."""
    tensors = inputs(*shape)
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repeat in range(repeats + 1):
        losses = []
        for name, variant in VARIANTS.items():
            tensors[0].grad = tensors[1].grad = None
            start = time.perf_counter()
            losses.append(variant(*tensors))
            if repeat:  # the first round warms up
                found[name].append(time.perf_counter() - start)
        torch.testing.assert_close(losses, [losses[0]] * len(losses))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the positions, one repeat")
    parser.add_argument("--memory-of", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    shape, repeats = ((1, 576, 49_152), 1) if options.quick else ((16, 576, 49_152), options.repeats)
    if options.memory_of:
        run_for_memory(options.memory_of, shape)
        return
    print(f"{shape[0]} x 256 positions, width {shape[1]}, vocabulary {shape[2]:,}, fp32, load {os.getloadavg()[0]:.1f}")
    seconds = times(shape, repeats)
    memory = {name: peak(name, options) for name in VARIANTS}
    print(
        "| variant | seconds (median) | time / full logits (median, range) | peak MB beyond the inputs | memory / full |"
    )
    print("|---|---|---|---|---|")
    for name in VARIANTS:
        ratios = sorted(a / b for a, b in zip(seconds[name], seconds["full"], strict=True))
        print(
            f"| {name} | {statistics.median(seconds[name]):.2f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) "
            f"| {memory[name]:,.0f} | {memory[name] / memory['full']:.2f} |"
        )
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
