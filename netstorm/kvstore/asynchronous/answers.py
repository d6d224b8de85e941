"""An owner's answers to pulls: values, rows, or the states of its update rule. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.asynchronous.block import Block, WaitingPull
from netstorm.kvstore.asynchronous.owners import extent, has_whole_rows
from netstorm.kvstore.asynchronous.staleness import Staleness
from netstorm.kvstore.values.key import Key
from netstorm.protocol.chunks import row_length
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import PullRows, PullStates, States, Value

__all__ = ["Answer", "requested_rows", "states_for", "values_for", "wants_states"]

Answer = tuple[int, Value | States, Buffer]
"""The receiver's rank, a message with an empty path, and its payload."""

_PIECE_BYTES: Final = 2**20
"""Size of a piece of states: far less than the largest message."""


def wants_states(waiting: WaitingPull) -> bool:
    """Return whether a pull asks for states, not for values."""
    return isinstance(waiting.pull, PullStates)


def requested_rows(pull: PullRows, payload: Buffer | None, key: Key) -> np.typing.NDArray[np.int64]:
    """Return which rows of a chunk a pull asks for.

    Raises:
        ProtocolViolation: no correct node asks for these.
    """
    size = 0 if payload is None else memoryview(payload).nbytes
    assert key.layout is not None
    if (
        payload is not None
        and size
        and size % 4 == 0
        and 0 <= pull.chunk < key.layout.chunks
        and has_whole_rows(key)
    ):
        numbers = np.frombuffer(payload, "<u4").astype(np.int64)
        start, end = extent(key, pull.chunk)
        if (numbers[1:] > numbers[:-1]).all() and numbers[-1] < (end - start) // row_length(key.spec.shape):
            return numbers
    raise ProtocolViolation(
        f"a pull of rows of chunk {pull.chunk} of key {key.name!r} that the chunk does not have"
    )


def values_for(block: Block, ready: Iterable[WaitingPull], staleness: Staleness) -> Iterator[Answer]:
    """Yield the answers to the pulls that wait for the value in `block.snapshot`."""
    key = block.key
    assert block.snapshot is not None
    value = np.frombuffer(block.snapshot, key.dtype)
    first = extent(key, block.chunks[0])[0]
    for waiting in ready:
        slowest, clock = staleness.slowest(block, waiting.rank)
        for chunk in block.chunks if waiting.rows is None else (waiting.chunk,):
            start, end = extent(key, chunk)
            part = value[start - first : end - first]
            if waiting.rows is not None:
                part = part.reshape(-1, row_length(key.spec.shape))[waiting.rows].reshape(-1)
            message = Value(
                path=(),
                hop=0,
                key=key.identity,
                chunk=chunk,
                number=waiting.pull.number,
                others=block.others_shown(waiting.rank),
                dtype=key.spec.dtype,
                priority=waiting.pull.priority,
                slowest=slowest,
                clock=clock,
            )
            yield waiting.rank, message, part


def states_for(block: Block, ready: Iterable[WaitingPull], values: Buffer, states: bytes) -> Iterator[Answer]:
    """Yield the answers to the pulls that wait for the states of a block; `values` belong to them."""
    both = b"".join((memoryview(values).cast("B"), states))
    for waiting in ready:
        whole = both if isinstance(waiting.pull, PullStates) and waiting.pull.with_values else states
        pieces = max(1, -(-len(whole) // _PIECE_BYTES))
        for piece in range(pieces):
            message = States(
                path=(),
                hop=0,
                key=block.key.identity,
                block=block.number,
                number=waiting.pull.number,
                piece=piece,
                pieces=pieces,
                priority=waiting.pull.priority,
            )
            yield waiting.rank, message, whole[piece * _PIECE_BYTES : (piece + 1) * _PIECE_BYTES]
