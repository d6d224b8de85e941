"""An optimizer's state of a key that several ranks own blocks of: divided, sent, and joined.

A state is what `create_state` of an `mx.optimizer.Optimizer` returns: an array, nothing, a number, or a tuple
of these. Arrays that have a value for each element of the key are divided as the key is. Other states belong
to an optimizer that needs whole tensors, whose keys have one owner each. Numbers and arrays are sent as
MessagePack; nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from netstorm.compression.sparse import Rows
from netstorm.errors import ProtocolViolation, UsageError
from netstorm.frontends.mxnet.arrays.row_memory import filled_rows
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import NDArray
from netstorm.kvstore.asynchronous.blocks import MOST_COUNTED

__all__ = ["BlockState", "decode", "encode", "joined", "part_of", "problem_of"]


class _Array(msgspec.Struct, tag="array", array_like=True):
    shape: tuple[int, ...]
    dtype: str
    values: bytes
    rows: bytes | None = None
    """Numbers of the rows, int64, if it is row-sparse."""


class _Several(msgspec.Struct, tag="several", array_like=True):
    states: list[_State]


_State: TypeAlias = _Array | _Several | bool | int | float | None


class BlockState(msgspec.Struct):
    """The optimizer's state of one block, and its counts of updates."""

    state: _State
    begun: bool
    """There has been an update, or the state comes from a file."""
    updates: int
    """Of this block."""
    all_updates: int
    """The most of any key, as the optimizer counts; a learning rate scheduler depends on it."""

    @classmethod
    def of(cls, state: object, *, begun: bool, updates: int, all_updates: int) -> BlockState:
        """Describe an optimizer's state; waits until it has been computed."""
        return cls(_plain(state), begun, updates, all_updates)


def encode(state: BlockState) -> bytes:
    """Return the bytes to send."""
    return msgspec.msgpack.encode(state)


def decode(data: bytes) -> BlockState:
    """Return what `encode` was given.

    Raises:
        ProtocolViolation: these bytes do not come from there.
    """
    try:
        found = msgspec.msgpack.decode(data, type=BlockState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(
            f"{len(data)} bytes that are no optimizer's state, in MessagePack, with its counts: {error}"
        ) from None
    if (
        not 0
        <= min(found.updates, found.all_updates)
        <= max(found.updates, found.all_updates)
        <= MOST_COUNTED
    ):
        raise ProtocolViolation(
            f"counted as {found.updates} and {found.all_updates} updates: expected 0 to {MOST_COUNTED}"
        )
    return found


def problem_of(state: _State, expected: object) -> str:
    """Return how a state differs in its form from one that the optimizer makes, for a person; empty: not at
    all.
    """
    if isinstance(expected, (list, tuple)):
        if not isinstance(state, _Several) or len(state.states) != len(expected):
            return f"{_form(state)}: expected {len(expected)} states"
        pairs = zip(state.states, expected, strict=True)
        return next(filter(None, (problem_of(one, other) for one, other in pairs)), "")
    if isinstance(expected, mx.nd.NDArray):
        return _problem_of_array(state, tuple(expected.shape), np.dtype(expected.dtype))
    if isinstance(state, (_Array, _Several)):
        return f"{_form(state)}: expected a number or none, like {expected!r}"
    return ""


def _problem_of_array(state: _State, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> str:
    expected = f"expected an array of {dtype.name}, of shape {shape}"
    if not isinstance(state, _Array) or state.shape != shape or state.dtype != dtype.name:
        return f"{_form(state)}: {expected}"
    nbytes = math.prod(shape) * dtype.itemsize
    if state.rows is not None:
        if not shape or len(state.rows) % 8:
            return f"rows with {len(state.rows)} bytes of numbers: {expected}"
        rows = np.frombuffer(state.rows, np.int64)
        if len(rows) and not (rows[0] >= 0 and (rows[1:] > rows[:-1]).all() and rows[-1] < shape[0]):
            return f"{len(rows)} rows whose numbers do not rise from 0 to {shape[0] - 1}: {expected}"
        nbytes = len(rows) * math.prod(shape[1:]) * dtype.itemsize
    return "" if len(state.values) == nbytes else f"{len(state.values)} bytes of values: {expected}"


def _form(state: _State) -> str:
    """Return what a state is, for a person."""
    if isinstance(state, _Several):
        return f"{len(state.states)} states"
    if isinstance(state, _Array):
        return f"an array of {state.dtype[:20]!r}, of shape {state.shape[:8]}"
    return repr(state)


def joined(parts: Sequence[_State], shape: tuple[int, ...]) -> object:
    """Return the state of a whole key.

    Args:
        parts: `BlockState.state` of its blocks, in order; they have the same structure.
        shape: of the key.
    """
    first = parts[0]
    if isinstance(first, _Several):
        tuples = [part.states for part in parts if isinstance(part, _Several)]
        return tuple(joined(members, shape) for members in zip(*tuples, strict=True))
    if not isinstance(first, _Array):
        return first
    arrays = [part for part in parts if isinstance(part, _Array)]
    dtype = np.dtype(first.dtype)
    if any(part.rows is not None for part in arrays):
        return _joined_rows(arrays, shape, dtype)
    values = np.concatenate([np.frombuffer(part.values, dtype) for part in arrays])
    return mx.nd.array(values.reshape(shape if len(parts) > 1 else first.shape), ctx=mx.cpu(), dtype=dtype)


def part_of(state: object, name: str, shape: tuple[int, ...], start: int, part: tuple[int, ...]) -> object:
    """Return a block's part of a state that was saved.

    Args:
        state: of the whole key.
        name: of the key.
        shape: of the key.
        start: the block's first element.
        part: the block's shape.

    Raises:
        UsageError: the state is that of another array.
    """
    if isinstance(state, (list, tuple)):
        return tuple(part_of(member, name, shape, start, part) for member in state)
    if not isinstance(state, mx.nd.NDArray):
        return state
    size = math.prod(part)
    if tuple(state.shape) == shape and state.stype == "row_sparse":
        first, count = start // max(1, math.prod(shape[1:])), part[0]
        found = Rows(state.indices.asnumpy(), state.data.asnumpy()).between(first, first + count)
        rows = Rows(np.empty(0, np.int64), np.empty(0)) if found is None else found
        return filled_rows(part, state.dtype, rows)
    if size == math.prod(shape):
        return state.copy()
    if tuple(state.shape) != shape:
        raise UsageError(
            f"load_optimizer_states: the file has a state of shape {tuple(state.shape)} for key {name!r}, "
            f"which has shape {shape}"
        )
    values = state.asnumpy().reshape(-1)[start : start + size].reshape(part)
    return mx.nd.array(values, ctx=mx.cpu(), dtype=state.dtype)


def _plain(state: object) -> _State:
    if isinstance(state, (list, tuple)):
        return _Several([_plain(member) for member in state])
    if isinstance(state, mx.nd.NDArray):
        rows = state.indices.asnumpy().tobytes() if state.stype == "row_sparse" else None
        values = (state if rows is None else state.data).asnumpy()
        return _Array(tuple(state.shape), values.dtype.name, values.tobytes(), rows)
    if state is None or isinstance(state, (bool, int, float)):
        return state
    raise UsageError(
        f"the optimizer has a state of type {type(state).__name__}, which cannot be sent to another rank: "
        "expected arrays, numbers, None, and tuples of these"
    )


def _joined_rows(parts: list[_Array], shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray:
    numbers, values, first = [], [], 0
    for part in parts:
        here = np.arange(part.shape[0]) if part.rows is None else np.frombuffer(part.rows, np.int64)
        numbers.append(first + here)
        values.append(np.frombuffer(part.values, dtype))
        first += part.shape[0]
    rows = np.concatenate(numbers)
    return filled_rows(shape, dtype, Rows(rows, np.concatenate(values).reshape(len(rows), -1)))
