"""Copies through a local store of MXNet's: which arrays they hold on to, and who may make them at a time."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np

from netstorm.frontends.mxnet.arrays import CopyOut, queue_dense_copy
from netstorm.frontends.mxnet.compat import mx


def test_a_copied_array_is_free_again() -> None:
    values = np.ones((1000,), np.float32)
    freed = weakref.ref(values)
    source, target = mx.nd.from_numpy(values, zero_copy=True), mx.nd.zeros((1000,))
    del values
    queue_dense_copy(source, target)
    mx.nd.waitall()
    del source
    gc.collect()
    assert freed() is None
    assert (target.asnumpy() == 1).all()


def test_threads_that_copy_at_the_same_time_each_copy_their_own() -> None:
    wrong: list[int] = []
    start = threading.Barrier(4)

    def copy(number: int) -> None:
        sources = [mx.nd.full((7, number + 1), number * 1000 + n) for n in range(300)]
        targets = [mx.nd.zeros((7, number + 1)) for _ in sources]
        start.wait()
        for source, target in zip(sources, targets, strict=True):
            queue_dense_copy(source, target)
        wrong.extend(
            n for n, target in enumerate(targets) if not (target.asnumpy() == number * 1000 + n).all()
        )

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_copy_out_copies_what_the_array_holds_by_then_and_keeps_its_memory() -> None:
    source = mx.nd.zeros((5, 3))
    copies = CopyOut(source)
    targets = [mx.nd.zeros((5, 3), ctx=mx.cpu(device)) for device in range(4)]
    for number, target in enumerate(targets):
        source[:] = number
        copies.queue_copy(target)
        source += 100
    del source
    gc.collect()
    copies.queue_copy(targets[0])
    assert [target.asnumpy().min() for target in targets] == [103, 1, 2, 3]
    assert [target.asnumpy().max() for target in targets] == [103, 1, 2, 3]
