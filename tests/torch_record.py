"""A plugin of pytest: writes down what has run with which releases of PyTorch and Python, and how it ended.

scripts/test_torch.sh loads it. scripts/docs_reference.py makes the table in docs/guides/pytorch.md of what it
has written.
"""

from __future__ import annotations

import datetime as dt
import json
import platform
from pathlib import Path
from typing import Any, Final

import pytest

FOLDER: Final = Path(__file__).parents[1] / "docs" / "data" / "torch"

PARTS: Final = {"": "all tests", "not slow": "all but the slow tests"}
"""What ran, by the expression of `-m`."""


def pytest_configure(config: pytest.Config) -> None:
    """Record the run, in the process that hears of all results, unless it is of some tests only."""
    options = config.option
    part = PARTS.get(options.markexpr)
    partial = options.keyword or options.collectonly or getattr(options, "lf", False) or part is None
    if not hasattr(config, "workerinput") and not partial:
        config.pluginmanager.register(Recorder(part or ""), "torch-recorder")


class Recorder:
    """Counts results, and writes them when the run has ended.

    Args:
        ran: what runs, in words.
    """

    def __init__(self, ran: str) -> None:
        self._ran = ran
        self._ended: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
        self._conformance: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: at its call, or where it ended before or failed after."""
        if report.when == "call" or not report.passed:
            self._ended[report.outcome].append(report.nodeid)
        if report.when == "call":
            self._conformance += [value for name, value in report.user_properties if name == "conformance"]  # type: ignore[misc]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the record, of a run that nobody has interrupted."""
        import torch

        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        record: dict[str, Any] = {
            "pytorch": torch.__version__,
            "python": platform.python_version(),
            "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
            "ran": self._ran,
            "passed": len(self._ended["passed"]),
            "failed": sorted(set(self._ended["failed"])),
            "skipped": len(self._ended["skipped"]),
        }
        if self._conformance:
            record["conformance"] = {
                "passed": sum(one["passed"] for one in self._conformance),
                "of": sum(one["of"] for one in self._conformance),
                "failed": sorted(name for one in self._conformance for name in one["failed"]),
            }
        FOLDER.mkdir(exist_ok=True)
        release, python = record["pytorch"].partition("+")[0], ".".join(record["python"].split(".")[:2])
        path = FOLDER / f"{release}-{python}.json"
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
