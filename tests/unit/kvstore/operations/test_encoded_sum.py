"""Whose values are in which part of a sum by a codec."""

from __future__ import annotations

import numpy as np

from netstorm.compression.codec import Codec, GradientPlace
from netstorm.compression.registry import codec_of
from netstorm.kvstore.calls import EncodedSum, encoded_keys
from netstorm.kvstore.forms import Key
from netstorm.kvstore.operations import Operation
from netstorm.protocol.messages import KeyGrant

SHAPE = (10, 20)
ALL, TWO = 0b111, 0b011


def register(name: str, shape: tuple[int, ...], form: int) -> Key:
    key = Key(0, name, shape, "float32", form=form)
    key.set_grant(KeyGrant(namespace=0, name=name, key=0, first_slot=0, offset=0, chunk_size=80))
    return key


def ended(codec: Codec, results: list[dict[int, int]]) -> EncodedSum:
    """Return a sum whose rounds have ended with these contributors."""
    operations: list[Operation] = []
    errors_of_encoding: list[str] = []
    own = register("w", SHAPE, codec.form(SHAPE) or 0)
    total = EncodedSum(
        encoded_keys(codec, own, register),
        submit=operations.append,
        later=lambda function: function(),
        fail=errors_of_encoding.append,
    )
    errors: list[Exception | None] = []
    total.begin(codec.rounds(np.ones(200, np.float32), {}, GradientPlace(SHAPE, 3, 0, 0)), errors.append)
    for result in results:
        operation = operations.pop()
        operation.contributors.update(result)
        operation.done(None)
    assert (errors, errors_of_encoding) == ([None], [])
    return total


def test_usually_all_of_it_has_the_same_ranks() -> None:
    assert ended(codec_of("fp16"), [{ALL: 0b111}]).counted(200) == [(slice(0, 200), ALL)]


def test_when_a_rank_leaves_each_chunk_has_its_own() -> None:
    total = ended(codec_of("fp16"), [{ALL: 0b101, TWO: 0b010}])
    found = sorted(total.counted(200), key=lambda part: part[0].start)
    assert found == [(slice(0, 80), ALL), (slice(80, 160), TWO), (slice(160, 200), ALL)]
    assert total.contributors == TWO


def test_a_sum_of_factors_has_those_who_are_in_all_of_the_last_ones() -> None:
    codec = codec_of({"type": "powersgd", "rank": 2})
    assert ended(codec, [{ALL: 0b1}, {ALL: 0b1, TWO: 0b10}]).counted(200) == [(slice(0, 200), TWO)]
