"""A general node of a simulated cluster. The test plays the program that uses it: what it gives to a sum,
and operations that complete later in virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from netstorm.compression.quantised import quantised
from netstorm.compression.sparse import Rows
from netstorm.errors import NetStormError
from netstorm.kvstore.calls import GroupCalls, TensorExchange
from netstorm.kvstore.forms import Form, Key, Quantised, RowParts, Values
from netstorm.kvstore.node import GeneralNode, NodeState
from netstorm.kvstore.operations import Operation, ReceiveOperation, SendOperation
from netstorm.lab.simulation.memory_network import Timeline
from netstorm.lab.simulation.process import SimulatedProcess
from netstorm.protocol.codecs import ROW_SPARSE, row_length
from netstorm.protocol.messages import LossTerms

__all__ = ["Array", "Pending", "SimulatedNode"]


# A general node of a simulated cluster. The test plays the program that uses it.


class SimulatedNode:
    """A node that asks for a rank, and what it was asked for. Times are virtual."""

    def __init__(self, rank: int, timeline: Timeline, process: SimulatedProcess[GeneralNode]) -> None:
        self.rank: Final = rank
        """The rank that this node asks for."""
        self.process: Final = process
        self.machine: Final = process.machine
        self.keys: Final[dict[str, Key]] = {}
        self.residuals: Final[dict[str, npt.NDArray[np.float32]]] = {}
        """Residual of gradient compression, by key."""
        self.pending: Final[list[Pending]] = []
        """All operations of this node, in order."""
        self.operations: Final[list[Operation]] = []
        """What was pushed, in order."""
        self.timeline: Final = timeline
        self.joined: Final = self._ask("joining", lambda done, _: self.machine.when_joined(done))

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process.alive

    @property
    def failure(self) -> NetStormError | None:
        """Why this node has failed; None: it has not."""
        return self.machine.failure

    @property
    def has_left(self) -> bool:
        """Whether this node has left the job without a failure."""
        return self.machine.state is NodeState.OVER

    def register(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        *,
        namespace: int = 0,
        form: int = 0,
        members: tuple[int, ...] = (),
    ) -> Key:
        """Register a key with the job; `form` is its codec, `members` the ranks that push it (none: all)."""
        key = self.keys[name] = Key(namespace, name, shape, dtype, form=form, members=members)
        self.process.call(lambda now: self.machine.register(key, now))
        return key

    def push(
        self,
        name: str,
        values: Array,
        *,
        priority: int = 0,
        rule: str = "",
        in_place: bool = False,
        threshold: float | None = None,
        as_rows: bool = False,
        from_lowest: bool = False,
        loss: LossTerms | None = None,
    ) -> Pending:
        """Begin an all-reduce of `values`, the next round of key `name`, which is registered if it is new.

        When it completes, the node's source and destination are overwritten: nothing may read them any more.

        Args:
            name: of the key.
            values: this rank's contribution.
            priority: larger is sent first.
            rule: fingerprint of the update rule that is applied to the sum.
            in_place: the sum is written to where the contribution was.
            threshold: of gradient compression; None: plain values.
            as_rows: push the rows of a matrix that are not all zeros.
            from_lowest: the result is the contribution of the lowest rank of the job, as an initial value.
            loss: the round may end without some contributions. `values` is changed: what was counted becomes
                zero. None: it waits for all.
        """
        key = self.keys.get(name)
        if key is None:
            codec = 0 if threshold is None else Quantised.codec
            key = self.register(name, values.shape, values.dtype.name, form=codec)
        pending = Pending(self.timeline, f"rank {self.rank}: round {key.last_taken + 1} of key {name!r}")
        if threshold is not None:
            contribution = self._quantised(key, values, threshold, in_place=in_place)
        elif as_rows:
            contribution = contribution_of_rows(key, values)
        else:
            contribution = contribution_of_values(key, values, in_place=in_place, kept=loss is not None)
        pending.collect_with(contribution.collect)
        operation = Operation(
            key=key,
            round=key.take_round(),
            source=contribution.source,
            destination=contribution.destination,
            done=pending.done,
            priority=priority,
            rule=rule,
            form=contribution.form,
            from_lowest=from_lowest,
            loss=loss,
        )
        self.operations.append(operation)
        self.pending.append(pending)
        self.process.call(lambda now: self.machine.submit(operation, now))
        return pending

    def group(self, name: str, members: tuple[int, ...]) -> GroupCalls:
        """Return the calls of a process group that this node is in. Use one object a group."""
        return GroupCalls(name, members, size=len(self.machine.members), register=self.register)

    def call(self, group: GroupCalls, exchange: TensorExchange, timeout_s: float = math.inf) -> Pending:
        """Make the next call of a group. Its value is all segments of the destination, one after the
        other.
        """
        return self.call_operation(group, exchange, timeout_s)[0]

    def call_operation(
        self, group: GroupCalls, exchange: TensorExchange, timeout_s: float = math.inf
    ) -> tuple[Pending, Operation]:
        """Make a call as `call` does; return its operation, too, which says who has contributed."""
        pending = Pending(self.timeline, f"rank {self.rank}: {exchange.text} of group {group.name!r}")
        targets = [got for got in exchange.destination if got is not None] or [np.empty(0, np.uint8)]
        pending.collect_with(lambda: np.concatenate(targets))
        operation = group.operation(exchange, pending.done, timeout_s)
        self.pending.append(pending)
        self.process.call(lambda now: self.machine.submit(operation, now))
        return pending, operation

    def send(self, peer: int, values: Array, *, tag: int = 0, channel: str = "world") -> Pending:
        """Begin to send `values` to a rank. When it completes, they are overwritten where they were sent
        from: nothing may read them any more.
        """
        pending = Pending(self.timeline, f"rank {self.rank}: a message to rank {peer} (tag {tag})")
        source = np.array(values, order="C").reshape(-1).view(np.uint8)
        pending.collect_with(lambda: _overwritten(source))
        operation = SendOperation(
            peer=peer,
            channel=channel,
            tag=tag,
            source=source,
            what=f"{values.dtype.name} {values.shape}",
            done=pending.done,
        )
        self.pending.append(pending)
        self.process.call(lambda now: self.machine.submit(operation, now))
        return pending

    def receive(
        self,
        peer: int,
        shape: tuple[int, ...],
        dtype: str = "float32",
        *,
        tag: int = 0,
        channel: str = "world",
        peers: tuple[int, ...] = (),
    ) -> Pending:
        """Begin to receive an array from a rank, or (-1) from any of `peers`. Its result is the array."""
        pending = Pending(self.timeline, f"rank {self.rank}: a message from rank {peer} (tag {tag})")
        destination = np.zeros(shape, dtype)
        pending.collect_with(destination.copy)
        operation = ReceiveOperation(
            peer=peer,
            channel=channel,
            tag=tag,
            destination=destination.reshape(-1).view(np.uint8),
            what=f"{destination.dtype.name} {destination.shape}",
            done=pending.done,
            peers=peers,
        )
        self.pending.append(pending)
        self.process.call(lambda now: self.machine.submit(operation, now))
        return pending

    def barrier(self) -> Pending:
        """Enter the next barrier."""
        return self._ask("barrier", self.machine.barrier)

    def finish(self) -> Pending:
        """Push no more; completes when no other node needs this one."""
        return self._ask("finishing", self.machine.finish)

    def fail(self, reason: str) -> None:
        """Report that this rank's program has failed."""
        self.process.call(lambda now: self.machine.fail(reason, now))

    def describe(self) -> str:
        """Return the state of this node, and what it waits for, for a person."""
        if not self.alive:
            return f"rank {self.rank} is dead"
        text = f"rank {self.rank} is {self.machine.state.value}"
        if self.failure is not None:
            return f"{text} and has failed: {type(self.failure).__name__}: {self.failure}"
        waits = [pending.what.partition(": ")[2] for pending in self.pending if not pending.ended]
        more = f" and {len(waits) - 3} more" if len(waits) > 3 else ""
        return f"{text}, waits for {', '.join(waits[:3]) or 'nothing'}{more}"

    def _quantised(self, key: Key, values: Array, threshold: float, *, in_place: bool) -> Contribution:
        """Return a contribution under gradient compression; what it leaves out is added to the next one."""
        source = np.array(values, order="C").ravel()
        residual = self.residuals.setdefault(key.name, np.zeros(source.size, np.float32))
        return contribution_of_values(
            key,
            values,
            in_place=in_place,
            form=Quantised(threshold),
            sent=quantised(source, residual, np.float32(threshold)),
        )

    def _ask(self, what: str, ask: Callable[[Callable[[Exception | None], None], float], None]) -> Pending:
        pending = Pending(self.timeline, f"rank {self.rank}: {what}")
        self.pending.append(pending)
        self.process.call(lambda now: ask(pending.done, now))
        return pending


def _overwritten(source: npt.NDArray[np.uint8]) -> Array:
    """Overwrite memory that the node must not read any more, and return it."""
    source[:] = 0xA5
    return source


# An operation of a simulated node that completes later in virtual time.

Array: TypeAlias = npt.NDArray[Any]


class Pending:
    """An operation of a node. It completes once, with a result or an error."""

    def __init__(self, timeline: Timeline, what: str) -> None:
        self.what: Final = what
        self.began_at: Final = timeline.now
        self.ended_at: float | None = None
        """Virtual time."""
        self.error: Exception | None = None
        self.value: Array | None = None
        """Result of an all-reduce or a pull: a copy, made when it was complete."""
        self._timeline = timeline
        self._collect: Callable[[], Array] | None = None
        self._then: list[Callable[[], None]] = []

    @property
    def ended(self) -> bool:
        """Whether it has completed, with a result or an error."""
        return self.ended_at is not None

    @property
    def ended_well(self) -> bool:
        """Whether it has completed without an error."""
        return self.ended_at is not None and self.error is None

    def result(self) -> Array:
        """Return the value.

        Raises:
            NetStormError: why there is none.
        """
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` at the virtual time at which this completes, or now."""
        if self.ended:
            self._timeline.after(0.0, action)
        else:
            self._then.append(action)

    def collect_with(self, function: Callable[[], Array]) -> None:
        """Call `function` for the value when this completes without an error."""
        self._collect = function

    def done(self, error: Exception | None) -> None:
        """Record the completion, as the futures of the real runtime do."""
        if self.ended_at is not None:
            raise AssertionError(f"{self.what} ended twice: {self.error!r}, then {error!r}")
        self.ended_at, self.error = self._timeline.now, error
        if self._collect is not None and error is None:
            self.value = self._collect()
        for action in self._then:
            self._timeline.after(0.0, action)

    def __repr__(self) -> str:
        """Return the state as text, for failing tests."""
        end = "open" if self.ended_at is None else f"ended at {self.ended_at:.6f}: {self.error!r}"
        return f"<{self.what}, asked at {self.began_at:.6f}, {end}>"


# What a simulated node gives to an all-reduce, and where the result goes; one function a form.


@dataclass(frozen=True, slots=True)
class Contribution:
    """Source and destination of one all-reduce, as its form has them."""

    source: Values
    destination: Values
    form: Form
    collect: Callable[[], Array]
    """Returns a copy of the result. It then overwrites source and destination, so that a late read shows."""


def contribution_of_values(
    key: Key,
    values: Array,
    *,
    in_place: bool = False,
    form: Form | None = None,
    sent: Values | None = None,
    kept: bool = False,
) -> Contribution:
    """Return the contribution of an array.

    Args:
        key: of the all-reduce.
        values: this rank's array, which is copied.
        in_place: the result overwrites the copy.
        form: the key's own if None.
        sent: `values` as `form` has them; None: the array itself.
        kept: the node changes the array itself, which keeps what was not counted.
    """
    source = values.reshape(-1) if kept else np.array(values, order="C").ravel()
    destination = source if in_place else np.empty_like(source)

    def collect() -> Array:
        result = destination.reshape(values.shape).copy()
        _overwrite(destination if kept else source, destination)
        return result

    return Contribution(source if sent is None else sent, destination, form or key.form, collect)


def contribution_of_rows(key: Key, values: Array) -> Contribution:
    """Return the contribution of those rows of a matrix that are not all zeros."""
    source = np.array(values, order="C").ravel()
    destination = np.zeros_like(source)
    matrix = source.reshape(values.shape[0], row_length(values.shape))
    numbers = np.flatnonzero(matrix.any(axis=1))
    parts: RowParts = []

    def collect() -> Array:
        for first, rows in parts:
            destination.reshape(len(values), -1)[first + rows.numbers] = rows.values
        result = destination.reshape(values.shape).copy()
        _overwrite(source, destination)
        return result

    return Contribution(Rows(numbers, matrix[numbers]), parts, key.forms[ROW_SPARSE], collect)


def _overwrite(source: Array, destination: Array) -> None:
    source.view(np.uint8).fill(0xA5)
    destination.view(np.uint8).fill(0x5A)
