"""What this machine can do at most: matrix products and memory, measured now. `python benchmarks/limits.py`."""

import functools
import json
import os
import sys
import time
from pathlib import Path

from turns import environment

if __name__ == "__main__" and "BENCH_CHILD" not in os.environ:  # threads and allocator are read when Python starts
    os.execve(sys.executable, [sys.executable, *sys.argv], environment() | {"BENCH_CHILD": "1"})

import torch


def _best(run, repeats: int = 8) -> float:
    run()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


@functools.cache
def limits() -> dict[str, float]:
    """Floating point operations per second of large matrix products by dtype, and bytes read per second."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
        found[str(dtype).removeprefix("torch.")] = 2 * 2048**3 / _best(lambda a=a, b=b: a @ b)
    x = torch.randn(2**27)
    found["read"] = x.nbytes / _best(x.sum)
    return found


if __name__ == "__main__":
    found = Path(__file__).parents[1] / "runs" / "bench" / "limits.json"
    found.parent.mkdir(parents=True, exist_ok=True)
    found.write_text(json.dumps(limits()))
    for name, value in limits().items():
        print(f"{name}: {value / 1e9:,.0f} {'GB/s' if name == 'read' else 'GF/s'}")
