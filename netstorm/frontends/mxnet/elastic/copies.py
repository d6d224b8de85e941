"""Copies of arrays as they are after all that is queued now; a thread makes them, and the script goes on.

For each group of arrays, an operation that reads them is queued on MXNet's engine. While it lasts, nobody
changes them: the next update of a key waits for the copy of this key alone.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from netstorm.frontends.mxnet.arrays.row_memory import rows_of
from netstorm.frontends.mxnet.arrays.staging import memory_of
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import Completion, NDArray, push_async

__all__ = ["Group", "Later", "copy_behind", "with_copies"]

_log = logging.getLogger(__name__)

_LOOK_S: Final = 0.5
"""How often the thread looks whether the job has failed."""


class Later:
    """A value that is read when the arrays of its group are copied."""

    __slots__ = ("read",)

    def __init__(self, read: Callable[[], object]) -> None:
        self.read: Final = read


class Group(NamedTuple):
    """Arrays that are copied together."""

    arrays: Sequence[NDArray]
    """On the host. Those of staging buffers, and states of optimizers."""
    settling: Sequence[NDArray] = ()
    """Those of them that another thread's operations change; these are queued when the first is ready."""
    values: Sequence[Later] = ()
    """Read with them."""


def copy_behind(
    groups: Sequence[Group],
    then: Callable[[Mapping[int, object] | None], None],
    is_over: Callable[[], bool],
) -> threading.Thread:
    """Queue the copies, and return the thread that makes them.

    Args:
        groups: what to copy.
        then: called by the thread, with the copies by the `id` of the array: NumPy's arrays; of row-sparse
            ones the tree that checkpoints have. None: an operation of the script's own has failed.
        is_over: whether the job has ended: no copies are made any more.
    """
    started: queue.SimpleQueue[tuple[Completion, Group] | None] = queue.SimpleQueue()

    given_up = threading.Event()

    def end_the_rest() -> None:
        """End operations that nobody copies for: what is queued behind them would wait for ever."""
        with contextlib.suppress(queue.Empty):
            while True:
                begun = started.get_nowait()
                if begun is not None:
                    begun[0].succeed()

    def run() -> None:
        copies = _copies(len(groups), started, is_over)
        if copies is None:
            given_up.set()
            end_the_rest()
        try:
            then(copies)
        except Exception:  # noqa: BLE001 -- training goes on, whatever the script's state may be
            _log.exception("the state for a newcomer cannot be offered")

    thread = threading.Thread(target=run, name="netstorm-snapshot", daemon=True)
    thread.start()
    for group in groups:
        settling = {id(array) for array in group.settling}

        def start(completion: Completion, group: Group = group) -> None:
            started.put((completion, group))
            if given_up.is_set():
                end_the_rest()

        push_async(
            start,
            reads=[array for array in group.arrays if id(array) not in settling],
            writes=(),
            name="netstorm_snapshot",
            skipped=lambda: started.put(None),
        )
    return thread


def with_copies(state: object, copies: Mapping[int, object]) -> object:
    """Return a tree with copies in the places of arrays, and values in those of what was read later."""
    if isinstance(state, (mx.nd.NDArray, Later)):
        return copies[id(state)]
    if isinstance(state, dict):
        return {key: with_copies(value, copies) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(with_copies(value, copies) for value in state)
    return state


def _copies(
    count: int, started: queue.SimpleQueue[tuple[Completion, Group] | None], is_over: Callable[[], bool]
) -> Mapping[int, object] | None:
    copies: dict[int, object] = {}
    for _ in range(count):
        begun = _next(started, is_over)
        if begun is None:
            return None
        completion, group = begun
        try:
            for array in group.settling:
                array.wait_to_read()
            copies.update((id(array), _copied(array)) for array in group.arrays)
            copies.update((id(value), value.read()) for value in group.values)
        except Exception:  # noqa: BLE001 -- likewise
            _log.exception("the state for a newcomer cannot be copied")
            return None
        finally:
            completion.succeed()
    return copies


def _next(
    started: queue.SimpleQueue[tuple[Completion, Group] | None], is_over: Callable[[], bool]
) -> tuple[Completion, Group] | None:
    while True:
        try:
            return started.get(timeout=_LOOK_S)
        except queue.Empty:
            if is_over():
                return None


def _copied(array: NDArray) -> object:
    """Return the copy of an array that nobody changes now; waits for nothing."""
    if array.stype == "row_sparse":
        rows = rows_of(array)
        shape = tuple(array.shape)
        return {
            "stype": "row_sparse",
            "shape": shape,
            "indices": rows.numbers.copy(),
            "data": rows.values.reshape(len(rows), *shape[1:]).copy(),
        }
    return np.frombuffer(memory_of(array), array.dtype).reshape(array.shape).copy()
