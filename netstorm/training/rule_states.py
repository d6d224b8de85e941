"""What an update rule keeps of a block, as bytes: sent to another owner, or to who saves a checkpoint.

A state is an array, nothing, a number, or a tuple of these. Arrays that have a value for each element of the
key are divided as the key is. Other states belong to a rule that needs whole tensors, whose keys have one
owner each. Numbers and arrays are sent as MessagePack; nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from netstorm.compression.sparse import Rows
from netstorm.errors import ProtocolViolation
from netstorm.kvstore.asynchronous.blocks import MOST_COUNTED

__all__ = [
    "ArrayForm",
    "ArrayState",
    "ExpectedState",
    "JoinedRows",
    "JoinedState",
    "OptimizerState",
    "RuleState",
    "SeveralStates",
    "decoded_state",
    "encoded_state",
    "joined",
    "problem_of_state",
]


class ArrayState(msgspec.Struct, tag="array", array_like=True):
    """An array."""

    shape: tuple[int, ...]
    dtype: str
    values: bytes
    rows: bytes | None = None
    """Numbers of the rows, int64, if it is row-sparse."""


class SeveralStates(msgspec.Struct, tag="several", array_like=True):
    """A tuple."""

    states: list[RuleState]


RuleState: TypeAlias = ArrayState | SeveralStates | bool | int | float | None


class OptimizerState(msgspec.Struct):
    """A rule's state of one block, and its counts of updates."""

    state: RuleState
    begun: bool
    """There has been an update, or the state comes from a file."""
    updates: int
    """Of this block."""
    all_updates: int
    """The most of any key, as the optimizer counts; a learning rate scheduler depends on it."""


def encoded_state(state: OptimizerState) -> bytes:
    """Return the bytes to send."""
    return msgspec.msgpack.encode(state)


def decoded_state(data: bytes) -> OptimizerState:
    """Return what `encoded_state` was given.

    Raises:
        ProtocolViolation: these bytes do not come from there.
    """
    try:
        decoded = msgspec.msgpack.decode(data, type=OptimizerState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(
            f"{len(data)} bytes that are no optimizer's state, in MessagePack, with its counts: {error}"
        ) from None
    counts = decoded.updates, decoded.all_updates
    if not 0 <= min(counts) <= max(counts) <= MOST_COUNTED:
        raise ProtocolViolation(
            f"counted as {decoded.updates} and {decoded.all_updates} updates: expected 0 to {MOST_COUNTED}"
        )
    return decoded


class ArrayForm(NamedTuple):
    """What an array that a rule makes looks like."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


ExpectedState: TypeAlias = "ArrayForm | list[ExpectedState] | bool | int | float | None"
"""The form of a state that a rule makes. A list stands for a tuple."""


def problem_of_state(state: RuleState, expected: ExpectedState) -> str:
    """Return how a state's form differs from what the rule makes, for a person; empty: not at all."""
    if isinstance(expected, list):
        if not isinstance(state, SeveralStates) or len(state.states) != len(expected):
            return f"{_form(state)}: expected {len(expected)} states"
        pairs = zip(state.states, expected, strict=True)
        return next(filter(None, (problem_of_state(member, other) for member, other in pairs)), "")
    if isinstance(expected, ArrayForm):
        return _problem_of_array(state, expected.shape, expected.dtype)
    if isinstance(state, (ArrayState, SeveralStates)):
        return f"{_form(state)}: expected a number or none, like {expected!r}"
    return ""


def _problem_of_array(state: RuleState, shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    expected = f"expected an array of {dtype.name}, of shape {shape}"
    if not isinstance(state, ArrayState) or state.shape != shape or state.dtype != dtype.name:
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


def _form(state: RuleState) -> str:
    """Return what a state is, for a person."""
    if isinstance(state, SeveralStates):
        return f"{len(state.states)} states"
    if isinstance(state, ArrayState):
        return f"an array of {state.dtype[:20]!r}, of shape {state.shape[:8]}"
    return repr(state)


class JoinedRows(NamedTuple):
    """A row-sparse array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: Rows


JoinedState: TypeAlias = "npt.NDArray[Any] | JoinedRows | list[JoinedState] | bool | int | float | None"
"""A state in memory. A list stands for a tuple."""


def joined(parts: Sequence[RuleState], shape: tuple[int, ...]) -> JoinedState:
    """Return the state of a whole key.

    Args:
        parts: of its blocks, in order; they have the same structure.
        shape: of the key.
    """
    first = parts[0]
    if isinstance(first, SeveralStates):
        tuples = [part.states for part in parts if isinstance(part, SeveralStates)]
        return [joined(members, shape) for members in zip(*tuples, strict=True)]
    if not isinstance(first, ArrayState):
        return first
    arrays = [part for part in parts if isinstance(part, ArrayState)]
    dtype = np.dtype(first.dtype)
    if any(part.rows is not None for part in arrays):
        return _joined_rows(arrays, shape, dtype)
    values: npt.NDArray[Any] = np.concatenate([np.frombuffer(part.values, dtype) for part in arrays])
    return values.reshape(shape if len(parts) > 1 else first.shape)


def _joined_rows(parts: list[ArrayState], shape: tuple[int, ...], dtype: np.dtype[Any]) -> JoinedRows:
    numbers, values, first = [], [], 0
    for part in parts:
        here = np.arange(part.shape[0]) if part.rows is None else np.frombuffer(part.rows, np.int64)
        numbers.append(first + here)
        values.append(np.frombuffer(part.values, dtype))
        first += part.shape[0]
    rows = np.concatenate(numbers)
    return JoinedRows(shape, dtype, Rows(rows, np.concatenate(values).reshape(len(rows), -1)))
