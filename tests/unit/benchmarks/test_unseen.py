"""What not knowing the network costs: which networks are drawn, and what the figure of one is."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest


@pytest.fixture
def unseen(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("unseen")


def test_a_seed_draws_the_same_network_and_four_seeds_all_families(unseen):
    drawn = [unseen.draw(seed) for seed in range(100, 120)]
    assert drawn == [unseen.draw(seed) for seed in range(100, 120)]
    assert {family for family, _ in drawn[:4]} == {"internet2", "mesh", "cloud", "asymmetric"}
    assert all(5 <= network.size <= 12 for _, network in drawn)


def test_the_figure_is_the_median_round_after_ten_over_the_other_job_s(unseen):
    found = unseen.Unseen(
        seed=1,
        family="mesh",
        nodes=5,
        informed_s=(9.0, 2.0, 2.0, 4.0),  # the first one opens connections
        uninformed_s=(*[50.0] * 10, 2.2, 2.0, 8.0),
    )
    assert found.by_round[0] == 25.0
    assert found.ratio == pytest.approx(1.1)
    assert "at most 5 % slower on 0 of 1" in unseen.summary([found])


@pytest.mark.parametrize(("text", "expected"), [("7", [7]), ("3..5", [3, 4, 5])])
def test_seeds_are_one_or_a_range(unseen, text, expected):
    assert list(unseen.seeds(text)) == expected


@pytest.mark.parametrize("text", ["", "..", "5..3", "-1", "1..", "a"])
def test_other_seeds_are_refused_by_name(unseen, text):
    with pytest.raises(argparse.ArgumentTypeError, match="no range, such as"):
        unseen.seeds(text)
