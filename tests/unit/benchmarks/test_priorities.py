"""The study of priorities: its simulation on virtual time, and what it makes of measured turns."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from netstorm.topology.network import Network


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The study, and its PyTorch side."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    names = ("priorities", "torch_priorities", "job_priorities")
    return SimpleNamespace(**{name: importlib.import_module(f"studies.{name}") for name in names})


def test_a_step_is_shorter_if_first_layers_go_first_and_the_forward_pass_does_not_wait_for_all(
    studies: Any, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    arguments = ["--rates-scale", ".25", "--compute", "1.5", "--steps", "4", "--network"]
    assert studies.priorities.main([*arguments, str(_pair()), "--json", str(file)]) == 0
    rows = {row["order"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["first"]["step_s"] < 0.97 * rows["wait"]["step_s"]
    assert (rows["first"]["early_share"], rows["wait"]["early_share"]) == (1.0, 0.0)


def test_the_slowest_rank_counts_and_ratios_are_those_of_the_same_turn(studies: Any) -> None:
    ddp, small, scheduled = studies.torch_priorities.SYSTEMS

    def answer(slower: float, digest: str) -> dict[str, Any]:
        turns = {ddp: [4.0, 8.0 + slower, 6.0], small: [4.0, 8.0, 6.0], scheduled: [2.0, 6.0, 3.0]}
        return {"turns": turns, "digests": {ddp: "same", scheduled: digest}}

    rows = studies.torch_priorities.rows_of([answer(0.0, "same"), answer(4.0, "same")], 2, 0.5)
    assert [row["step_s"] for row in rows] == [3.0, 3.0, 1.5]
    assert rows[2]["of_ddp_by_turn"] == [0.5, 0.5, 0.5]
    assert rows[2]["same_weights"] is True
    [*_, last] = studies.torch_priorities.rows_of([answer(0.0, "same"), answer(0.0, "other")], 2, 0.5)
    assert last["same_weights"] is False


def _pair() -> Path:
    return Path(__file__).parents[3] / "examples" / "networks" / "pair.yaml"


def test_the_job_of_the_highest_priority_ends_earlier_than_under_fair_shares(studies: Any) -> None:
    network = Network.uniform(3, rate=10e6, latency=0.01)

    def spans(*priorities: int) -> list[float]:
        found: list[float] = studies.job_priorities.makespans(
            network, [200_000] * 2, priorities, topology="star", rounds=4, seed=1
        )
        return found

    fair, ordered = spans(0, 0), spans(1, 2)
    assert ordered[1] < 0.9 * fair[1]
    assert ordered[1] < ordered[0] < 1.1 * fair[0]
