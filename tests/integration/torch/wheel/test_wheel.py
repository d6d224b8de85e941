"""PyTorch's own tests of a backend, those that its wheel brings, over NetStorm.

docs/reference/torch-conformance.md says what is left out, and why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integration.forking import ROOT
from tests.integration.torch.wheel.program import SETUPS
from tests.integration.torch.wheel.table import QUICK, TESTS

MISSING = [name for name in ("torch", "expecttest") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

SHARE = int(os.environ.get("WHEEL_TESTS_SHARE", "5"))
"""One of so many of the claimed tests runs: all of them take ten minutes of two cores. 1: all."""

DEADLINE_S = 15
"""Longest time of a test, on the average; the program itself ends each after a minute."""


def run(folder: Path, setup: str, tests: tuple[str, ...]) -> dict[str, Any]:
    """Run tests of the wheel; return how each has ended, by name."""
    results = folder / "results"
    output = folder / "output"
    with output.open("w") as out:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.integration.torch.wheel.program", setup, str(results), *tests],
            cwd=ROOT,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=60 + DEADLINE_S * len(tests),
            check=False,
        )
    assert ended.returncode == 0, output.read_text()[-5000:]
    return {found["name"]: found for found in map(json.loads, results.read_text().splitlines())}


def check(found: dict[str, Any], tests: tuple[str, ...]) -> None:
    """Assert that tests of the wheel have run and passed."""
    assert set(found) == set(tests)
    failed = [f"{name}: {found[name]['outcome']}: {found[name]['text']}" for name in not_passed(found)]
    assert not failed, "\n\n".join(failed)


def not_passed(found: dict[str, Any]) -> list[str]:
    return [name for name, one in found.items() if one["outcome"] != "passed"]


@pytest.mark.parametrize("setup", list(QUICK))
def test_some_of_pytorchs_own_tests_pass(tmp_path, setup):
    check(run(tmp_path, setup, QUICK[setup]), QUICK[setup])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setup", list(SETUPS))
def test_pytorchs_own_tests_that_are_claimed_pass(tmp_path, setup, record_property):
    tests = TESTS[setup][::SHARE]
    found = run(tmp_path, setup, tests)
    failed = not_passed(found)
    counts = {"passed": len(found) - len(failed), "of": len(tests), "failed": failed}
    record_property("conformance", counts)  # tests.torch_record adds them up
    check(found, tests)


def test_the_quick_tests_are_some_of_all():
    assert set(TESTS) == set(SETUPS)
    assert all(set(tests) <= set(TESTS[setup]) for setup, tests in QUICK.items())
    every = [name for tests in TESTS.values() for name in tests]
    assert len(every) == len(set(every)), "a test runs in two setups"
