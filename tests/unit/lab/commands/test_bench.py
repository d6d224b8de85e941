"""`netstorm bench` becomes the script of a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from netstorm.cli.main import app
from netstorm.lab.commands import bench as command

SCRIPTS = Path(__file__).parents[4] / "benchmarks"


@pytest.fixture
def became(monkeypatch):
    """What it would have become."""
    found: list[list[str]] = []
    monkeypatch.setattr(command, "_become", found.append)
    return found


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


def test_everything_behind_the_name_is_the_benchmarks_own(became):
    result = run("wan", "net.yaml", "--sizes", "4MB", "--json", "x.json", "--help")
    assert result.exit_code == 0, result.output
    assert became == [
        [sys.executable, str(SCRIPTS / "wan.py"), "net.yaml", "--sizes", "4MB", "--json", "x.json", "--help"]
    ]


def test_an_unknown_benchmark_is_a_usage_error_that_names_those_there_are(became):
    result = run("wam")
    assert result.exit_code == 2
    assert "'wam'" in result.stderr
    assert "did you mean wan? There are " in result.stderr
    assert became == []


def test_modules_that_are_no_scripts_are_no_benchmarks(became):
    assert run("worker").exit_code == 2


def test_without_a_checkout_it_says_what_to_do(became, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "__file__", str(tmp_path / "a" / "b" / "c" / "bench.py"))
    monkeypatch.chdir(tmp_path)
    result = run("wan")
    assert result.exit_code == 2
    assert "checkout" in result.stderr
    assert "git clone" in result.stderr
