"""Averages of changes, and when they are due: the parts of the stores that need no job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.local_updates import (
    Average,
    Changes,
    Paced,
    Periodic,
    divide_by_contributors,
    forget_the_past,
)
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.protocol.messages import KeyGrant


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

    def encode(change: Any) -> Iterator[None]:
        changes.append(change.copy())
        yield
        change[:] = np.sum(changes, axis=0)

    ranks = []
    for value, weight in zip(values, weights or [1] * len(values), strict=True):
        of_rank = Changes()
        of_rank.remember(base)
        ranks.append(of_rank.rounds(value, total, encode, weight=weight, **options))  # type: ignore[arg-type]
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


def test_who_hurries_skips_to_the_average_of_all_and_counts_those_of_the_site() -> None:
    schedule = Periodic("HFA", k1=2, k2=3)
    assert [schedule.next_step() for _ in range(3)] == [Average.NONE, Average.SITE, Average.NONE]
    assert schedule.next_step(hurries=True) is Average.ALL
    assert schedule.averages == 3
    assert schedule.next_step(hurries=True) is Average.ALL
    assert schedule.averages == 6
    later = Periodic("HFA", k1=2, k2=3)
    later.go_on_at(6)
    assert [later.next_step() for _ in range(6)] == [schedule.next_step() for _ in range(6)]
    assert later.averages == schedule.averages == 9
    with pytest.raises(UsageError, match="at least 1"):
        Periodic("HFA", k1=1, k2=0)


def test_who_hurries_does_not_ask_the_pacer_and_tells_it_how_many_steps_it_took() -> None:
    class Pacer:
        def __init__(self) -> None:
            self.taken: list[int] = []

        def steps(self) -> int:
            return 3

        def round_ends(self, taken: int) -> None:
            self.taken.append(taken)

    pacer = Pacer()
    schedule = Paced("ESync", pacer)
    schedule.go_on_at(7)
    assert schedule.next_step(hurries=True) is Average.ALL
    assert [schedule.next_step() for _ in range(3)] == [Average.NONE, Average.NONE, Average.ALL]
    assert schedule.averages == 9
    assert pacer.taken == [1, 3]
