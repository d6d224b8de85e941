import numpy as np
import pytest

from netstorm.kvstore.chunk_sum import ChunkSum

FLOAT32 = np.dtype("float32")
FLOAT16 = np.dtype("float16")


def received(values, dtype="float32"):
    return bytearray(np.asarray(values, dtype).tobytes())


def values_of(payload, dtype="float32"):
    return np.frombuffer(payload, dtype).tolist()


def test_a_leaf_sends_the_users_own_memory_without_a_copy():
    own = np.array([1, 2], np.float32)
    total = ChunkSum()
    total.add_own(own, 0b1)
    assert total.to_send(FLOAT32) is own


def test_a_root_keeps_no_view_of_the_users_memory():
    own = np.array([1, 2], np.float32)
    total = ChunkSum()
    total.add_own(own, 0b1)
    kept = total.to_keep(FLOAT32)
    own[:] = 9
    assert values_of(kept) == [1, 2]


@pytest.mark.parametrize("own_first", [True, False])
def test_contributions_add_up_in_any_order_and_the_source_is_not_written(own_first):
    own = np.array([1, 2], np.float32)
    total = ChunkSum()
    if own_first:
        total.add_own(own, 0b1)
    total.add_received(received([10, 20]), FLOAT32, 0b10)
    total.add_received(received([100, 200]), FLOAT32, 0b1100)
    if not own_first:
        total.add_own(own, 0b1)
    assert values_of(total.to_send(FLOAT32)) == [111, 222]
    assert own.tolist() == [1, 2]
    assert total.contributors == 0b1111


def test_a_received_payload_is_added_to_in_place_and_forwarded_as_it_came():
    payload = received([10, 20])
    total = ChunkSum()
    total.add_received(payload, FLOAT32, 0b10)
    total.add_own(np.array([1, 2], np.float32), 0b1)
    assert total.to_send(FLOAT32) is payload


def test_zeros_need_no_memory():
    total = ChunkSum()
    total.add_own(None, 0b1)
    total.add_received(None, FLOAT32, 0b10)
    assert total.to_send(FLOAT32) is None
    assert total.to_keep(FLOAT32) is None
    assert total.contributors == 0b11


def test_float16_is_rounded_once_a_hop_not_once_an_addend():
    # 2048 + 1 is not a float16: adding in float16 would lose each 1
    total = ChunkSum()
    total.add_own(np.array([2048], np.float16), 0b1)
    for rank in range(1, 5):
        total.add_received(received([1], "float16"), FLOAT16, 1 << rank)
    assert values_of(total.to_send(FLOAT16), "float16") == [2052]


def test_overflow_is_the_users_to_see_and_no_warning():
    total = ChunkSum()
    total.add_own(np.array([60000], np.float16), 0b1)
    total.add_received(received([60000], "float16"), FLOAT16, 0b10)
    assert values_of(total.to_send(FLOAT16), "float16") == [np.inf]


def test_integers_wrap_around():
    total = ChunkSum()
    total.add_own(np.array([250], np.uint8), 0b1)
    total.add_received(received([10], "uint8"), np.dtype("uint8"), 0b10)
    assert values_of(total.to_send(np.dtype("uint8")), "uint8") == [4]
