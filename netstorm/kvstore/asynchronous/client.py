"""This rank's own pushes and pulls, in asynchronous training: requests to owners, and their answers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.errors import NotAuthorised, ProtocolViolation
from netstorm.kvstore.asynchronous.blocks import (
    AsynchronousOutbox,
    Owners,
    as_dense,
    check_counts,
    chunks_of,
    extent,
    form_of,
    payload_of,
)
from netstorm.kvstore.forms import Key, RowSparse
from netstorm.kvstore.operations import AsyncOperation, PullOperation, PushOperation, StatesOperation
from netstorm.observe.log import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import Applied, Pull, PullRows, PullStates, Push, States, Value
from netstorm.protocol.messages import AsynchronousMessage as Routed

__all__ = ["Requests"]

_MOST_PIECES: Final = 2**20
"""Of the states of one block, which are pieces of messages each."""


@dataclass(slots=True)
class _OpenRequest:
    """An operation under way."""

    operation: AsyncOperation
    missing: set[int]
    """Blocks that are not answered, of a push or of a pull of states; chunks, of any other pull."""
    pieces: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Pieces of incomplete states, by block."""


class Requests:
    """The open pushes and pulls of one rank. Their keys have been granted."""

    def __init__(
        self,
        owners: Owners,
        counters: Counters,
        routed: AsynchronousOutbox,
        *,
        later: bool = False,
        known_keys: int = 0,
        on_loss: Callable[[Key, int, int, int], None] | None = None,
    ) -> None:
        """Begin without operations.

        Args:
            owners: of blocks.
            counters: of the process.
            routed: takes messages, and completions.
            later: this process has joined a job that had begun. It counts its pushes and clocks from those
                of the slowest other rank, as it hears in the pulls before its first push.
            known_keys: how many keys the others had then: their values are with owners.
            on_loss: called if a value comes with fewer updates by others than one that was pulled in an
                earlier view: with the key, the block, and both numbers, the larger one first.
        """
        self._later: Final = later
        self._known_keys: Final = known_keys if later else 0
        self._on_loss: Final = on_loss
        self._pushed_keys: Final[set[Key]] = set()
        self._begins: Final[dict[int, int]] = {}
        """By key: what pushes are counted from."""
        self._clock_begins: Final[dict[int, int]] = {}
        """By namespace: what clocks are counted from."""
        self._owners: Final = owners
        self._counters: Final = counters
        self._routed: Final = routed
        self._pushes: dict[tuple[int, int], _OpenRequest] = {}
        self._pulls: dict[tuple[int, int], _OpenRequest] = {}
        self._unconfirmed: dict[int, dict[int, None]] = {}
        """By key: numbers of the pushes under way, rising."""
        self._begun: dict[int, int] = {}
        """By key: how many pushes have been begun."""
        self._seen: dict[tuple[int, int], int] = {}
        """By key and block: how many updates by others are in the newest value that was pulled."""
        self._seen_before: dict[tuple[int, int], int] = {}
        """The same of earlier views. Answers within a view may overtake each other."""

    def outstanding(self) -> Iterator[AsyncOperation]:
        """Yield the operations that are not complete."""
        for entry in (*self._pushes.values(), *self._pulls.values()):
            yield entry.operation

    def seen(self, key: Key, block: int) -> int | None:
        """Return how many updates by others are in the newest value of a block that was pulled; None: this
        process has joined later, and has pulled no value of a block that the others had before.
        """
        none = None if key.identity < self._known_keys else 0
        return self._seen.get((key.identity, block), none)

    def clear(self) -> None:
        """Drop all of them."""
        self._pushes.clear()
        self._pulls.clear()

    def has_pushes_before(self, namespace: int, clock: int) -> bool:
        """Return whether a push of an earlier clock of a store is not confirmed."""
        return any(
            isinstance(push.operation, PushOperation)
            and push.operation.key.spec.namespace == namespace
            and push.operation.clock < clock
            for push in self._pushes.values()
        )

    def send_again(self) -> None:
        """Send all that is not answered to those who own it now."""
        self._seen_before = dict(self._seen)
        requests = [*self._pushes.values(), *self._pulls.values()]
        for opened in sorted(requests, key=lambda request: request.operation.number):
            opened.pieces.clear()
            self._send_open(opened)

    def _send_open(self, opened: _OpenRequest) -> None:
        """Send the parts of an operation that are not answered."""
        operation = opened.operation
        if isinstance(operation, PushOperation):
            self._send_push(operation, opened.missing)
        elif isinstance(operation, StatesOperation):
            self._send_states_pull(operation, opened.missing)
        elif operation.rows is not None:
            self._send_rows_pull(operation, opened.missing)
        else:
            self._send_pull(operation, opened.missing)

    def _confirmed(self, key: Key) -> int:
        """Return how many of this rank's pushes of a key have been confirmed, without gaps."""
        oldest = next(iter(self._unconfirmed.get(key.identity, ())), None)
        return self._begun.get(key.identity, 0) if oldest is None else oldest

    # ---------------------------------------------------------------------------------------------- requests

    def begin(self, operation: AsyncOperation) -> None:
        """Send an operation to the owners."""
        key = operation.key
        if isinstance(operation, PushOperation):
            self._begun[key.identity] = operation.number + 1
            if self._later:
                self._pushed_keys.add(key)
            self._unconfirmed.setdefault(key.identity, {})[operation.number] = None
            self._open(self._pushes, operation, set(self._owners.blocks(key, whole=operation.whole)))
        elif isinstance(operation, StatesOperation):
            self._open(self._pulls, operation, set(self._owners.blocks(key, whole=operation.whole)))
        elif operation.rows is not None:
            self._open(self._pulls, operation, set(self._numbers_of_rows(operation)))
        else:
            self._open(self._pulls, operation, set(self._owners.blocks(key, whole=False)))

    def _send_push(self, push: PushOperation, blocks: Iterable[int]) -> None:
        key, codec, source = push.key, push.codec, push.source
        form = form_of(key, codec, push.threshold)
        if form is None:
            assert codec == RowSparse.codec, f"{push} in codec {codec}"
            codec, form, source = 0, key.form, as_dense(source, key)  # rows longer than a chunk
        confirmed = self._confirmed(key)
        for block in sorted(blocks):
            owner = self._owners.owner(key, block)
            for chunk in chunks_of(key, block, whole=push.whole):
                message = Push(
                    path=(),
                    hop=0,
                    key=key.identity,
                    chunk=chunk,
                    number=push.number,
                    seen=self._seen.get((key.identity, block), 0),
                    clock=push.clock,
                    dtype=key.spec.dtype,
                    rule=push.rule,
                    live=push.live,
                    priority=push.priority,
                    codec=codec,
                    threshold=push.threshold,
                    confirmed=confirmed,
                    begin=self._begins.get(key.identity, 0),
                )
                self._routed.send(owner, message, payload_of(form, source, *extent(key, chunk)))

    def _send_pull(self, pull: PullOperation, chunks: Iterable[int]) -> None:
        message = Pull(
            path=(),
            hop=0,
            key=pull.key.identity,
            number=pull.number,
            pushed=pull.pushed,
            least=self._least(pull),
            counted=pull.counted,
            priority=pull.priority,
            confirmed=self._confirmed(pull.key),
        )
        self._ask_owners(pull, message, chunks)

    def _numbers_of_rows(self, pull: PullOperation) -> dict[int, npt.NDArray[np.uint32]]:
        """Return the numbers of the rows to pull, within each chunk that has some."""
        key, rows = pull.key, pull.rows
        assert rows is not None
        length = key.row_length
        numbers = {}
        for chunk in self._owners.blocks(key, whole=False):
            start, end = extent(key, chunk)
            low, high = np.searchsorted(rows, (start // length, end // length))
            if low < high:
                numbers[chunk] = (rows[low:high] - start // length).astype("<u4")
        return numbers

    def _send_rows_pull(self, pull: PullOperation, chunks: Collection[int]) -> None:
        key, confirmed = pull.key, self._confirmed(pull.key)
        for chunk, numbers in self._numbers_of_rows(pull).items():
            if chunk not in chunks:
                continue
            message = PullRows(
                path=(),
                hop=0,
                key=key.identity,
                chunk=chunk,
                number=pull.number,
                pushed=pull.pushed,
                least=self._least(pull),
                counted=pull.counted,
                priority=pull.priority,
                confirmed=confirmed,
            )
            self._routed.send(self._owners.owner(key, _block(pull, chunk)), message, numbers)

    def _least(self, pull: PullOperation) -> int:
        """Return how many clocks of the other ranks a pull demands, as owners count them."""
        if pull.least is None:
            return 0
        key = pull.key
        begins = self._clock_begins.get(key.spec.namespace, 0) if pull.counted else None
        return pull.least + (self._begins.get(key.identity, 0) if begins is None else begins)

    def clock_begin(self, namespace: int) -> int:
        """Return what this rank's clocks of a store are counted from."""
        return self._clock_begins.get(namespace, 0)

    def _learn(self, key: Key, message: Value) -> None:
        """Record where the others are: this rank has just joined."""
        if key.identity not in self._begun:
            self._begins[key.identity] = max(message.slowest, self._begins.get(key.identity, 0))
        if not any(other.spec.namespace == key.spec.namespace for other in self._pushed_keys):
            namespace = key.spec.namespace
            self._clock_begins[namespace] = max(message.clock, self._clock_begins.get(namespace, 0))

    def _send_states_pull(self, pull: StatesOperation, blocks: Iterable[int]) -> None:
        message = PullStates(
            path=(),
            hop=0,
            key=pull.key.identity,
            number=pull.number,
            pushed=pull.pushed,
            priority=pull.priority,
            confirmed=self._confirmed(pull.key),
            with_values=pull.with_values,
        )
        self._ask_owners(pull, message, blocks)

    def _ask_owners(
        self, pull: PullOperation | StatesOperation, message: Pull | PullStates, parts: Iterable[int]
    ) -> None:
        """Send one message to each owner of these chunks or blocks."""
        owners = {self._owners.owner(pull.key, _block(pull, part)): None for part in sorted(parts)}
        if isinstance(pull, PullOperation) and pull.of_all:
            owners = dict.fromkeys(self._owners.ranks)
        for owner in owners:
            self._routed.send(owner, message)

    def _open(
        self, table: dict[tuple[int, int], _OpenRequest], operation: AsyncOperation, missing: set[int]
    ) -> None:
        """Begin an operation; it is complete at once if it concerns no owner."""
        if not missing:
            if table is self._pushes:
                del self._unconfirmed[operation.key.identity][operation.number]
            self._routed.complete(operation.done)
            return
        opened = table[operation.key.identity, operation.number] = _OpenRequest(operation, missing)
        self._send_open(opened)

    # --------------------------------------------------------------------------------------------- answers

    def applied(self, owner: int, message: Applied) -> None:
        """Record that an owner has applied a block of a push.

        Raises:
            NotAuthorised: the rank does not own the block.
        """
        opened = self._pushes.get((message.key, message.number))
        if opened is None or message.block not in opened.missing:
            self._counters.add("answers_known_before")
            return
        self._check_owner(owner, message, opened, message.block)
        if message.behind < 0:
            raise ProtocolViolation(
                f"rank {owner} counts {message.behind} updates by others: expected 0 or more"
            )
        self._counters.add("staleness_total", message.behind)
        self._counters.add("pushes_of_blocks")
        self._counters.add("staleness_max", max(0, message.behind - self._counters.get("staleness_max")))
        self._complete_part(self._pushes, opened, message.block)

    def value(self, owner: int, message: Value, payload: Buffer | None) -> None:
        """Write the values of a chunk that an owner has sent.

        Raises:
            ProtocolViolation: they are not what was requested, or the rank does not own them.
        """
        opened = self._pulls.get((message.key, message.number))
        if opened is None or message.chunk not in opened.missing:
            self._counters.add("answers_known_before")
            return
        pull = opened.operation
        self._check_owner(owner, message, opened, message.chunk)
        if not isinstance(pull, PullOperation):
            raise ProtocolViolation(f"rank {owner} sends values for {pull}")
        key = pull.key
        start, end = extent(key, message.chunk)
        if pull.rows is not None:
            length = key.row_length
            start, end = (
                int(place) * length for place in np.searchsorted(pull.rows, (start // length, end // length))
            )
        nbytes = 0 if payload is None else memoryview(payload).nbytes
        if message.dtype != key.spec.dtype or nbytes != (end - start) * key.dtype.itemsize:
            raise ProtocolViolation(
                f"chunk {message.chunk} of key {key.name!r} from rank {owner} has {nbytes} bytes of "
                f"{message.dtype}; it has {end - start} values of {key.spec.dtype}"
            )
        check_counts(message.slowest, message.clock)
        place = message.key, _block(pull, message.chunk)
        seen = self._seen_before.get(place, 0)
        if message.others < seen and self._on_loss is not None:
            self._on_loss(key, place[1], seen, message.others)
            return
        pull.destination[start:end] = np.frombuffer(payload, key.dtype) if payload is not None else 0
        if self._later:
            self._learn(key, message)
        self._seen[place] = max(message.others, self._seen.get(place, 0))
        self._complete_part(self._pulls, opened, message.chunk)

    def states(self, owner: int, message: States, payload: Buffer | None) -> None:
        """Record a piece of the states of a block that an owner has sent.

        Raises:
            ProtocolViolation: no states were requested, or the rank does not own the block.
        """
        opened = self._pulls.get((message.key, message.number))
        if opened is None or message.block not in opened.missing:
            self._counters.add("answers_known_before")
            return
        pull = opened.operation
        self._check_owner(owner, message, opened, message.block)
        if not isinstance(pull, StatesOperation):
            raise ProtocolViolation(f"rank {owner} sends states for {pull}")
        if not 0 <= message.piece < message.pieces <= _MOST_PIECES:
            raise ProtocolViolation(
                f"rank {owner} sends piece {message.piece} of {message.pieces} of its states: expected "
                f"one of at most {_MOST_PIECES}"
            )
        pieces = opened.pieces.setdefault(message.block, {})
        pieces[message.piece] = b"" if payload is None else bytes(payload)
        if len(pieces) >= message.pieces:
            pull.destination[message.block] = b"".join(pieces[number] for number in sorted(pieces))
            del opened.pieces[message.block]
            self._complete_part(self._pulls, opened, message.block)

    def _check_owner(self, rank: int, message: Routed, opened: _OpenRequest, part: int) -> None:
        """Check that an answer comes from the owner of a block or chunk."""
        operation = opened.operation
        if isinstance(operation, PullOperation) and operation.of_all:
            return
        owner = self._owners.owner(operation.key, _block(operation, part))
        if rank != owner:
            raise NotAuthorised(
                f"rank {rank} sends {type(message).__name__} about chunk {part} of key "
                f"{opened.operation.key.name!r}, which rank {owner} owns"
            )

    def _complete_part(
        self, table: dict[tuple[int, int], _OpenRequest], opened: _OpenRequest, part: int
    ) -> None:
        opened.missing.remove(part)
        if not opened.missing:
            operation = opened.operation
            del table[operation.key.identity, operation.number]
            if table is self._pulls:
                self._counters.add("pulls")
            else:
                del self._unconfirmed[operation.key.identity][operation.number]
            self._routed.complete(operation.done)

    # ------------------------------------------------------------------------------------------- for people

    def waiting_text_of(self, operation: AsyncOperation) -> str:
        """Return what an operation waits for, for a person."""
        table = self._pushes if isinstance(operation, PushOperation) else self._pulls
        opened = table.get((operation.key.identity, operation.number))
        if opened is None:
            return f"{operation}: it waits for the scheduler's answer"
        blocks = {_block(operation, part) for part in opened.missing}
        whom = self._owners.waited_for(operation.key, blocks)
        return f"{operation}: {len(opened.missing)} parts wait for {whom}"


def _block(operation: AsyncOperation, chunk: int) -> int:
    return 0 if operation.whole else chunk
