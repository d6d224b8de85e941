"""The study of loss bounds loses what its rules say, and a late gradient is not lost."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

RANKS, ELEMENTS, STEPS = 4, 10_000, 12


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks" / "studies"))
    return importlib.import_module("loss_bounds")


def gradients(step: int) -> Any:
    return np.random.default_rng(step).standard_normal((RANKS, ELEMENTS)).astype(np.float32)


def test_what_is_late_comes_later_within_the_bound(study: Any) -> None:
    sums = study.Sums("late", 0.3, RANKS, ELEMENTS, 1)
    total = sum(sums.sum(gradients(step)) for step in range(STEPS))
    given = sum(gradients(step).sum(0) for step in range(STEPS))
    assert np.allclose(total + sums._kept.sum(0), given, atol=1e-3)
    assert 0.2 < sums.missing / sums.given < 0.33


@pytest.mark.parametrize("rule", ["lost", "unimportant"])
def test_what_is_lost_are_so_many_packets_and_the_small_ones_if_that_is_the_rule(
    study: Any, rule: str
) -> None:
    packets = -(-ELEMENTS // study.PACKET)
    values = np.repeat(np.arange(1, packets + 1), study.PACKET)[:ELEMENTS]
    values = np.tile(values, (RANKS, 1)).astype(np.float32)
    sums = study.Sums(rule, 0.25, RANKS, ELEMENTS, 1)
    lost = values.sum() - sums.sum(values).sum()
    assert np.isclose(lost, sums.missing, rtol=1e-4)
    share = lost / values.sum()
    assert 0.15 < share < 0.35 if rule == "lost" else 0.08 < share < 0.15
