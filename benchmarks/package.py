"""Install the wheel in dist/ into an empty environment for each Python there is, and try it there as a newcomer would.

    python benchmarks/package.py [3.11 3.12 3.13]

Outside of the clone, and with no compiler to be found: `rolecall --version`, `rolecall env`, `rolecall demo --quick`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13")


def main() -> int:
    (wheel,) = (ROOT / "dist").glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1000:.0f} kB")
    found = {version: interpreter(version) for version in sys.argv[1:] or VERSIONS}
    for version, python in found.items():
        if python is None:
            print(f"Python {version}: not on this machine, not tried")
        else:
            with tempfile.TemporaryDirectory() as place:
                print(f"Python {version}: works, the demo took {tried(python, wheel, Path(place)):.0f} s")
    return 0 if any(found.values()) else 1


def interpreter(version: str) -> str | None:
    """Where it is: of pyenv's, or on the path."""
    own = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python{version}"))
    return str(own[-1]) if own else shutil.which(f"python{version}")


def tried(python: str, wheel: Path, place: Path) -> float:
    """Seconds that the quick demo took; an error if a command fails."""
    subprocess.run([python, "-m", "venv", place / "env"], check=True)
    bin_ = place / "env" / "bin"
    pip = [bin_ / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, wheel], check=True)
    alone = {"PATH": str(bin_), "HOME": str(place), "LANG": os.environ.get("LANG", "C.UTF-8")}
    for words in (["--version"], ["env"]):
        subprocess.run([bin_ / "rolecall", *words], cwd=place, env=alone, check=True, stdout=subprocess.DEVNULL)
    begun = time.monotonic()
    subprocess.run([bin_ / "rolecall", "demo", "--quick"], cwd=place, env=alone, check=True)
    return time.monotonic() - begun


if __name__ == "__main__":
    sys.exit(main())
