"""Screenshots of `rolecall view` for the documentation: `python benchmarks/screenshot_view.py [docs]`.

Makes an audit, a short imitation and runs with different seeds, opens their pages, and takes pictures in light and dark, wide and narrow.
Needs Debian's chromium and chromium-driver, and the `dev` and `view` extras.
"""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from shlex import split
from typing import Any

import pyarrow.parquet as pq
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CALL = [sys.executable, "-m", "rolecall"]
TRAIN = split(
    "rl --preset grpo --model runs/start --rows sorting:length=3 --steps 60 --prompts 8 --samples 8 --optim.lr 3e-4 "
    "--sampling.max_new_tokens 6 --eval.every 20 --eval.rows 64"
)
_COLOUR = """
const colour = document.querySelector(".bar label:nth-child(2) select");
colour.value = "advantage";
colour.dispatchEvent(new Event("change"));
document.querySelectorAll(".strip .tok.t")[1].focus({preventScroll: true});
"""
SHOTS = (
    ("view-runs.png", "/", 1600, "light", 520, ""),
    ("view-run.png", "/run/{last}", 1600, "dark", 900, ""),
    ("view-answer.png", "/run/{first}/answers/{step}/{row}", 1600, "light", 760, _COLOUR),
    ("view-compare.png", "/compare?run={first}&run={second}&run={third}&run={other}", 1600, "light", 760, ""),
    ("view-narrow.png", "/run/{last}", 400, "light", 860, ""),
    ("view-narrow-dark.png", "/", 400, "dark", 860, ""),
)
"""File, address, width, colour scheme, height, and what to do first."""


def main(folder: Path) -> None:
    """Make the runs, take all pictures."""
    with tempfile.TemporaryDirectory() as place:
        names = make(Path(place))
        still = [*CALL, *TRAIN, "--steps", "4000", "--seed", "9", "--out", f"runs/{names['last']}", "--quiet"]
        training = subprocess.Popen(still, cwd=place, stderr=subprocess.DEVNULL)
        server = subprocess.Popen([*CALL, "view", "runs", "--port", "0"], cwd=place, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", server.stdout.readline())
            assert found is not None
            log = Path(place) / "runs" / names["last"] / "metrics.jsonl"
            while not log.is_file() or log.read_text().count("\n") < 40:
                time.sleep(0.5)
            take(folder, found[1], found[2], names | telling(Path(place) / "runs" / names["first"]))
        finally:
            for process in (training, server):
                process.send_signal(signal.SIGINT)
                process.wait()


def make(place: Path) -> dict[str, str]:
    """The runs that are shown, by what they are for."""
    start = split("sft --model tiny --rows sorting:length=3 --steps 50 --batch 32 --optim.lr 3e-3")
    subprocess.run([*CALL, *start, "--out", "runs/start", "--quiet"], cwd=place, check=True)
    subprocess.run([*CALL, "audit", *TRAIN[1:], "--quiet"], cwd=place, check=False)
    names = {
        "first": "grpo-seed-1",
        "second": "grpo-seed-2",
        "third": "grpo-seed-3",
        "other": "ppo,lr=3e-4",
        "last": "live",
    }
    for seed, which in enumerate(("first", "second", "third"), 1):
        words = [*CALL, *TRAIN, "--seed", str(seed), "--out", f"runs/{names[which]}", "--quiet"]
        subprocess.run(words, cwd=place, check=True)
    words = [*CALL, *TRAIN, "--preset", "ppo", "--out", f"runs/{names['other']}", "--quiet"]
    subprocess.run(words, cwd=place, check=True)
    return names


def telling(run: Path) -> dict[str, str]:
    """An answer that is better than others of its group, in the last recorded step that has one."""
    for path in sorted((run / "rollouts").iterdir(), reverse=True):
        held = pq.read_table(path, columns=["group", "score"]).to_pylist()
        for row, one in enumerate(held):
            others = [other["score"] for other in held if other["group"] == one["group"]]
            if one["score"] > sum(others) / len(others):
                return {"step": str(int(path.stem.removeprefix("step-"))), "row": str(row)}
    raise SystemExit("all groups are flat; train longer")


def take(folder: Path, base: str, token: str, names: dict[str, str]) -> None:
    """All pictures."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.get(f"{base}/?token={token}")
        for name, path, width, scheme, height, first in SHOTS:
            shot(driver, base + path.format(**names), width, scheme, height, first)
            driver.save_screenshot(str(folder / name))
            print(f"{folder / name}: {(folder / name).stat().st_size / 1e3:.0f} kB")
    finally:
        driver.quit()


def shot(driver: Any, address: str, width: int, scheme: str, height: int, first: str) -> None:
    """Open an address as somebody would see it."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get(address)
    time.sleep(3)
    driver.execute_script(first)
    time.sleep(0.3)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
