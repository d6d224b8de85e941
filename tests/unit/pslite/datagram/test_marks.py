"""Packets are marked by layer and by magnitude."""

from __future__ import annotations

import numpy as np

from netstorm.protocol.messages import Part, Phase
from netstorm.pslite.datagram.marks import Marks, assured_forwarding
from netstorm.pslite.datagram.packets import FRAGMENT

PER_PACKET = FRAGMENT // 4


def part(*, priority=0, key=0, dtype="float32", codec=0):
    return Part(
        key=key,
        round=0,
        chunk=0,
        phase=Phase.REDUCE,
        version=0,
        tree=0,
        contributors=b"\1",
        dtype=dtype,
        priority=priority,
        codec=codec,
    )


def test_code_points_are_those_of_rfc_2597():
    assert [assured_forwarding(queue, important=True) for queue in (1, 2, 3, 4)] == [10, 18, 26, 34]
    assert [assured_forwarding(queue, important=False) for queue in (1, 2, 3, 4)] == [14, 22, 30, 38]


def test_quarters_of_the_layers_have_a_class_each_the_front_ones_the_first():
    marks = Marks()
    values = np.ones(PER_PACKET, np.float32)
    for layer in range(8):
        marks.of(part(priority=-layer), values)
    found = [marks.of(part(priority=-layer), values)[0][0] // 8 for layer in range(8)]
    assert found == [4, 4, 3, 3, 2, 2, 1, 1]


def test_packets_of_small_values_are_unimportant_and_go_last():
    values = np.ones(40 * PER_PACKET, np.float32)
    values[10 * PER_PACKET : 30 * PER_PACKET] = -0.01
    dscps, order = Marks().of(part(), values)
    assert dscps == [34] + [34] * 10 + [38] * 20 + [34] * 10
    assert order == [0, *range(1, 11), *range(31, 41), *range(11, 31)]


def test_a_chunk_is_compared_with_others_of_its_key():
    marks = Marks()
    marks.of(part(), np.ones(20 * PER_PACKET, np.float32))
    assert set(marks.of(part(), np.full(20 * PER_PACKET, 0.1, np.float32))[0][1:]) == {38}
    assert set(marks.of(part(key=1), np.full(20 * PER_PACKET, 0.1, np.float32))[0][1:]) == {34}


def test_packets_of_a_block_are_marked_alike():
    values = np.repeat(np.array([1, 0.01] * 8, np.float32), PER_PACKET)
    dscps, _ = Marks(block=2 * FRAGMENT).of(part(), values)
    assert set(dscps) == {34}  # each block has a packet of large values


def test_not_a_number_is_important_and_what_are_no_floats_is_all_alike():
    values = np.ones(4 * PER_PACKET, np.float32)
    values[0] = np.nan
    assert Marks().of(part(), values)[0][1] == 34
    assert set(Marks().of(part(dtype="int32"), np.zeros(4 * PER_PACKET, np.int32))[0]) == {34}
    assert Marks().of(part(), b"") == ([34], [0])
