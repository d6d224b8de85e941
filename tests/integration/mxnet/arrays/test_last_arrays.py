"""The last arrays of a key: known again, copied faster, and nothing of them outlives its use."""

from __future__ import annotations

import gc
import weakref
from typing import cast

import numpy as np
import pytest

from netstorm.errors import KeyMismatch, UsageError
from netstorm.frontends.mxnet.arrays import LastArrays
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import NDArray
from netstorm.frontends.mxnet.entries import AnyEntry
from netstorm.frontends.mxnet.store import KeyTable
from netstorm.kvstore.forms import Key
from netstorm.kvstore.process.runtime import Runtime


class StubEntry:
    """What a key table needs of an entry."""

    def __init__(self, user_key: str, shape: tuple[int, ...]) -> None:
        self.user_key = user_key
        self.key = Key(0, user_key, shape, "float32")
        self.last = LastArrays()


def table(*entries: StubEntry) -> KeyTable:
    keys = KeyTable(cast("Runtime", None), 0)
    for entry in entries:
        keys.add(cast("AnyEntry", entry))
    return keys


def check(keys: KeyTable, user_key: str, *arrays: NDArray) -> None:
    keys.find([(user_key, list(arrays))], "push")


def test_what_fits_is_remembered_by_key_and_nothing_else_passes_for_it() -> None:
    w, v = StubEntry("w", (3, 2)), StubEntry("v", (2, 3))
    keys, target = table(w, v), mx.nd.zeros((3, 2))
    gradient, weight = mx.nd.ones((3, 2)), mx.nd.ones((3, 2))
    for _ in range(3):
        for array in (gradient, weight):
            check(keys, "w", array)
        w.last.queue_copy(gradient, target)
        w.last.pulled = weight.handle
        assert w.last.have([gradient])
        assert w.last.have([weight])
        assert not w.last.have([gradient, weight])
        for array in (gradient, weight):
            with pytest.raises(
                KeyMismatch, match=r"key 'v': the array is \(3, 2\) float32, the key was init"
            ):
                check(keys, "v", array)
        for wrong in (mx.nd.ones((2, 3)), mx.nd.ones((3, 2), dtype="float64"), gradient.reshape((6,))):
            with pytest.raises(KeyMismatch):
                check(keys, "w", wrong)
            with pytest.raises(KeyMismatch):
                check(keys, "w", gradient, wrong)
        with pytest.raises(UsageError, match="csr array: it must be dense or row_sparse"):
            check(keys, "w", gradient.tostype("csr"))


def test_arrays_that_come_where_a_freed_one_was_are_checked() -> None:
    entry = StubEntry("w", (3,))
    keys, target = table(entry), mx.nd.zeros((3,))
    for number in range(200):
        array = mx.nd.ones((3,))
        check(keys, "w", array)
        entry.last.queue_copy(array, target)
        del array
        with pytest.raises(KeyMismatch):
            check(keys, "w", mx.nd.ones((4,)) if number % 2 else mx.nd.ones((3,), dtype="int32"))


def test_a_copy_has_what_the_array_holds_by_then_whichever_array_it_is() -> None:
    last, sources = LastArrays(), [mx.nd.zeros((5, 3)), mx.nd.zeros((5, 3), ctx=mx.cpu(1))]
    copied = []
    for number, which in enumerate([0, 0, 0, 1, 1, 0, 1, 1, 1]):
        target = mx.nd.zeros((5, 3))
        sources[which][:] = number
        last.queue_copy(sources[which], target)
        sources[which] += 100
        copied.append(target)
    assert [target.asnumpy().min() for target in copied] == list(range(9))
    assert [target.asnumpy().max() for target in copied] == list(range(9))


@pytest.mark.parametrize("copies", [1, 3])
def test_an_array_is_freed_when_another_is_pushed(copies: int) -> None:
    values = np.ones((1000,), np.float32)
    freed = weakref.ref(values)
    last, target = LastArrays(), mx.nd.zeros((1000,))
    source, other = mx.nd.from_numpy(values, zero_copy=True), mx.nd.zeros((1000,))
    del values
    for _ in range(copies):
        last.queue_copy(source, target)
    del source
    last.queue_copy(other, target)
    mx.nd.waitall()
    gc.collect()
    assert freed() is None
    assert (target.asnumpy() == 0).all()


def test_nothing_is_kept_that_an_array_was_computed_from() -> None:
    values = np.ones((1000,), np.float32)
    freed = weakref.ref(values)
    last, target = LastArrays(), mx.nd.zeros((1000,))
    source = mx.nd.from_numpy(values, zero_copy=True)
    del values
    source.attach_grad()
    with mx.autograd.record():
        computed = source * source
    for _ in range(3):
        last.queue_copy(computed, target)
    del source, computed
    mx.nd.waitall()
    gc.collect()
    assert freed() is None
    assert (target.asnumpy() == 1).all()
