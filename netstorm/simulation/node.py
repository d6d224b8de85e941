"""A general node of a simulated cluster. The test plays the program that uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from netstorm.compression.two_bit import quantised
from netstorm.errors import NetStormError
from netstorm.kvstore.node.general_node import GeneralNode, State
from netstorm.kvstore.operations.allreduce import Operation
from netstorm.kvstore.values.key import Key
from netstorm.kvstore.values.quantised import Quantised
from netstorm.pslite.clock.virtual_time import Timeline
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
        self._timeline: Final = timeline
        self.joined: Final = self._ask("joining", lambda done, _: self.machine.on_joined(done))

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
        self, name: str, shape: tuple[int, ...], dtype: str, *, namespace: int = 0, form: int = 0
    ) -> Key:
        """Register a key with the job; `form` is its codec."""
        key = self.keys[name] = Key(namespace, name, shape, dtype, form=form)
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
        """
        key = self.keys.get(name)
        if key is None:
            codec = 0 if threshold is None else Quantised.codec
            key = self.register(name, values.shape, values.dtype.name, form=codec)
        pending = Pending(self._timeline, f"rank {self.rank}: round {key.last_taken + 1} of {name}")
        if threshold is not None:
            contribution = self._quantised(key, values, threshold, in_place=in_place)
        elif as_rows:
            contribution = contribution_of_rows(key, values)
        else:
            contribution = contribution_of_values(key, values, in_place=in_place)
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
            form=Quantised(threshold, len(self.machine.members)),
            sent=quantised(source, residual, np.float32(threshold)),
        )

    def _ask(self, what: str, ask: Callable[[Callable[[Exception | None], None], float], None]) -> Pending:
        pending = Pending(self._timeline, f"rank {self.rank}: {what}")
        self.pending.append(pending)
        self.process.call(lambda now: ask(pending.done, now))
        return pending
