"""`netstorm check`: jobs of two ranks, as a user would start them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from netstorm import __version__
from netstorm.cli import check as command
from netstorm.cli.main import app


@pytest.mark.slow  # the other tests start each framework, too
def test_each_framework_that_is_installed_forms_the_sum_of_two_ranks():
    result = CliRunner().invoke(app, ["check", "--json"])
    checks = json.loads(result.stdout)["checks"]
    assert [(one["name"], one["ok"] or one["version"] is None, one["problem"]) for one in checks] == [
        (name, True, "") for name in ("transport", "PyTorch", "MXNet")
    ], result.stdout
    assert result.exit_code == 0


def test_what_is_missing_is_named_and_what_fails_shows_why_and_is_exit_code_1(monkeypatch):
    checks = (
        ("transport", "netstorm", command._CORE, ""),
        ("Nonesuch", "no-such-package", "", "pip install nonesuch"),
        ("Broken", "numpy", "raise SystemExit('this machine cannot')", ""),
    )
    monkeypatch.setattr(command, "_CHECKS", checks)
    result = CliRunner().invoke(app, ["check"])
    assert result.exit_code == 1
    assert f"NetStorm {__version__} (protocol " in result.stdout
    assert f"transport {__version__}: two ranks form a sum ... right, " in result.stdout
    assert "Nonesuch: not installed (pip install nonesuch)" in result.stdout
    assert "two ranks form a sum ... FAILED after " in result.stdout
    assert "this machine cannot" in result.stderr


def test_a_job_that_does_not_end_is_ended_and_said_to_have_taken_too_long(monkeypatch):
    monkeypatch.setattr(command, "_CHECKS", (("Slow", "numpy", "import time; time.sleep(600)", ""),))
    result = CliRunner().invoke(app, ["check", "--timeout", "3"])
    assert result.exit_code == 1
    assert "no sum within 3 s (--timeout)" in result.stderr
