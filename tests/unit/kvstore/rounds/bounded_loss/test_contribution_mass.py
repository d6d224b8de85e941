"""How large the values of a chunk are, in each form."""

from __future__ import annotations

import math

import numpy as np

from netstorm.kvstore.forms import Collective, Dense, Quantised
from netstorm.kvstore.rounds.bounded_loss import mass_of, mass_of_payload
from netstorm.protocol.codecs import Element, Reduction, Signature

FLOATS = Dense(np.dtype(np.float32))
BFLOATS = Collective(Signature(Reduction.SUM, Element.BFLOAT16, 1, 8))


def test_the_mass_of_floats_is_the_sum_of_absolute_values():
    values = np.array([1.5, -2.0, 0.0], np.float32)
    assert mass_of(values, FLOATS, 3) == 3.5
    assert mass_of_payload(memoryview(values.tobytes()), FLOATS, 3) == 3.5
    assert mass_of(np.full(4, 60_000, np.float16), Dense(np.dtype(np.float16)), 4) == 240_000
    assert math.isnan(mass_of(np.array([np.nan], np.float32), FLOATS, 1))


def test_bfloat16_is_read_as_what_it_is():
    bits = (np.array([1.0, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert mass_of(bits, BFLOATS, 4) == 3.0
    assert mass_of_payload(bits.tobytes(), BFLOATS, 4) == 3.0


def test_zeros_have_none_and_other_forms_count_elements():
    assert mass_of(None, FLOATS, 7) == 0
    assert mass_of_payload(None, FLOATS, 7) == 0
    assert mass_of(np.ones(7, np.int32), Dense(np.dtype(np.int32)), 7) == 7
    assert mass_of(object(), Quantised(), 7) == 7
    assert mass_of_payload(b"\0\0", Quantised(), 7) == 7
