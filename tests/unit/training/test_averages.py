"""Averages of what ranks have learnt: of changes, and by part over those who are in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.protocol.messages import KeyGrant
from netstorm.training.averages import Changes, divide_by_contributors, forget_the_past


class Total:
    """A sum whose contributors are known, by part."""

    def __init__(self, parts: list[tuple[slice, int]]) -> None:
        self.parts = parts

    def counted(self, elements: int) -> list[tuple[slice, int]]:
        return self.parts


def average(
    values: list[Any], base: Any, total: Total, weights: list[int] | None = None, **options: Any
) -> list[Any]:
    """Have ranks average values that follow a base, all in step, by plain sums of their changes."""
    changes: list[Any] = []

    def encode(change: Any) -> Any:
        changes.append(change.copy())
        yield
        change[:] = np.sum(changes, axis=0)

    ranks = []
    for value, weight in zip(values, weights or [1] * len(values), strict=True):
        of_rank = Changes()
        of_rank.remember(base)
        ranks.append(of_rank.rounds(value, total, encode, weight=weight, **options))
    for rank in ranks:
        next(rank)
    for rank in ranks:
        assert next(rank, None) is None
    return values


def test_the_average_of_changes_is_that_of_values_and_parts_count_their_own_contributors() -> None:
    base = np.array([8, 8, 8, 8], np.float32)
    values = [np.array([9, 10, 8, 8], np.float32), np.array([11, 8, 12, 8], np.float32)]
    total = Total([(slice(0, 2), 0b11), (slice(2, 4), 0b10)])
    for found in average(values, base, total):
        assert found.tolist() == [10, 9, 12, 8]
    assert base.tolist() == [8, 8, 8, 8], "the caller's array is not the base"


def test_sums_of_sites_count_each_rank_once() -> None:
    base = np.array([1.0], np.float32)
    sums = [np.array([2 + 4], np.float32), np.array([3], np.float32)]  # a site of two ranks, and one of one
    for found in average(sums, base, Total([(slice(0, 1), 0b101)]), weights=[2, 1], count=3):
        assert found.tolist() == [3.0]


def test_what_a_newcomer_has_not_sent_is_forgotten_and_factors_are_kept() -> None:
    state = {"residual": np.ones(3), "velocity": np.ones(3), "right": np.ones(2)}
    forget_the_past(state)
    assert list(state) == ["right"]


def test_each_chunk_of_values_is_divided_by_its_own_contributors() -> None:
    key = Key(0, "k", (10,), "float32")
    key.set_grant(KeyGrant(namespace=0, name="k", key=0, first_slot=0, offset=0, chunk_size=4))
    values = np.full(10, 12, np.float32)
    operation = Operation(key=key, round=0, source=None, destination=values, done=lambda _: None)
    for chunk, contributors in enumerate((0b111, 0b110, 0b111)):
        operation.record_result(chunk, contributors)
    divide_by_contributors(operation, values)
    assert values.tolist() == [4, 4, 4, 4, 6, 6, 6, 6, 4, 4]
