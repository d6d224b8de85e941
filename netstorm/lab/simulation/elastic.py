"""The training program of one process of a simulated job that nodes leave and join. Pure.

In each step it sums a few keys, makes collective calls and passes barriers, and computes its state from all
results. It offers its state to newcomers before each step; as a newcomer, it fetches it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from netstorm.kvstore.calls import Exchange, GroupCalls, Position
from netstorm.kvstore.forms import Key, Quantised
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.state_transfer import Snapshot
from netstorm.protocol.codecs import ROW_SPARSE, Element, Reduction
from netstorm.protocol.frames import checksum, ranks_in
from netstorm.simulation.elastic.checks import ResultChecks
from netstorm.simulation.elastic.values import THRESHOLD, KeyKind, KeyUse
from netstorm.simulation.node import SimulatedNode
from netstorm.simulation.pending import Array, Pending

__all__ = ["ElasticProgram", "ProgramPlan"]

_FORMS: Final = {KeyKind.QUANTISED: Quantised.codec, KeyKind.ROWS: ROW_SPARSE}

_IDLE_S: Final = 0.2
"""How often a program that has ended looks for newcomers."""


def _at_once(_rank: int, _step: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPlan:
    """What a program does: the same at all ranks."""

    keys: tuple[KeyUse, ...]
    steps: int
    places: int
    """Most ranks of the job."""
    calls: bool = False
    """Each step has an average, a broadcast and a gather of all ranks."""
    group: tuple[int, ...] = ()
    """Ranks of which those that have begun with the job make an average of their own in each step."""
    barrier_every: int = 0
    """Steps; 0: there are no barriers."""
    pause_s: Callable[[int, int], float]
    """Returns how long a rank computes before a step."""
    offer_s: Callable[[int, int], float] = _at_once
    """Returns how long a rank takes to make its state, as it is before a step, ready for newcomers."""
    states_differ: bool = False
    """The states of ranks differ in some part, so a newcomer gets that of one of them."""

    def barriers_before(self, step: int) -> int:
        """Return how many barriers the steps before `step` have."""
        return step // self.barrier_every if self.barrier_every else 0


class _State(msgspec.Struct, array_like=True):
    """What a newcomer gets."""

    sums: dict[str, bytes]
    calls: Position | None
    rank: int
    """Whose it is, if that makes a difference; else 0."""


class ElasticProgram:
    """The program of one process.

    Attributes:
        node: its node.
        step: the next one.
        has_state: the step and the sums are the job's.
        done: it has made all its steps.
        error: what has ended it; None: nothing.
        fetched: the step from which it went on, as a newcomer; None: it has begun with the job.
    """

    def __init__(
        self,
        node: SimulatedNode,
        plan: ProgramPlan,
        checks: ResultChecks,
        *,
        after: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """Begin once the node has joined.

        Args:
            node: its node.
            plan: what it does.
            checks: check all results.
            after: calls a function after some virtual seconds.
        """
        self.node: Final = node
        self.step = 0
        self.has_state = False
        self.done = False
        self.error: Exception | None = None
        self.fetched: int | None = None
        self._plan: Final = plan
        self._checks: Final = checks
        self._after: Final = after
        self._sums: Final = {key.name: np.zeros(key.shape) for key in plan.keys}
        self._keys: Final[dict[str, Key]] = {}
        self._group: GroupCalls | None = None
        self._some: GroupCalls | None = None
        self._left = 0
        self._offering = False
        self._results: Final[dict[tuple[str, int], Array]] = {}
        """Of this step."""
        node.joined.then(self._joined)

    @property
    def running(self) -> bool:
        """Whether its process is alive, and nothing has ended it."""
        return self.node.alive and self.error is None

    def _joined(self) -> None:
        node, plan = self.node, self._plan
        if not self._goes_on(node.joined.error):
            return
        for key in plan.keys:
            self._keys[key.name] = node.register(key.name, key.shape, key.dtype, form=_FORMS.get(key.kind, 0))
        if plan.calls:
            self._group = node.group("world", tuple(range(plan.places)))
        later = node.machine.requests.needs_state
        if node.rank in plan.group and not later:
            self._some = node.group("some", plan.group)
        if later:
            pending = Pending(node.timeline, f"rank {node.rank}: the job's state")
            node.pending.append(pending)
            node.process.call(lambda now: node.machine.requests.fetch_state(self._take, pending.done, now))
            pending.then(lambda: self._next_step() if self._goes_on(pending.error) else None)
        else:
            self.has_state = True
            self._next_step()

    def _take(self, snapshot: Snapshot) -> None:
        state = msgspec.msgpack.decode(bytes(snapshot.content), type=_State)
        self.step = self.fetched = snapshot.step
        self._checks.begin(self.node, snapshot.rounds)
        for key in self._plan.keys:
            self._sums[key.name] = np.frombuffer(state.sums[key.name]).reshape(key.shape).copy()
            self._keys[key.name].begin_at(key.rounds_before(self.step))
        if self._group is not None and state.calls is not None:
            self._group.go_on_at(state.calls)
        self.has_state = True

    def _snapshot(self) -> Snapshot:
        group = self._group
        content = msgspec.msgpack.encode(
            _State(
                {name: value.tobytes() for name, value in self._sums.items()},
                None if group is None else group.position(),
                self.node.rank if self._plan.states_differ else 0,
            )
        )
        rounds = {self._keys[key.name].identity: key.rounds_before(self.step) for key in self._plan.keys}
        requests = self.node.machine.requests.live.state_requests
        return Snapshot(
            step=self.step,
            content=content,
            crc=checksum(content),
            rounds=rounds | ({} if group is None else group.next_rounds()),
            barriers=self._plan.barriers_before(self.step),
            requests=requests,
        )

    def _goes_on(self, error: Exception | None) -> bool:
        self.error = self.error or error or self.node.failure
        return self.running

    def _offer(self) -> None:
        node = self.node
        if node.machine.requests.live.has_newcomers and not self._offering:
            self._offering, snapshot = True, self._snapshot()

            def offer() -> None:
                self._offering = False
                if self.running:
                    node.process.call(lambda now: node.machine.requests.offer_state(snapshot, now))

            self._after(self._plan.offer_s(node.rank, self.step), offer)

    # --------------------------------------------------------------------------------------------- one step

    def _next_step(self) -> None:
        if not self._goes_on(None):
            return
        if self.step >= self._plan.steps:
            self.done = True
            self._offer()
            self._after(_IDLE_S, self._next_step)
            return
        self._after(self._plan.pause_s(self.node.rank, self.step), self._begin)

    def _begin(self) -> None:
        if not self._goes_on(None):
            return
        self._offer()
        self._left = 1
        for number, key in enumerate(self._plan.keys):
            for round in key.rounds_of(self.step):
                self._push(number, key, round)
        if self._group is not None:
            self._average(self._group)
            self._broadcast(self._group)
            self._gather(self._group)
        if self._some is not None:
            self._average(self._some, self._lead)
        self._one_less()

    def _push(self, number: int, key: KeyUse, round: int) -> None:
        self._left += 1
        node = self.node
        pending = node.push(
            key.name,
            self._checks.values.of(key, node.rank, round),
            priority=-number,
            threshold=THRESHOLD if key.kind is KeyKind.QUANTISED else None,
            as_rows=key.kind is KeyKind.ROWS,
            from_lowest=key.kind is KeyKind.INITIAL,
        )
        pending.then(functools.partial(self._summed, key, round, pending, node.operations[-1]))

    def _summed(self, key: KeyUse, round: int, pending: Pending, operation: Operation) -> None:
        if not self._goes_on(pending.error):
            return
        value = pending.result()
        self._checks.result(self.node, key, round, operation, value)
        self._results[key.name, round] = value
        self._one_less()

    def _one_less(self) -> None:
        self._left -= 1
        if self._left:
            return
        every = self._plan.barrier_every
        if every and (self.step + 1) % every == 0:
            pending = self.node.barrier()
            pending.then(lambda: self._end_step() if self._goes_on(pending.error) else None)
        else:
            self._end_step()

    def _end_step(self) -> None:
        for name, round in sorted(self._results):
            sums = self._sums[name]
            sums *= 0.5
            sums += self._results[name, round]
        self._results.clear()
        content = b"".join(value.tobytes() for value in self._sums.values())
        self._checks.same(self.node, ("state", self.step), content)
        self.step += 1
        self._next_step()

    # ------------------------------------------------------------------------------------- collective calls

    def _call(
        self,
        group: GroupCalls,
        exchange: Exchange,
        expected: Callable[[set[int]], Array],
        then: Callable[[set[int]], None] | None = None,
    ) -> None:
        """Make a call; `then` is called with the ranks that are in all of its result."""
        self._left += 1
        pending, operation = self.node.call_operation(group, exchange)
        step = self.step

        def ended() -> None:
            if not self._goes_on(pending.error):
                return
            value = np.frombuffer(pending.result().tobytes(), np.float32)
            self._checks.call(self.node, (exchange.text, step), operation, value, expected)
            if then is not None:
                then(set(ranks_in(functools.reduce(operator.and_, operation.contributors))))
            self._one_less()

        pending.then(ended)

    def _average(self, group: GroupCalls, then: Callable[[set[int]], None] | None = None) -> None:
        name = f"average of {group.name}"
        key, step = KeyUse(name=name, shape=(9,)), self.step
        values = self._checks.values.of(key, self.node.rank, step)

        def expected(ranks: set[int]) -> Array:
            return self._checks.values.total(key, ranks, step) / np.float32(len(ranks))

        exchange = Exchange(
            text=name,
            reduction=Reduction.AVERAGE,
            element=Element.FLOAT32,
            segment_bytes=values.nbytes,
            source=(values,),
            destination=(np.full_like(values, np.nan),),
        )
        self._call(group, exchange, expected, then)

    def _lead(self, ranks: set[int]) -> None:
        """Have the lowest of the ranks that were in the group's last result give the others its values. If it
        has died meanwhile, the next one does: what a rank calls depends on results alone.
        """
        group, leader = self._some, min(ranks)
        assert group is not None
        self._copy(group, "values", leader, 1, lambda found: None if leader in found else self._lead(found))

    def _broadcast(self, group: GroupCalls) -> None:
        """Broadcast from the place whose turn it is; while no process has it, everybody gets zeros."""
        self._copy(group, "broadcast", self.step % self._plan.places, 5)

    def _copy(
        self,
        group: GroupCalls,
        name: str,
        source: int,
        elements: int,
        then: Callable[[set[int]], None] | None = None,
    ) -> None:
        key, step = KeyUse(name=name, shape=(elements,)), self.step
        values = self._checks.values.of(key, self.node.rank, step)

        def expected(ranks: set[int]) -> Array:
            return self._checks.values.total(key, ranks & {source}, step)

        exchange = Exchange(
            text=f"{name} from {source}",
            reduction=Reduction.COPY,
            element=Element.BYTES,
            segment_bytes=values.nbytes,
            source=(values.view(np.uint8) if self.node.rank == source else None,),
            destination=(np.full(values.nbytes, 0x5A, np.uint8),),
        )
        self._call(group, exchange, expected, then)

    def _gather(self, group: GroupCalls) -> None:
        key, step, places = KeyUse(name="gather", shape=(4,)), self.step, self._plan.places
        mine = self._checks.values.of(key, self.node.rank, step)

        def expected(ranks: set[int]) -> Array:
            return np.concatenate(
                [self._checks.values.total(key, ranks & {rank}, step) for rank in range(places)]
            )

        exchange = Exchange(
            text="gather",
            reduction=Reduction.COPY,
            element=Element.BYTES,
            segment_bytes=mine.nbytes,
            source=tuple(mine.view(np.uint8) if place == self.node.rank else None for place in range(places)),
            destination=tuple(np.full(mine.nbytes, 0x5A, np.uint8) for _ in range(places)),
        )
        self._call(group, exchange, expected)
