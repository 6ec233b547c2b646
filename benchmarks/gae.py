"""Masked GAE against the plain loop over time, in one run: `python benchmarks/gae.py [--threads N]`.

The loop gives the same result with the same mask. The two are timed turn and turn about, so that a busy machine slows
both; the ratio of each pair is what counts. With one thread (the default) the time is CPU time, which leaves other
processes out; with more it is wall-clock time, which means something only on an idle machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rolecall.maths.returns import gae

GAMMA, LAM = 0.99, 0.95
PAIRS = 25


def loop_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """GAE one column at a time, from the last to the first; a position that does not count carries on what is behind."""
    next_value = rewards.new_zeros(len(rewards))
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        counts = mask[:, t]
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]
        next_advantage = torch.where(counts, delta + GAMMA * LAM * next_advantage, next_advantage)
        next_value = torch.where(counts, values[:, t], next_value)
        advantages[:, t] = torch.where(counts, next_advantage, 0)
    return advantages, torch.where(mask, advantages + values, 0)


def blocked_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return gae(rewards, values, mask, gamma=GAMMA, lam=LAM)


def case(batch: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Answers of random length with holes in them, as after tool calls."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, batch, steps, generator=generator)
    lengths = torch.randint(steps // 2, steps + 1, (batch, 1), generator=generator)
    mask = (torch.rand(batch, steps, generator=generator) < 0.9) & (torch.arange(steps) < lengths)
    return rewards, values, mask


def seconds(function: Callable[..., object], *arguments: Tensor) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function(*arguments)
    return clock() - start


def spread(numbers: list[float]) -> str:
    """Median and the middle half."""
    low, middle, high = statistics.quantiles(numbers, n=4)
    return f"{middle:6.2f}  [{low:.2f} .. {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    arguments = case(512, 1024)
    difference = max(
        (ours - loop).abs().max().item()
        for ours, loop in zip(blocked_gae(*arguments), loop_gae(*arguments), strict=True)
    )
    pairs = [(seconds(loop_gae, *arguments), seconds(blocked_gae, *arguments)) for _ in range(PAIRS)]
    kind = "CPU time, 1 thread" if threads == 1 else f"wall-clock time, {threads} threads"
    print(f"GAE [512, 1024] float32, {kind}, {PAIRS} pairs, median [middle half]")
    print(f"  loop        {spread([1e3 * loop for loop, _ in pairs])} ms")
    print(f"  rolecall    {spread([1e3 * ours for _, ours in pairs])} ms")
    print(f"  ratio       {spread([loop / ours for loop, ours in pairs])} times")
    print(f"  difference  {difference:.1e} at most")

    print("linear in time: [64, T]")
    sizes = {steps: case(64, steps) for steps in (256, 512, 1024, 2048, 4096)}
    rounds = [{steps: seconds(blocked_gae, *sizes[steps]) for steps in sizes} for _ in range(PAIRS + 1)][1:]
    for steps in sizes:
        taken = [1e3 * times[steps] for times in rounds]
        print(
            f"  T {steps:5}     {spread(taken)} ms   {1e6 * statistics.median(taken) / 64 / steps:5.1f} ns a position"
        )


if __name__ == "__main__":
    main()
