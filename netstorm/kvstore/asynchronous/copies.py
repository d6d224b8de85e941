"""States of blocks as bytes: what a rank keeps for owners, and how a state travels. Pure.

An owner ships a block's state, not the pushes that led to it. Rules may give other results when a push is
replayed (random draws, counts of all updates, a user's function), and of N ranks N gradients would travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.asynchronous.clocks import MOST_COUNTED
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import BlockCopy, CopyKept, CopyReleased, CopyWanted

__all__ = ["BlockState", "Copies", "about", "pieces_of"]

_AboutCopy = TypeVar("_AboutCopy", CopyKept, CopyReleased, CopyWanted)

_PIECE_BYTES: Final = 2**20
"""Size of a piece: far less than the largest message."""

_MOST_STATES: Final = 16
"""Bytes of a rule's states for a byte of values, at most: five arrays of float32 for float16..."""
_STATES_BESIDE: Final = 2**20
"""... and what does not grow with the values."""

Place = tuple[int, int]
"""A key's number, and the block's."""


@dataclass(slots=True, kw_only=True)
class BlockState:
    """A block's values, the state of its update rule, and which pushes are in both."""

    version: int
    """Number of pushes."""
    applied: list[int]
    """Those of each rank's present process."""
    begins: list[int]
    """See `BlockCopy.begins`."""
    values: Buffer
    states: bytes
    sender: int = -1
    """The rank that it has come from; -1: it is this rank's own."""

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left: another one counts from 0."""
        self.applied[rank] = 0
        self.begins[rank] = -1


def pieces_of(state: BlockState, key: int, block: int, *, view: int) -> Iterator[tuple[BlockCopy, Buffer]]:
    """Yield the messages, with an empty path, and payloads that carry a state."""
    whole = b"".join((memoryview(state.values).cast("B"), state.states))
    pieces = max(1, -(-len(whole) // _PIECE_BYTES))
    for piece in range(pieces):
        message = BlockCopy(
            path=(),
            hop=0,
            key=key,
            block=block,
            version=state.version,
            view=view,
            piece=piece,
            pieces=pieces,
            values=memoryview(state.values).nbytes,
            applied=tuple(state.applied),
            begins=tuple(state.begins),
        )
        yield message, memoryview(whole)[piece * _PIECE_BYTES : (piece + 1) * _PIECE_BYTES]


def about(kind: type[_AboutCopy], place: Place, version: int, view: int) -> _AboutCopy:
    """Return a message, with an empty path, about a version of a block."""
    return kind(path=(), hop=0, key=place[0], block=place[1], version=version, view=view)


@dataclass(slots=True)
class _Arriving:
    first: BlockCopy
    pieces: dict[int, bytes] = field(default_factory=dict)


class Copies:
    """The states that this rank keeps of blocks which others own, and those that are on their way here.

    Attributes:
        ranks: of the job.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks: Final = ranks
        self._kept: Final[dict[Place, BlockState]] = {}
        self._arriving: Final[dict[Place, _Arriving]] = {}

    def kept(self) -> Iterator[tuple[Place, BlockState]]:
        """Yield what is kept."""
        yield from self._kept.items()

    def get(self, place: Place) -> BlockState | None:
        """Return what is kept of a block."""
        return self._kept.get(place)

    def keep(self, place: Place, state: BlockState) -> None:
        """Keep a state in place of an earlier one."""
        self._kept[place] = state

    def drop(self, place: Place) -> None:
        """Keep a block's state no longer."""
        self._kept.pop(place, None)

    def forget(self, rank: int) -> None:
        """Record that a rank's process has left."""
        for state in self._kept.values():
            state.forget(rank)

    def interrupt(self, place: Place | None = None) -> None:
        """Drop what has arrived in part, of one block or all: it will be sent again, or something later."""
        if place is None:
            self._arriving.clear()
        else:
            self._arriving.pop(place, None)

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self._arriving.clear()

    def add(self, rank: int, message: BlockCopy, payload: Buffer | None, nbytes: int) -> BlockState | None:
        """Add a piece, from a rank, of the state of a block whose values have `nbytes`; return the state once
        it is whole.

        Raises:
            ProtocolViolation: no correct node sends it.
        """
        self._check(message, nbytes)
        data = b"" if payload is None else bytes(payload)
        if len(data) > _PIECE_BYTES:
            raise ProtocolViolation(
                f"piece {message.piece} of {_name(message)} has {len(data)} bytes: expected at most "
                f"{_PIECE_BYTES}"
            )
        place = message.key, message.block
        found = self._arriving.get(place)
        if found is None or found.first.version < message.version:
            found = self._arriving[place] = _Arriving(message)
        first = found.first
        if message.version < first.version:
            return None  # a later one has overtaken it
        if (message.pieces, message.applied, message.begins) != (first.pieces, first.applied, first.begins):
            raise ProtocolViolation(
                f"piece {message.piece} of {_name(message)} is one of {message.pieces} with pushes "
                f"{message.applied} from {message.begins} on: expected {first.pieces}, {first.applied} and "
                f"{first.begins}, as with the first that came"
            )
        found.pieces[message.piece] = data
        if len(found.pieces) < message.pieces:
            return None
        del self._arriving[place]
        whole = b"".join(found.pieces[piece] for piece in range(message.pieces))
        if len(whole) < nbytes:
            raise ProtocolViolation(
                f"{_name(message)} has {len(whole)} bytes: its values alone have {nbytes}"
            )
        return BlockState(
            version=message.version,
            applied=list(message.applied),
            begins=list(message.begins),
            values=memoryview(whole)[:nbytes],
            states=whole[nbytes:],
            sender=rank,
        )

    def _check(self, message: BlockCopy, nbytes: int) -> None:
        """Check the numbers in a message.

        Raises:
            ProtocolViolation: one of them is not what a correct node sends.
        """
        most = max(1, -(-(nbytes + _MOST_STATES * nbytes + _STATES_BESIDE) // _PIECE_BYTES))
        problem = ""
        if message.values != nbytes:
            problem = f"{message.values} bytes of values: the block has {nbytes}"
        elif not 0 < message.version <= MOST_COUNTED:
            problem = f"that version: expected one from 1 to {MOST_COUNTED}"
        elif not 0 <= message.piece < message.pieces <= most:
            problem = f"piece {message.piece} of {message.pieces}: expected at most {most}, counted from 0"
        elif len(message.applied) != self.ranks or len(message.begins) != self.ranks:
            problem = (
                f"counts of {len(message.applied)} and {len(message.begins)} ranks: the job has {self.ranks}"
            )
        elif min(message.applied) < 0 or sum(message.applied) > message.version:
            problem = f"pushes {message.applied} of each rank: expected counts, and no more than the version"
        elif not -1 <= min(message.begins) <= max(message.begins) <= MOST_COUNTED:
            problem = f"pushes counted from {message.begins}: expected numbers from -1 to {MOST_COUNTED}"
        if problem:
            raise ProtocolViolation(f"{_name(message)} comes with {problem}")


def _name(message: BlockCopy) -> str:
    return f"version {message.version} of block {message.block} of key {message.key}"
