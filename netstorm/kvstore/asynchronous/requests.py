"""This rank's own pushes and pulls, in asynchronous training: requests to owners, and their answers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.asynchronous.gradients import as_dense, form_of, payload_of
from netstorm.kvstore.asynchronous.owners import Owners, chunks_of, extent
from netstorm.kvstore.operations.allreduce import Done
from netstorm.kvstore.operations.asynchronous import (
    AsyncOperation,
    PullOperation,
    PushOperation,
    StatesOperation,
)
from netstorm.kvstore.values.row_sparse import RowSparse
from netstorm.observe.counters import Counters
from netstorm.protocol.chunks import row_length
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import Applied, Pull, PullRows, PullStates, Push, Routed, States, Value

__all__ = ["Requests"]


@dataclass(slots=True)
class _Open:
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
        *,
        send: Callable[[int, Routed, Buffer | None], None],
        complete: Callable[[Done, Exception | None], None],
    ) -> None:
        """Begin without operations.

        Args:
            owners: of blocks.
            counters: of the process.
            send: sends a message (with an empty path) and a payload to a rank, which may be this one.
            complete: calls an operation's `done`, soon.
        """
        self._owners: Final = owners
        self._counters: Final = counters
        self._send: Final = send
        self._complete: Final = complete
        self._pushes: dict[tuple[int, int], _Open] = {}
        self._pulls: dict[tuple[int, int], _Open] = {}
        self._seen: dict[tuple[int, int], int] = {}
        """By key and block: how many updates by others are in the value that was pulled last."""

    def outstanding(self) -> Iterator[AsyncOperation]:
        """Yield the operations that are not complete."""
        for entry in (*self._pushes.values(), *self._pulls.values()):
            yield entry.operation

    def clear(self) -> None:
        """Drop all of them."""
        self._pushes.clear()
        self._pulls.clear()

    # ---------------------------------------------------------------------------------------------- requests

    def begin(self, operation: AsyncOperation) -> None:
        """Send an operation to the owners."""
        if isinstance(operation, PushOperation):
            self._push(operation)
        elif isinstance(operation, StatesOperation):
            self._pull_states(operation)
        elif operation.rows is not None:
            self._pull_rows(operation)
        else:
            self._pull(operation)

    def _push(self, push: PushOperation) -> None:
        key, codec, source = push.key, push.codec, push.source
        form = form_of(key, codec, push.threshold)
        if form is None:
            assert codec == RowSparse.codec, f"{push} in codec {codec}"
            codec, form, source = 0, key.form, as_dense(source, key)  # rows longer than a chunk
        blocks = self._owners.blocks(key, whole=push.whole)
        if not self._open(self._pushes, push, set(blocks)):
            return
        for block in blocks:
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
                )
                self._send(owner, message, payload_of(form, source, *extent(key, chunk)))

    def _pull(self, pull: PullOperation) -> None:
        message = Pull(
            path=(),
            hop=0,
            key=pull.key.identity,
            number=pull.number,
            pushed=pull.pushed,
            least=pull.least,
            counted=pull.counted,
            priority=pull.priority,
        )
        self._ask_owners(pull, message, set(self._owners.blocks(pull.key, whole=False)))

    def _pull_rows(self, pull: PullOperation) -> None:
        key, rows = pull.key, pull.rows
        assert rows is not None
        length = row_length(key.spec.shape)
        wanted = {}
        for chunk in self._owners.blocks(key, whole=False):
            start, end = extent(key, chunk)
            low, high = np.searchsorted(rows, (start // length, end // length))
            if low < high:
                wanted[chunk] = (rows[low:high] - start // length).astype("<u4")
        if not self._open(self._pulls, pull, set(wanted)):
            return
        for chunk, numbers in wanted.items():
            message = PullRows(
                path=(),
                hop=0,
                key=key.identity,
                chunk=chunk,
                number=pull.number,
                pushed=pull.pushed,
                least=pull.least,
                counted=pull.counted,
                priority=pull.priority,
            )
            self._send(self._owners.owner(key, _block(pull, chunk)), message, numbers)

    def _pull_states(self, pull: StatesOperation) -> None:
        message = PullStates(
            path=(),
            hop=0,
            key=pull.key.identity,
            number=pull.number,
            pushed=pull.pushed,
            priority=pull.priority,
        )
        self._ask_owners(pull, message, set(self._owners.blocks(pull.key, whole=pull.whole)))

    def _ask_owners(
        self, pull: PullOperation | StatesOperation, message: Pull | PullStates, missing: set[int]
    ) -> None:
        """Send one message to each owner of a key."""
        if self._open(self._pulls, pull, missing):
            for owner in self._owners.count(pull.key, whole=pull.whole):
                self._send(owner, message, None)

    def _open(
        self, table: dict[tuple[int, int], _Open], operation: AsyncOperation, missing: set[int]
    ) -> bool:
        """Record an operation; return False if it is complete, since it concerns no owner."""
        if missing:
            table[operation.key.identity, operation.number] = _Open(operation, missing)
        else:
            self._complete(operation.done, None)
        return bool(missing)

    # --------------------------------------------------------------------------------------------- answers

    def applied(self, message: Applied) -> None:
        """Record that an owner has applied a block of a push."""
        found = self._pushes.get((message.key, message.number))
        if found is None or message.block not in found.missing:
            self._counters.add("answers_known_before")
            return
        self._counters.add("staleness_total", message.behind)
        self._counters.add("pushes_of_blocks")
        most = self._counters.get("staleness_max")
        if message.behind > most:
            self._counters.add("staleness_max", message.behind - most)
        self._complete_part(self._pushes, found, message.block)

    def value(self, owner: int, message: Value, payload: Buffer | None) -> None:
        """Write the values of a chunk that an owner has sent.

        Raises:
            ProtocolViolation: they are not what was requested.
        """
        found = self._pulls.get((message.key, message.number))
        if found is None or message.chunk not in found.missing:
            self._counters.add("answers_known_before")
            return
        pull = found.operation
        if not isinstance(pull, PullOperation):
            raise ProtocolViolation(f"rank {owner} sends values for {pull}")
        key = pull.key
        start, end = extent(key, message.chunk)
        if pull.rows is not None:
            length = row_length(key.spec.shape)
            start, end = (
                int(place) * length for place in np.searchsorted(pull.rows, (start // length, end // length))
            )
        nbytes = 0 if payload is None else memoryview(payload).nbytes
        if message.dtype != key.spec.dtype or nbytes != (end - start) * key.dtype.itemsize:
            raise ProtocolViolation(
                f"chunk {message.chunk} of key {key.name!r} from rank {owner} has {nbytes} bytes of "
                f"{message.dtype}; it has {end - start} values of {key.spec.dtype}"
            )
        pull.destination[start:end] = np.frombuffer(payload, key.dtype) if payload is not None else 0
        place = message.key, _block(pull, message.chunk)
        self._seen[place] = max(message.others, self._seen.get(place, 0))
        self._complete_part(self._pulls, found, message.chunk)

    def states(self, owner: int, message: States, payload: Buffer | None) -> None:
        """Record a piece of the states of a block that an owner has sent.

        Raises:
            ProtocolViolation: no states were requested.
        """
        found = self._pulls.get((message.key, message.number))
        if found is None or message.block not in found.missing:
            self._counters.add("answers_known_before")
            return
        pull = found.operation
        if not isinstance(pull, StatesOperation):
            raise ProtocolViolation(f"rank {owner} sends states for {pull}")
        pieces = found.pieces.setdefault(message.block, {})
        pieces[message.piece] = b"" if payload is None else bytes(payload)
        if len(pieces) >= message.pieces:
            pull.destination[message.block] = b"".join(pieces[number] for number in sorted(pieces))
            del found.pieces[message.block]
            self._complete_part(self._pulls, found, message.block)

    def _complete_part(self, table: dict[tuple[int, int], _Open], found: _Open, part: int) -> None:
        found.missing.remove(part)
        if not found.missing:
            operation = found.operation
            del table[operation.key.identity, operation.number]
            if table is self._pulls:
                self._counters.add("pulls")
            self._complete(operation.done, None)

    # ------------------------------------------------------------------------------------------- for people

    def waiting_text_of(self, operation: AsyncOperation) -> str:
        """Return what an operation waits for, for a person."""
        table = self._pushes if isinstance(operation, PushOperation) else self._pulls
        found = table.get((operation.key.identity, operation.number))
        if found is None:
            return f"{operation}: it waits for the scheduler's answer"
        owners = {self._owners.owner(operation.key, _block(operation, part)) for part in found.missing}
        return f"{operation}: {len(found.missing)} parts wait for their owners, ranks {sorted(owners)}"


def _block(operation: AsyncOperation, chunk: int) -> int:
    return 0 if operation.whole else chunk
