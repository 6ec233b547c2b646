"""A real browser: Debian's chromium, driven by chromedriver, with what it logs."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys


def need_browser() -> None:
    """Without a browser these tests fail where one can be installed, and skip elsewhere."""
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return
    sentence = "chromium and chromedriver are not installed: apt-get install chromium chromium-driver"
    if os.environ.get("CI") or os.geteuid() == 0:
        pytest.fail(sentence)
    pytest.skip(sentence)


def browsers() -> Iterator["Browser"]:
    """For a fixture."""
    need_browser()
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    def __init__(self, driver) -> None:
        self.driver = driver

    def open(self, page: Path | str, *, width: int = 1200, scheme: str = "light") -> None:
        """Open a file or an address; what earlier pages logged is forgotten."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(page if isinstance(page, str) else page.absolute().as_uri())

    def until(self, holds: Callable[[], object], *, seconds: float = 60.0):
        """What `holds` returns once that is something."""
        end, found = time.monotonic() + seconds, None
        while not found:
            assert time.monotonic() < end, f"not within {seconds} s; the page says: {self.one('body').text[:2000]}"
            try:
                found = holds()
            except (StaleElementReferenceException, NoSuchElementException):  # the page changes at this moment
                found = None
            if not found:
                time.sleep(0.05)
        return found

    def complaints(self) -> list[str]:
        """What the page logged: errors, and violations of its policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def asked_for(self) -> list[str]:
        """The addresses of all requests."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def js(self, script: str, *arguments):
        return self.driver.execute_script(script, *arguments)

    def one(self, selector: str):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def press(self, key: str) -> None:
        self.driver.switch_to.active_element.send_keys(getattr(Keys, key))

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select."""
        self.js(
            "const s = document.querySelector(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event('change', {bubbles: true}))",
            selector,
            value,
        )
