"""Copies of arrays behind everything that is queued, while the script goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.elastic import ArrayGroup, copy_behind, with_copies
from netstorm.frontends.mxnet.engine import Completion, push_async

DEADLINE_S = 60


def copies_of(*groups: ArrayGroup) -> Mapping[int, Any]:
    found: queue.SimpleQueue[Mapping[int, Any] | None] = queue.SimpleQueue()
    copy_behind(groups, found.put, lambda: False).join(DEADLINE_S)
    copies = found.get(timeout=1)
    assert copies is not None
    return copies


def test_a_copy_has_what_was_queued_before_it_and_nothing_of_what_came_after(
    started: Callable[..., Completion],
) -> None:
    array = mx.nd.zeros((4,))
    array.wait_to_read()
    held = started(writes=(array,))
    array += 1
    found: queue.SimpleQueue[Mapping[int, Any] | None] = queue.SimpleQueue()
    thread = copy_behind([ArrayGroup([array])], found.put, lambda: False)
    array += 10
    assert found.empty()
    held.succeed()
    thread.join(DEADLINE_S)
    copies = found.get(timeout=1)
    assert copies is not None
    state = with_copies({"a": [array], "b": 3}, copies)
    assert isinstance(state, dict)
    np.testing.assert_array_equal(state["a"][0], np.ones(4, np.float32))
    assert state["b"] == 3
    np.testing.assert_array_equal(array.asnumpy(), np.full(4, 11))


def test_rows_are_copied_as_checkpoints_have_them() -> None:
    array = mx.nd.sparse.row_sparse_array(
        (mx.nd.ones((2, 3)), mx.nd.array([1, 4], dtype="int64")), shape=(6, 3)
    )
    copy = copies_of(ArrayGroup([array]))[id(array)]
    assert (copy["stype"], copy["shape"], copy["indices"].tolist()) == ("row_sparse", (6, 3), [1, 4])
    assert copy["data"].tolist() == [[1, 1, 1]] * 2


def test_states_that_another_thread_updates_are_copied_when_they_are_final(
    started: Callable[..., Completion],
) -> None:
    value, state = mx.nd.zeros((2,)), mx.nd.zeros((2,))
    value.wait_to_read()
    held = started(writes=(value,))
    found: queue.SimpleQueue[Mapping[int, Any] | None] = queue.SimpleQueue()
    thread = copy_behind([ArrayGroup([value, state], settling=[state])], found.put, lambda: False)
    state += 5  # as a deferred update does, after the copy was queued and before the value is ready
    held.succeed()
    thread.join(DEADLINE_S)
    copies = found.get(timeout=1)
    assert copies is not None
    assert copies[id(state)].tolist() == [5, 5]


def test_a_script_whose_operation_has_failed_offers_nothing() -> None:
    array, found = mx.nd.zeros((2,)), queue.SimpleQueue[object]()

    def fail(completion: Completion) -> None:
        completion.fail(ValueError("of the script's"))

    push_async(fail, reads=(), writes=(array,), name="test")
    copy_behind([ArrayGroup([array])], found.put, lambda: False).join(DEADLINE_S)
    assert found.get(timeout=1) is None


def test_the_thread_ends_with_the_job(started: Callable[..., Completion]) -> None:
    array, found, over = mx.nd.zeros((2,)), queue.SimpleQueue[object](), threading.Event()
    held = started(writes=(array,))
    thread = copy_behind([ArrayGroup([array])], found.put, over.is_set)
    over.set()
    thread.join(DEADLINE_S)
    assert found.get(timeout=1) is None
    held.succeed()
    array += 1  # nothing waits for copies that nobody makes
    assert array.asnumpy().tolist() == [1, 1]
