"""Results are kept until all who may need them have them."""

from __future__ import annotations

import numpy as np

from netstorm.kvstore.forms import Dense
from netstorm.kvstore.rounds.views import KeptResult, KeptResults

FORM = Dense(np.dtype("float32"))
RESULT = KeptResult(b"1234", 0b11)


def keep(kept, round, chunk=0, *, key=0, result=RESULT, settled=-1):
    kept.add(key, round, chunk, result, form=FORM, call=0, settled=settled)


def rounds(kept):
    return [(key, round) for key, round, _ in kept]


def test_what_is_kept_can_be_sent_to_others():
    kept = KeptResults()
    keep(kept, 3, 1)
    keep(kept, 3, 2, result=None)
    found = kept.of(3, 0)
    assert found is None
    found = kept.of(0, 3)
    assert found is not None
    assert (found.chunks, found.known, found.form) == ({1: RESULT}, {2}, FORM)


def test_a_result_drops_those_of_rounds_that_all_have():
    kept = KeptResults()
    for round in range(4):
        keep(kept, round, settled=round - 2)
    assert rounds(kept) == [(0, 2), (0, 3)]
    keep(kept, 0, key=1)
    keep(kept, 4, settled=3)
    assert rounds(kept) == [(0, 4), (1, 0)]


def test_an_older_word_that_comes_later_brings_nothing_back():
    kept = KeptResults()
    keep(kept, 5, settled=4)
    keep(kept, 6, settled=2)
    assert rounds(kept) == [(0, 5), (0, 6)]


def test_nothing_is_left_when_the_job_has_failed():
    kept = KeptResults()
    keep(kept, 1)
    kept.clear()
    assert rounds(kept) == []
