"""GPUs by name: what their makers say of them. `source` is the maker's sheet; docs/plan.md says which pages each number was compared
with."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device, as its data sheet has it."""

    flops: float
    """Dense matrix products in bfloat16, per second."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes of its memory read per second."""
    source: str


def _device(tera_flops: float, gigabytes: float, terabytes_s: float, source: str) -> Device:
    return Device(flops=tera_flops * 1e12, memory=gigabytes * 1e9, bandwidth=terabytes_s * 1e12, source=source)


DEVICES = {
    "b200": _device(2250, 180, 8.0, "NVIDIA DGX B200 data sheet"),
    "h200": _device(989, 141, 4.8, "NVIDIA H200 data sheet (SXM)"),
    "h100": _device(989, 80, 3.35, "NVIDIA H100 data sheet (SXM)"),
    "a100-80": _device(312, 80, 2.039, "NVIDIA A100 data sheet (SXM, 80 GB)"),
    "a100-40": _device(312, 40, 1.555, "NVIDIA A100 data sheet (40 GB)"),
    "l40s": _device(362, 48, 0.864, "NVIDIA L40S data sheet"),
    "a10": _device(125, 24, 0.6, "NVIDIA A10 data sheet"),
    "l4": _device(121, 24, 0.3, "NVIDIA L4 data sheet"),
    "rtx4090": _device(165, 24, 1.008, "NVIDIA Ada GPU architecture white paper"),
    "mi300x": _device(1307, 192, 5.3, "AMD Instinct MI300X data sheet"),
}
"""By the names that `--gpu` takes."""
