"""Screenshots of a demo's report for the documentation: `python benchmarks/screenshot_report.py runs/demo-1 [docs]`.

Needs Debian's chromium and chromium-driver, and the `dev` extra.
"""

import base64
import shutil
import sys
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

_FOCUS = """
const view = document.querySelector("#grpo-tokens .view");
const colour = view.querySelector(".bar label:nth-child(2) select");
colour.value = "advantage";
colour.dispatchEvent(new Event("change"));
view.querySelectorAll(".strip .tok.t")[3].focus({preventScroll: true});
"""
SHOTS = (
    ("report-tokens.png", 1200, "light", "grpo-tokens", 900, _FOCUS),
    ("report-curves.png", 1200, "dark", "ppo-curves", 620, ""),
)
"""File, width, colour scheme, section, height, and what to do first."""


def main(run: Path, folder: Path) -> None:
    """Take them all."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        for name, width, scheme, section, height, first in SHOTS:
            picture = _shot(driver, run / "report.html", width, scheme, section, height, first)
            (folder / name).write_bytes(picture)
            print(f"{folder / name}: {len(picture) / 1e3:.0f} kB")
    finally:
        driver.quit()


def _shot(driver: Any, page: Path, width: int, scheme: str, section: str, height: int, first: str) -> bytes:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get(page.absolute().as_uri())
    driver.execute_script(first)
    top = driver.execute_script("return document.getElementById(arguments[0]).getBoundingClientRect().top", section)
    clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
    how = {"format": "png", "captureBeyondViewport": True, "clip": clip}
    return base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", how)["data"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "docs"))
