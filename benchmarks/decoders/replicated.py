"""States of blocks that owners in asynchronous training send to other ranks, piece by piece."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any, Final

import msgspec
import numpy as np

from decoders.wire import PACK_ERRORS, pack, unpack
from netstorm.errors import ProtocolViolation
from netstorm.kvstore.asynchronous.blocks import BlockCopies, BlockState, pieces_of
from netstorm.lab.testing.decoders import FuzzTarget, mutate_bytes, mutate_value
from netstorm.protocol.messages import BlockCopy

__all__ = ["TARGETS"]

_RANKS: Final = 3
_NBYTES: Final = 48
"""Of a block's values."""

_PIECES: Final = msgspec.msgpack.Decoder(list[tuple[BlockCopy, bytes | None]])


def _decode(data: bytes) -> Hashable:
    """Add pieces as a replica does; keep each whole state, let a rank leave, and send the state on."""
    try:
        pieces = _PIECES.decode(data)
    except PACK_ERRORS:
        return "no input of this target"
    copies = BlockCopies(_RANKS)
    whole = 0
    for message, payload in pieces[:16]:
        state = copies.add(1, message, None if payload is None else bytearray(payload), _NBYTES)
        if state is None:
            continue
        whole += 1
        _use(copies, (message.key, message.block), state)
    return whole, len(pieces)


def _use(copies: BlockCopies, place: tuple[int, int], state: BlockState) -> None:
    copies.keep(place, state)
    copies.forget(1)
    state.version += 1  # a new owner goes on from it
    again, received = BlockCopies(_RANKS), None
    for message, payload in pieces_of(state, *place, view=2):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=BlockCopy)
        received = again.add(0, sent, payload, _NBYTES)
    if received is None or bytes(received.values) != bytes(state.values) or received.states != state.states:
        raise AssertionError(f"version {state.version} is another one at the next rank: {received}")
    np.frombuffer(received.values, np.float32)


def _inputs() -> list[bytes]:
    state = BlockState(
        version=9,
        applied=[4, 0, 5],
        begins=[0, -1, 3],
        values=np.arange(_NBYTES // 4, dtype=np.float32).tobytes(),
        states=b"states of a rule",
    )
    whole = [[unpack(pack(message)), bytes(payload)] for message, payload in pieces_of(state, 1, 2, view=1)]
    return [pack(whole), pack(_in_two(whole[0])), pack(_in_two(whole[0])[::-1])]


def _in_two(piece: list[Any]) -> list[list[Any]]:
    """Return a state that comes in one piece as two."""
    fields, payload = piece
    number, count = (BlockCopy.__struct_fields__.index(name) + 1 for name in ("piece", "pieces"))
    made = []
    for at in range(2):
        body = list(fields)
        body[number], body[count] = at, 2
        made.append([body, payload[at * 40 : (at + 1) * 40]])
    return made


def _mutate(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Mostly change one piece, or put pieces of two inputs together."""
    try:
        value, another = unpack(data), unpack(other)
        kind = chance.random()
        if kind < 0.2:
            value += another
            chance.shuffle(value)
        elif kind < 0.8:
            piece = chance.choice(value)
            if chance.random() < 0.2:
                piece[1] = mutate_bytes(chance, piece[1] or b"", another[0][1] or b"")
            else:
                piece[0] = mutate_value(chance, piece[0], another[0][0])
        else:
            value = mutate_value(chance, value, another)
        return pack(value)
    except (*PACK_ERRORS, IndexError, KeyError, AttributeError):
        return mutate_bytes(chance, data, other)


TARGETS: Final = (
    FuzzTarget(
        name="copies",
        decode=_decode,
        allowed=(ProtocolViolation,),
        seeds=_inputs,
        mutate=_mutate,
    ),
)
