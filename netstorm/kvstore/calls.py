"""The collective calls of one process group at one rank, as operations on a few keys. Pure.

The n-th call of a group is the n-th at every member. A call's bytes choose its key, and the key's next round
carries it out. So calls of about the same size follow each other, and others overtake them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from netstorm.errors import UsageError
from netstorm.kvstore.operations.allreduce import Call, Done, Operation
from netstorm.kvstore.values.collective import Collective, Segments
from netstorm.kvstore.values.elements import STORED
from netstorm.kvstore.values.key import Key
from netstorm.protocol.collectives import (
    MOST_BYTES,
    MOST_SEGMENTS,
    Element,
    Reduction,
    Signature,
    can_reduce,
    capacity_of,
)
from netstorm.protocol.messages import LossTerms

__all__ = ["Exchange", "GroupCalls", "Position"]


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Where the calls of one group are."""

    called: int
    """How many have been made."""
    rounds: dict[int, int]
    """By capacity of a key, or another number that tells it from the others: its next round."""
    agreed: dict[int, list[float]] = {}
    """By key, of the sums that are made by a codec: what that has agreed on (`compression.codec`)."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """What a call does: all members give the same `text`, `reduction`, `element` and `segment_bytes`."""

    text: str
    """Name, types and shapes of the call, as error messages show it."""
    reduction: Reduction
    element: Element
    segment_bytes: int
    source: Segments
    """What this rank contributes to each segment. Must stay unchanged until the call is done."""
    destination: Segments
    """Where each segment's result goes; may be the source's memory."""
    receivers: tuple[int, ...] = ()
    """For each segment: the only member, counted within the group, that wants its result. Empty: all want
    all."""
    priority: int = 0
    loss: LossTerms | None = None
    """The result may be without late contributions; see `Operation.loss`."""


class GroupCalls:
    """Numbers the calls of one group, in the order of the program."""

    def __init__(
        self, name: str, members: tuple[int, ...], *, size: int, register: Callable[..., Key]
    ) -> None:
        """Begin without calls.

        Args:
            name: of the group, the same at every member.
            members: its ranks in the job, by rank within the group.
            size: ranks of the job.
            register: registers a key: its name, elements, and members (none: all ranks).
        """
        self.name: Final = name
        self.members: Final = members
        self.called = 0
        """How many calls have been made."""
        self._key_members: Final = () if len(members) == size else tuple(sorted(members))
        self._register: Final = register
        self._keys: Final[dict[int, Key]] = {}
        self._first: dict[int, int] = {}
        """By capacity of a key that is not registered yet: its first round here."""

    @property
    def of_all_ranks(self) -> bool:
        """Whether all ranks of the job are members."""
        return not self._key_members

    def position(self) -> Position:
        """Return where the calls are. None may be under way."""
        rounds = dict(self._first) | {capacity: key.last_taken + 1 for capacity, key in self._keys.items()}
        return Position(self.called, dict(sorted(rounds.items())))

    def go_on_at(self, position: Position) -> None:
        """Go on where another member is: this rank has joined later."""
        self.called = position.called
        self._first = dict(position.rounds)
        for capacity, key in self._keys.items():
            key.begin_at(position.rounds.get(capacity, 0))

    def next_rounds(self) -> dict[int, int]:
        """Return the next round of each key that has been granted, by the key's number."""
        return {key.identity: key.last_taken + 1 for key in self._keys.values() if key.identity >= 0}

    def operation(self, exchange: Exchange, done: Done, timeout_s: float = math.inf) -> Operation:
        """Return the next call as an operation. Call it on the thread that runs the program.

        Args:
            exchange: what to do.
            done: see `Operation`.
            timeout_s: the longest wait for its end; reaching it ends the job.

        Raises:
            UsageError: values that cannot be reduced so, or more than a call can have.
        """
        if not exchange.segment_bytes:
            exchange = _of_one_element(exchange)
        if not can_reduce(exchange.reduction, exchange.element):
            raise UsageError(
                f"{exchange.text}: {exchange.element.name.lower()} has no {exchange.reduction.name.lower()}"
            )
        segments = len(exchange.source)
        if segments > MOST_SEGMENTS or exchange.segment_bytes > MOST_BYTES:
            raise UsageError(
                f"{exchange.text}: {segments} parts of {exchange.segment_bytes} bytes are more than one call "
                f"can have: {MOST_SEGMENTS} of {MOST_BYTES}"
            )
        form = Collective(Signature(exchange.reduction, exchange.element, segments, exchange.segment_bytes))
        call = Call(self.name, self.called, exchange.text, self.members, timeout_s)
        self.called += 1
        key = self._key(segments * exchange.segment_bytes)
        return Operation(
            key=key,
            round=key.take_round(),
            source=exchange.source,
            destination=exchange.destination,
            done=done,
            priority=exchange.priority,
            loss=exchange.loss,
            form=form,
            receivers=tuple(1 << self.members[index] for index in exchange.receivers),
            call=call,
        )

    def _key(self, size: int) -> Key:
        capacity = capacity_of(size)
        key = self._keys.get(capacity)
        if key is None:
            key = self._register(f"{self.name}/{capacity}", capacity, self._key_members)
            key.begin_at(self._first.get(capacity, 0))
            self._keys[capacity] = key
        return key


def _of_one_element(exchange: Exchange) -> Exchange:
    """Return what carries out a call of empty tensors: one element each, which nobody sees.

    A call of nothing would be over at once, also where the others' tensors are not empty. So it meets theirs.
    """
    dtype = STORED[exchange.element]

    def stand_ins(segments: Segments) -> Segments:
        return tuple(None if values is None else np.zeros(1, dtype) for values in segments)

    return msgspec.structs.replace(
        exchange,
        segment_bytes=dtype.itemsize,
        source=stand_ins(exchange.source),
        destination=stand_ins(exchange.destination),
    )
