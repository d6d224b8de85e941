"""Takes the pictures of the dashboard in docs/images, of a simulated job, with Debian's Chromium.

    python -m scripts.dashboard_screenshots [--out FOLDER]

Needs the extra dev, and the Debian packages chromium and chromium-driver.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from PIL import Image

from netstorm.dashboard.page import report
from netstorm.dashboard.recording import StatusRecorder, page_data
from netstorm.lab.testing.watched_job import watch_a_job
from netstorm.topology.files import load_network
from tests.integration.dashboard.chromium import open_browser, open_page, size, wait_for

ROOT: Final = Path(__file__).resolve().parents[1]
_MOST_BYTES: Final = 150_000


def main() -> int:
    """Take the pictures; return the exit code."""
    parser = argparse.ArgumentParser(description="Take the pictures of the dashboard.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures")
    out: Path = parser.parse_args().out
    with tempfile.TemporaryDirectory() as scratch:
        recording, page = Path(scratch, "job.jsonl"), Path(scratch, "job.html")
        recorder = StatusRecorder(recording, 10**8)
        watch_a_job(load_network(ROOT / "examples/networks/internet2.yaml"), recorder.add)
        recorder.close()
        page.write_text(report(page_data(recording)), encoding="utf-8")
        with open_browser() as browser:
            take(browser, page, out / "dashboard-light.png", (1280, 800), before=_point_at_a_link)
            take(browser, page, out / "dashboard-dark.png", (1280, 800), dark=True)
            take(browser, page, out / "dashboard-tables.png", (1280, 800), before=_scroll_to_the_tables)
            take(browser, page, out / "dashboard-phone.png", (390, 844), dark=True)
    return 0


def take(
    browser: Any,
    page: Path,
    path: Path,
    wide_and_high: tuple[int, int],
    *,
    dark: bool = False,
    before: Callable[[Any], None] | None = None,
) -> None:
    """Take a picture of the page's first screen.

    Args:
        browser: takes it.
        page: a report.
        path: of the picture.
        wide_and_high: its size.
        dark: the colour scheme.
        before: what is done on the page first.
    """
    size(browser, *wide_and_high, dark=dark)
    open_page(browser, page.as_uri())
    if before is not None:
        before(browser)
    wait_for(lambda: browser.execute_async_script("requestAnimationFrame(() => arguments[0](true))"))
    picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    # 256 colours are enough for a page, and a third of the bytes.
    image = Image.open(io.BytesIO(base64.b64decode(picture["data"]))).convert("RGB")
    image.quantize(256).save(path, optimize=True)
    found = path.stat().st_size
    print(f"{path.name}: {found} bytes")
    if found > _MOST_BYTES:
        raise SystemExit(f"{path}: {found} bytes: expected at most {_MOST_BYTES}")


def _point_at_a_link(browser: Any) -> None:
    browser.execute_script("map.hover({ source: 4, target: 6 });")


def _scroll_to_the_tables(browser: Any) -> None:
    browser.execute_script("document.getElementById('nodes-card').scrollIntoView();")


if __name__ == "__main__":
    sys.exit(main())
