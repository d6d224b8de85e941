"""Arrays that do not fit a key are refused, however often one that does has been seen."""

from __future__ import annotations

import pytest

from netstorm.errors import KeyMismatch, UsageError
from netstorm.frontends.mxnet.arrays.arguments import Fitting
from netstorm.frontends.mxnet.compat import mx
from netstorm.kvstore.values.key import Key


def test_what_fits_is_remembered_by_key_and_nothing_else_passes_for_it() -> None:
    fitting, key, other = Fitting(), Key(0, "w", (3, 2), "float32"), Key(0, "v", (2, 3), "float32")
    gradient, weight = mx.nd.ones((3, 2)), mx.nd.ones((3, 2))
    for _ in range(3):
        for array in (gradient, weight):
            fitting.check([array], key, "push")
        for array in (gradient, weight):
            with pytest.raises(
                KeyMismatch, match=r"key 'v': the array is \(3, 2\) float32, the key was init"
            ):
                fitting.check([array], other, "push")
        for wrong in (mx.nd.ones((2, 3)), mx.nd.ones((3, 2), dtype="float64"), gradient.reshape((6,))):
            with pytest.raises(KeyMismatch):
                fitting.check([wrong], key, "push")
            with pytest.raises(KeyMismatch):
                fitting.check([gradient, wrong], key, "push")
        with pytest.raises(UsageError, match="csr array: it must be dense or row_sparse"):
            fitting.check([gradient.tostype("csr")], key, "push")


def test_arrays_that_come_where_a_freed_one_was_are_looked_at() -> None:
    fitting, key = Fitting(), Key(0, "w", (3,), "float32")
    for number in range(200):
        array = mx.nd.ones((3,))
        fitting.check([array], key, "push")
        del array
        with pytest.raises(KeyMismatch):
            fitting.check([mx.nd.ones((4,)) if number % 2 else mx.nd.ones((3,), dtype="int32")], key, "push")
