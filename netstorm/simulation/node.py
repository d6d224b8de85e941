"""A general node of a simulated cluster, with the program that uses it played by the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from netstorm.compression.rows import Rows
from netstorm.compression.two_bit import quantised
from netstorm.errors import NetStormError
from netstorm.kvstore.node.general_node import GeneralNode, State
from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.values.form import Form
from netstorm.kvstore.values.key import Key
from netstorm.kvstore.values.quantised import Quantised
from netstorm.kvstore.values.row_sparse import RowParts
from netstorm.protocol.chunks import ROW_SPARSE, row_length
from netstorm.pslite.clock.virtual_time import Timeline
from netstorm.simulation.process import SimulatedProcess

__all__ = ["Pending", "SimulatedNode"]

Array = npt.NDArray[Any]


class Pending:
    """Something that a node was asked for. It ends well or with an error, once."""

    def __init__(self, timeline: Timeline, what: str) -> None:
        self.what: Final = what
        self.began_at: Final = timeline.now
        self.ended_at: float | None = None
        """Virtual time."""
        self.error: Exception | None = None
        self.value: Array | None = None
        """The sum, for an all-reduce; a copy, made the moment it was complete."""
        self._timeline = timeline
        self._collect: Callable[[], Array] | None = None
        self._then: list[Callable[[], None]] = []

    @property
    def ended(self) -> bool:
        """Whether it has ended, well or not."""
        return self.ended_at is not None

    @property
    def ended_well(self) -> bool:
        """Whether it has ended without an error."""
        return self.ended_at is not None and self.error is None

    def result(self) -> Array:
        """Return the sum.

        Raises:
            NetStormError: why there is none.
        """
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` when this has ended, at the same virtual time."""
        if self.ended:
            self._timeline.after(0.0, action)
        else:
            self._then.append(action)

    def collect_with(self, function: Callable[[], Array]) -> None:
        """Take the value from `function` when this ends well."""
        self._collect = function

    def done(self, error: Exception | None) -> None:
        """Note the end. What the real runtime's futures do."""
        if self.ended_at is not None:
            raise AssertionError(f"{self.what} ended twice: {self.error!r}, then {error!r}")
        self.ended_at, self.error = self._timeline.now, error
        if self._collect is not None and error is None:
            self.value = self._collect()
        for action in self._then:
            self._timeline.after(0.0, action)

    def __repr__(self) -> str:
        """Return how it stands, for failing tests."""
        end = "open" if self.ended_at is None else f"ended at {self.ended_at:.6f}: {self.error!r}"
        return f"<{self.what}, asked at {self.began_at:.6f}, {end}>"


class SimulatedNode:
    """Rank `rank`, if it has joined. Times are virtual."""

    def __init__(self, rank: int, timeline: Timeline, process: SimulatedProcess[GeneralNode]) -> None:
        self.rank: Final = rank
        """The rank that it asks for."""
        self.process: Final = process
        self.machine: Final = process.machine
        self.keys: Final[dict[str, Key]] = {}
        self.residuals: Final[dict[str, npt.NDArray[np.float32]]] = {}
        """What gradient compression has kept back of each key."""
        self.pending: Final[list[Pending]] = []
        """Everything it was ever asked for."""
        self._timeline: Final = timeline
        self.joined: Final = self._ask("joining", lambda done, _: self.machine.requests.when_joined(done))

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process.alive

    @property
    def failure(self) -> NetStormError | None:
        """Why nothing works any more at this node; None while it does."""
        return self.machine.failure

    @property
    def over(self) -> bool:
        """Whether it has left the job in good order."""
        return self.machine.state is State.OVER

    def register(
        self, name: str, shape: tuple[int, ...], dtype: str, *, namespace: int = 0, form: int = 0
    ) -> Key:
        """Make a key known to the job; `form` is its codec."""
        key = self.keys[name] = Key(namespace, name, shape, dtype, form=form)
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
    ) -> Pending:
        """Begin an all-reduce of `values`, the next round of key `name`, which is registered if it is new.

        When it ends, the memory that was given to the node is overwritten: nothing may read it any more.

        Args:
            name: of the key.
            values: this rank's contribution.
            priority: larger goes first.
            rule: fingerprint of what is done with the sum.
            in_place: the sum is written to where the contribution was.
            threshold: of gradient compression; None: plain values.
            as_rows: push the rows of a matrix that are not all zeros.
        """
        key = self.keys.get(name)
        if key is None:
            codec = 0 if threshold is None else Quantised.codec
            key = self.register(name, values.shape, values.dtype.name, form=codec)
        source = np.array(values, order="C").ravel()
        destination = source if in_place else np.empty_like(source)
        pending = Pending(self._timeline, f"rank {self.rank}: round {key.last_taken + 1} of key {name!r}")
        parts: RowParts = []

        def collect() -> Array:
            for first, rows in parts:
                destination.reshape(len(values), -1)[first + rows.numbers] = rows.values
            found = destination.reshape(values.shape).copy()
            source.view(np.uint8).fill(0xA5)
            destination.view(np.uint8).fill(0x5A)
            return found

        pending.collect_with(collect)
        form: Form = key.form
        contribution: Any = source
        arrives: Any = destination
        if as_rows:
            matrix = source.reshape(values.shape[0], row_length(values.shape))
            numbers = np.flatnonzero(matrix.any(axis=1))
            contribution, form, arrives = Rows(numbers, matrix[numbers]), key.forms[ROW_SPARSE], parts
            destination.fill(0)
        if threshold is not None:
            form = Quantised(threshold, len(self.machine.members))
            residual = self.residuals.setdefault(name, np.zeros(source.size, np.float32))
            contribution = quantised(source, residual, np.float32(threshold))
        operation = Operation(
            key=key,
            round=key.take_round(),
            source=contribution,
            destination=arrives,
            done=pending.done,
            priority=priority,
            rule=rule,
            form=form,
        )
        self.pending.append(pending)
        self.process.call(lambda now: self.machine.requests.submit(operation, now))
        return pending

    def barrier(self) -> Pending:
        """Come to the next barrier."""
        return self._ask("barrier", self.machine.requests.barrier)

    def finish(self) -> Pending:
        """Push no more; ends when nobody needs this node."""
        return self._ask("finishing", self.machine.requests.finish)

    def fail(self, reason: str) -> None:
        """Say that this rank's program has failed."""
        self.process.call(lambda now: self.machine.requests.fail(reason, now))

    def describe(self) -> str:
        """Say how this node is and what it waits for, for a person."""
        if not self.alive:
            return f"rank {self.rank} is dead"
        text = f"rank {self.rank} is {self.machine.state.value}"
        if self.failure is not None:
            return f"{text} and has failed: {type(self.failure).__name__}: {self.failure}"
        waits = [pending.what.partition(": ")[2] for pending in self.pending if not pending.ended]
        more = f" and {len(waits) - 3} more" if len(waits) > 3 else ""
        return f"{text}, waits for {', '.join(waits[:3]) or 'nothing'}{more}"

    def _ask(self, what: str, ask: Callable[[Callable[[Exception | None], None], float], None]) -> Pending:
        pending = Pending(self._timeline, f"rank {self.rank}: {what}")
        self.pending.append(pending)
        self.process.call(lambda now: ask(pending.done, now))
        return pending
