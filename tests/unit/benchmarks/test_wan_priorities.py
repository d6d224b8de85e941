"""The study of two real jobs with priorities: what it starts, and what it makes of their rounds."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("studies.wan_priorities")


def test_only_the_turn_with_priorities_gives_numbers_and_the_timed_job_has_the_larger(study: Any) -> None:
    given = {
        name: [job and job.get("NETSTORM_JOB_PRIORITY") for job in jobs] for name, jobs in study.TURNS.items()
    }
    assert {name: any(numbers) for name, numbers in given.items()} == {
        "alone": False,
        "fair": False,
        "priority": True,
    }
    first, second = given["priority"]
    assert int(first) > int(second)
    assert study.TURNS["alone"][1] is None


def test_the_table_has_medians_over_all_turns_and_their_part_of_those_alone(study: Any) -> None:
    rounds = {"alone": ([1.0, 1.0], [3.0]), "fair": ([2.0], [4.0]), "priority": ([1.0, 2.0], [9.0])}
    rows = [{"what": name, "rounds_s": times} for name, turns in rounds.items() for times in turns]
    assert study.table(rows).splitlines() == [
        "alone        1.00 s a round, 1.00 of alone",
        "fair         3.00 s a round, 3.00 of alone",
        "priority     2.00 s a round, 2.00 of alone",
    ]
