"""The study of staleness with trees: its model holds the bound, and its rules send what they say."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from netstorm.topology.network import generate

NETWORK = generate("internet2", 6, 41)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("studies.tree_staleness")


def ran(study: Any, name: str, bound: int) -> dict[str, Any]:
    rules = next(one for one in (*study.ENTRANTS, study.ROUNDS) if one.name == name)
    load = study.Load(bound=bound, model=4_000_000, block=1_000_000, clocks=10, compute=0.5)
    found: dict[str, Any] = study.run(NETWORK, rules, load, 41)
    return found


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_gradient_s_weights_lack_more_clocks_than_the_bound(study: Any, bound: int) -> None:
    for rules in study.ENTRANTS:
        assert ran(study, rules.name, bound)["most_missing"] <= bound, rules.name
    assert ran(study, "owners", bound)["missing"] > 0 or bound == 0


def test_nodes_that_hold_and_keep_send_less_the_larger_the_bound(study: Any) -> None:
    sent = [ran(study, "trees, cached", bound)["megabytes"] for bound in (0, 1, 3)]
    assert sent[0] > 1.5 * sent[1] > 2.25 * sent[2]


def test_a_tree_of_links_carries_each_clock_s_gradient_and_weights_once(study: Any) -> None:
    rounds = ran(study, "rounds", 0)["megabytes"]
    assert rounds == pytest.approx(2 * 5 * 4.0)
    assert ran(study, "owners", 0)["megabytes"] > 1.1 * rounds  # over routes of several links
