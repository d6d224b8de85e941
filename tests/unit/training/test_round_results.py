"""What an elastic store makes of a round's result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from netstorm.compression.sparse import Rows
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.protocol.codecs import ROW_SPARSE
from netstorm.protocol.messages import KeyGrant
from netstorm.training.round_results import StoreRoundResults


@dataclass
class Entry:
    contributors: int = 0


def granted(dtype: str = "float32", shape: tuple[int, ...] = (10,), form: int = 0) -> Key:
    key = Key(0, "k", shape, dtype, form=form)
    key.set_grant(KeyGrant(namespace=0, name="k", key=0, first_slot=0, offset=0, chunk_size=4))
    return key


def result(key: Key, destination: Any, by_chunk: list[int], **options: Any) -> Operation:
    operation = Operation(
        key=key, round=1, source=None, destination=destination, done=lambda _: None, **options
    )
    for chunk, contributors in enumerate(by_chunk):
        operation.record_result(chunk, contributors)
    return operation


def follow(operation: Operation, world: int = 4, *, rescales: bool = True) -> Entry:
    entry = Entry()
    StoreRoundResults(world, rescales=rescales).follow(operation, entry)
    operation.done(None)
    return entry


def test_contributors_are_those_who_are_in_all_chunks() -> None:
    values = np.ones(10, np.float32)
    entry = follow(result(granted(), values, [0b1111, 0b1011, 0b1011]), rescales=False)
    assert entry.contributors == 0b1011
    assert (values == 1).all()


def test_each_chunk_is_scaled_by_its_own_contributors() -> None:
    values = np.ones(10, np.float32)
    follow(result(granted(), values, [0b1111, 0b1010, 0b0001]))
    assert values.tolist() == [1] * 4 + [2] * 4 + [4] * 2


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_whole_numbers_are_not_scaled(dtype: str) -> None:
    values = np.ones(10, dtype)
    follow(result(granted(dtype), values, [0b0001] * 3))
    assert (values == 1).all()


def test_an_initial_value_is_not_scaled() -> None:
    values = np.ones(10, np.float32)
    follow(result(granted(), values, [0b0011] * 3, from_lowest=True))
    assert (values == 1).all()


def test_rows_are_scaled_in_new_memory() -> None:
    key = granted("float32", (6, 2), ROW_SPARSE)
    received = [Rows(np.array([0, 1]), np.ones((2, 2), np.float32)) for _ in range(3)]
    parts = [(first, rows) for first, rows in zip((0, 2, 4), received, strict=True)]
    follow(result(key, parts, [0b1111, 0b0011, 0b0011], form=key.forms[ROW_SPARSE]))
    assert [float(rows.values[0, 0]) for _, rows in parts] == [1, 2, 2]
    assert all((rows.values == 1).all() for rows in received)


def test_a_round_that_failed_changes_nothing() -> None:
    values = np.ones(10, np.float32)
    failed: list[object] = []
    operation = Operation(key=granted(), round=1, source=None, destination=values, done=failed.append)
    entry = Entry()
    StoreRoundResults(4, rescales=True).follow(operation, entry)
    error = ValueError()
    operation.done(error)
    assert (failed, entry.contributors) == ([error], 0)
