"""The interval of a ratio has the truth in it, and starts that differ make it wider."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]

STARTS, ROUNDS = 10, 20


@pytest.fixture
def versions(monkeypatch):
    """The benchmark."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("versions")


def times(chance, *, factor=1.0, between=0.0):
    """Return seconds of rounds; `between` is how much starts differ."""
    of_starts = np.exp(between * chance.standard_normal((STARTS, 1)))
    return factor * 0.1 * of_starts * np.exp(0.1 * chance.standard_normal((STARTS, ROUNDS)))


@pytest.mark.parametrize("between", [0.0, 0.2])
def test_the_truth_is_in_most_intervals(versions, between):
    chance = np.random.default_rng(1)
    inside = 0
    for seed in range(60):
        old, new = times(chance, between=between), times(chance, factor=1.1, between=between)
        _, (low, high) = versions.ratio(np.median, old, new, seed=seed)
        inside += low <= 1.1 <= high
    assert 48 <= inside <= 60


def test_starts_that_differ_make_it_wider_than_as_many_rounds_of_one_start(versions):
    chance = np.random.default_rng(2)
    old, new = times(chance, between=0.2), times(chance, between=0.2)
    found, (low, high) = versions.ratio(np.median, old, new)
    _, (low_of_one, high_of_one) = versions.ratio(np.median, old.reshape(1, -1), new.reshape(1, -1))
    assert low < found < high
    assert high - low > 1.2 * (high_of_one - low_of_one)


def test_the_same_times_have_a_ratio_of_one(versions):
    same = times(np.random.default_rng(3))
    assert versions.ratio(np.mean, same, same) == (1.0, (1.0, 1.0))
