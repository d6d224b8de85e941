import numpy as np
import pytest

from netstorm.kvstore.forms import Dense


def empty_sum(dtype="float32"):
    return Dense(np.dtype(dtype)).new_sum()


def received(values, dtype="float32"):
    return bytearray(np.asarray(values, dtype).tobytes())


def values_of(payload, dtype="float32"):
    return np.frombuffer(payload, dtype).tolist()


def test_a_leaf_sends_the_users_own_memory_without_a_copy():
    own = np.array([1, 2], np.float32)
    total = empty_sum()
    total.add_own(own, 0b1)
    assert total.to_send() is own


def test_a_root_keeps_no_view_of_the_users_memory():
    own = np.array([1, 2], np.float32)
    total = empty_sum()
    total.add_own(own, 0b1)
    kept = total.to_keep()
    own[:] = 9
    assert values_of(kept) == [1, 2]


@pytest.mark.parametrize("own_first", [True, False])
def test_contributions_add_up_in_any_order_and_the_source_is_not_written(own_first):
    own = np.array([1, 2], np.float32)
    total = empty_sum()
    if own_first:
        total.add_own(own, 0b1)
    total.add_received(received([10, 20]), 0b10)
    total.add_received(received([100, 200]), 0b1100)
    if not own_first:
        total.add_own(own, 0b1)
    assert values_of(total.to_send()) == [111, 222]
    assert own.tolist() == [1, 2]
    assert total.contributors == 0b1111


def test_a_received_payload_is_added_to_in_place_and_forwarded_as_it_came():
    payload = received([10, 20])
    total = empty_sum()
    total.add_received(payload, 0b10)
    total.add_own(np.array([1, 2], np.float32), 0b1)
    assert total.to_send() is payload


def test_zeros_need_no_memory():
    total = empty_sum()
    total.add_own(None, 0b1)
    total.add_received(None, 0b10)
    assert total.to_send() is None
    assert total.to_keep() is None
    assert total.contributors == 0b11


def test_float16_is_rounded_once_a_hop_not_once_an_addend():
    # 2048 + 1 is not a float16: adding in float16 would lose each 1
    total = empty_sum("float16")
    total.add_own(np.array([2048], np.float16), 0b1)
    for rank in range(1, 5):
        total.add_received(received([1], "float16"), 1 << rank)
    assert values_of(total.to_send(), "float16") == [2052]


def test_overflow_is_the_users_to_see_and_no_warning():
    total = empty_sum("float16")
    total.add_own(np.array([60000], np.float16), 0b1)
    total.add_received(received([60000], "float16"), 0b10)
    assert values_of(total.to_send(), "float16") == [np.inf]


def test_integers_wrap_around():
    total = empty_sum("uint8")
    total.add_own(np.array([250], np.uint8), 0b1)
    total.add_received(received([10], "uint8"), 0b10)
    assert values_of(total.to_send(), "uint8") == [4]


def test_a_payload_of_another_length_is_a_problem():
    dense = Dense(np.dtype("float32"))
    assert dense.problem(bytes(8), 2, 0b1) is None
    assert dense.problem(bytes(9), 2, 0b1) == "has 9 bytes, not 8"
