import pytest

from netstorm.errors import UsageError
from netstorm.kvstore.keys import Key, Layout


def test_chunks_cover_the_key_once():
    layout = Layout(elements=10, itemsize=4, offset=0, chunk_size=4)
    assert layout.bounds == [(0, 4), (4, 8), (8, 10)]


def test_small_keys_share_a_slot_and_large_ones_have_one_a_chunk():
    assert Layout(elements=1, itemsize=4, offset=0, chunk_size=4).slots == [0]
    assert Layout(elements=9, itemsize=4, offset=4, chunk_size=4).slots == [0, 1, 2]


def test_a_key_of_wider_elements_takes_more_slots_since_shares_are_by_bytes():
    assert Layout(elements=8, itemsize=8, offset=0, chunk_size=4).slots == [0, 2]


def test_an_empty_key_has_no_chunks():
    assert Layout(elements=0, itemsize=4, offset=8, chunk_size=4).chunks == 0


def test_rounds_count_pushes_from_zero():
    key = Key(0, "w", (2, 3), "float32")
    assert [key.take_round(), key.take_round()] == [0, 1]
    assert key.last_taken == 1
    assert key.elements == 6


def test_a_type_that_cannot_be_summed_is_refused_by_name():
    with pytest.raises(UsageError, match="key 'w' has type complex64; NetStorm can sum float16"):
        Key(0, "w", (1,), "complex64")


def test_an_unknown_dimension_is_refused():
    with pytest.raises(UsageError, match="dimensions must be known"):
        Key(0, "w", (-1, 3), "float32")
