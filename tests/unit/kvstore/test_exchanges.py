"""Who gives which segment of a collective, and who gets it: the table of `kvstore/exchanges.py`."""

from __future__ import annotations

import numpy as np
import pytest

from netstorm.kvstore.exchanges import CollectiveExchanges, reduced
from netstorm.protocol.codecs import Element, Reduction

SIZE = 3
MINE = np.arange(4, dtype=np.uint8)
ROWS = tuple(np.full(4, rank, np.uint8) for rank in range(SIZE))


def parts(exchange) -> tuple[list[bool], list[bool], tuple[int, ...]]:
    """Return which segments have a source and a destination at this rank, and the receivers."""
    return (
        [values is not None for values in exchange.source],
        [values is not None for values in exchange.destination],
        exchange.receivers,
    )


@pytest.mark.parametrize("rank", range(SIZE))
def test_each_collective_gives_and_takes_what_the_table_says(rank):
    made, root = CollectiveExchanges(rank, SIZE), 1
    own = [place == rank for place in range(SIZE)]
    every, none, is_root = [True] * SIZE, [False] * SIZE, rank == root
    total = (Reduction.SUM, Element.UINT8)
    at_root = ROWS if is_root else None
    assert parts(reduced("", MINE, MINE, *total)) == ([True], [True], ())
    assert parts(made.reduce("", MINE, MINE, *total, root=root)) == ([True], [is_root], (0b010,))
    assert parts(made.broadcast("", MINE, root)) == ([is_root], [not is_root], (0b101,))
    assert parts(made.all_gather("", MINE, ROWS)) == (own, every, (0b110, 0b101, 0b011))
    assert parts(made.gather("", MINE, at_root, root)) == (
        *(own, every if is_root else none, (0b010, 0, 0b010)),
    )
    assert parts(made.scatter("", MINE, at_root, root)) == (
        *(every if is_root else none, own, (0b001, 0, 0b100)),
    )
    assert parts(made.reduce_scatter("", MINE, ROWS, *total)) == (every, own, (0b001, 0b010, 0b100))
    for exchange in (made.broadcast("", MINE, root), made.all_gather("", MINE, ROWS)):
        assert (exchange.reduction, exchange.element, exchange.segment_bytes) == (
            *(Reduction.COPY, Element.BYTES, MINE.nbytes),
        )
