"""A general node of a simulated cluster. The test plays the program that uses it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.compression.quantised import quantised
from netstorm.errors import NetStormError
from netstorm.kvstore.calls import Exchange, GroupCalls
from netstorm.kvstore.forms import Key, Quantised
from netstorm.kvstore.node import GeneralNode, State
from netstorm.kvstore.operations import Operation, ReceiveOperation, SendOperation
from netstorm.protocol.codecs import COLLECTIVE
from netstorm.protocol.messages import LossTerms
from netstorm.pslite.memory_network import Timeline
from netstorm.simulation.contribution import Contribution, contribution_of_rows, contribution_of_values
from netstorm.simulation.pending import Array, Pending
from netstorm.simulation.process import SimulatedProcess

__all__ = ["SimulatedNode"]


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
        self.joined: Final = self._ask("joining", lambda done, _: self.machine.requests.when_joined(done))

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
        return self.machine.state is State.OVER

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
        self.process.call(lambda now: self.machine.requests.register(key, now))
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
        self.process.call(lambda now: self.machine.requests.submit(operation, now))
        return pending

    def group(self, name: str, members: tuple[int, ...]) -> GroupCalls:
        """Return the calls of a process group that this node is in. Use one object a group."""

        def register(key_name: str, elements: int, ranks: tuple[int, ...]) -> Key:
            return self.register(key_name, (elements,), "float32", form=COLLECTIVE, members=ranks)

        return GroupCalls(name, members, size=len(self.machine.members), register=register)

    def call(self, group: GroupCalls, exchange: Exchange, timeout_s: float = math.inf) -> Pending:
        """Make the next call of a group. Its value is all segments of the destination, one after the
        other.
        """
        return self.call_operation(group, exchange, timeout_s)[0]

    def call_operation(
        self, group: GroupCalls, exchange: Exchange, timeout_s: float = math.inf
    ) -> tuple[Pending, Operation]:
        """Make a call as `call` does; return its operation, too, which says who has contributed."""
        pending = Pending(self.timeline, f"rank {self.rank}: {exchange.text} of group {group.name!r}")
        pending.collect_with(lambda: np.concatenate([got for got in exchange.destination if got is not None]))
        operation = group.operation(exchange, pending.done, timeout_s)
        self.pending.append(pending)
        self.process.call(lambda now: self.machine.requests.submit(operation, now))
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
        self.process.call(lambda now: self.machine.requests.submit(operation, now))
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
        self.process.call(lambda now: self.machine.requests.submit(operation, now))
        return pending

    def barrier(self) -> Pending:
        """Enter the next barrier."""
        return self._ask("barrier", self.machine.requests.barrier)

    def finish(self) -> Pending:
        """Push no more; completes when no other node needs this one."""
        return self._ask("finishing", self.machine.requests.finish)

    def fail(self, reason: str) -> None:
        """Report that this rank's program has failed."""
        self.process.call(lambda now: self.machine.requests.fail(reason, now))

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
