"""Debian's Chromium without a window, and `netstorm dashboard` as a process beside it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

missing = [name for name in ("starlette", "uvicorn", "selenium") if find_spec(name) is None]
if BROWSER is None or DRIVER is None:
    missing.append("Debian's chromium and chromium-driver")
needs_chromium = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")

LIMIT_S = 60.0
"""For anything that should take a second: the machine may be busy."""


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """Start a browser that notes what it loads and what pages complain of."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    # Everything here is local; root has no sandbox, and a container's /dev/shm may be small.
    for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield browser
    finally:
        browser.quit()


def size(browser: Any, width: int, height: int, *, dark: bool = False) -> None:
    """Give the page a size and a colour scheme."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def open_page(browser: Any, address: str) -> float:
    """Load a page, and return after how many seconds its first view was there."""
    browser.get(address)
    shown = wait_for(lambda: browser.execute_script("return document.documentElement.dataset.shown"))
    return int(shown) / 1000


def wait_for(condition: Callable[[], Any], what: str = "the page") -> Any:
    """Wait until a condition holds, and return what it is."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no sign of {what}"
        time.sleep(0.02)
    return found


def text_of(browser: Any, css: str) -> str:
    """Return the text of an element of the page."""
    return str(browser.execute_script(f"return document.querySelector({css!r}).textContent"))


def complaints(browser: Any) -> list[str]:
    """Return what the page has complained of since the last call."""
    return [entry["message"] for entry in browser.get_log("browser")]


def requested(browser: Any) -> set[str]:
    """Return the addresses that were asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    return {one["request"]["url"] for one in asked}


@contextlib.contextmanager
def dashboard(folder: Path, *options: str) -> Iterator[str]:
    """Run `netstorm dashboard`, and yield its address; Ctrl-C ends it with exit code 0."""
    with (folder / "dashboard.out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "netstorm", "dashboard", "--port", "0", *options],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield wait_for(lambda: _address(process, folder / "dashboard.out"), "the dashboard's address")
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0, (folder / "dashboard.out").read_text()
    finally:
        process.kill()
        process.wait()


def first_update(link: str, nodes: int = 0) -> Any:
    """Return what a dashboard shows first, of a job with so many nodes, to who opens its whole address."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(link, timeout=LIMIT_S) as page:
        assert "<title>NetStorm</title>" in page.read().decode()
    with opener.open(f"{link.partition('?')[0]}events", timeout=LIMIT_S) as stream:
        for line in stream:
            # Before the scheduler has answered, there is a reason for which nothing is shown.
            update = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {}
            if len(update.get("frame", {}).get("nodes", [])) >= nodes and "frame" in update:
                return update
    raise AssertionError("the stream has ended")


def _address(process: subprocess.Popen[bytes], file: Path) -> str:
    assert process.poll() is None, file.read_text()
    found = re.search(r"netstorm dashboard: (http\S+)", file.read_text())
    return "" if found is None else found[1]
