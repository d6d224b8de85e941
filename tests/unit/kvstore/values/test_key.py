import pytest

from netstorm.errors import UsageError
from netstorm.kvstore.forms import ChunkLayout, Key
from netstorm.protocol.messages import KeyGrant


def granted(first_slot=0, offset=0):
    return KeyGrant(namespace=0, name="w", key=0, first_slot=first_slot, offset=offset, chunk_size=4)


def test_chunks_cover_the_key_once_and_lie_behind_one_another_in_the_job():
    layout = ChunkLayout.of_key(elements=10, itemsize=2, grant=granted(offset=6))
    assert layout.bounds == [(0, 4), (4, 8), (8, 10)]
    assert layout.offsets == [6, 14, 22]


def test_chunks_have_successive_slots():
    assert list(ChunkLayout.of_key(elements=9, itemsize=8, grant=granted(first_slot=3)).slots) == [3, 4, 5]


def test_an_empty_key_has_no_chunks():
    assert ChunkLayout.of_key(elements=0, itemsize=4, grant=granted(offset=8)).chunks == 0


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
