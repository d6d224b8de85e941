"""The training program of one process of a simulated job that nodes leave and join. Pure.

In each step it sums a few keys, makes collective calls and passes barriers, and computes its state from all
results. It offers its state to newcomers before each step; as a newcomer, it fetches it.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from netstorm.kvstore.calls import GroupCalls, Position, TensorExchange
from netstorm.kvstore.forms import Key, Quantised
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.state_transfer import StateSnapshot
from netstorm.lab.simulation.node import Array, Pending, SimulatedNode
from netstorm.protocol.codecs import ROW_SPARSE, Element, Reduction
from netstorm.protocol.frames import checksum, ranks_in

__all__ = ["ElasticProgram", "ExactValues", "KeyKind", "KeyUse", "ProgramPlan", "ResultChecks", "WrongResult"]


# What each rank of a simulated job contributes to each round, and the exact sum over any ranks.
#
# Values are small whole numbers, so that sums are exact in every type. They are windows of one long row of
# random numbers a rank, so they cost no time, and differ from rank to rank, key to key and round to round.

THRESHOLD: Final = 0.5
"""Of keys with gradient compression."""

_LARGEST: Final = 40
"""Largest value: sums of sixteen are exact in float16."""

_ROW: Final = 4099
"""Numbers a rank: prime, so that windows do not repeat soon."""


class KeyKind(enum.Enum):
    """How the values of a key travel."""

    DENSE = "dense"
    QUANTISED = "quantised"
    ROWS = "rows"
    INITIAL = "initial"
    """Dense, one round alone: the value of the lowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUse:
    """One key of a program."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: KeyKind = KeyKind.DENSE
    rounds: int = 1
    """In each step of the program."""

    def rounds_before(self, step: int) -> int:
        """Return how many rounds the steps before `step` have."""
        return min(step, 1) if self.kind is KeyKind.INITIAL else step * self.rounds

    def rounds_of(self, step: int) -> range:
        """Return which rounds of the key a step has."""
        return range(self.rounds_before(step), self.rounds_before(step + 1))


class ExactValues:
    """The contributions of all ranks of one job."""

    def __init__(self, seed: int, ranks: int) -> None:
        """Draw the numbers of `ranks` ranks; the same seed draws the same."""
        numbers = np.random.default_rng([seed, ranks])
        drawn = numbers.integers(1, _LARGEST + 1, (ranks, _ROW)) * numbers.choice((-1, 1), (ranks, _ROW))
        self._numbers: Final[npt.NDArray[np.int64]] = drawn.astype(np.int64)

    def of(self, key: KeyUse, rank: int, round: int) -> Array:
        """Return what a rank contributes to a round, as float64 or the key's own integers."""
        return self._whole(key, rank, round).astype(key.dtype).reshape(key.shape) * _unit(key)

    def total(self, key: KeyUse, ranks: Iterable[int], round: int) -> Array:
        """Return the right result of a round, flat: the exact sum over some ranks."""
        chosen = sorted(ranks)[:1] if key.kind is KeyKind.INITIAL else list(ranks)
        total = np.zeros(int(np.prod(key.shape)), np.int64)
        for rank in chosen:
            total += self._whole(key, rank, round)
        found: Array = total.astype(key.dtype) * _unit(key)
        return found

    def expected(
        self, key: KeyUse, contributors: Iterable[tuple[int, list[tuple[int, int]]]], round: int
    ) -> Array:
        """Return the right result of a round whose parts have different contributors.

        Args:
            key: the key.
            contributors: bit sets of ranks, each with the (start, end) of elements that are their sum.
            round: the round.
        """
        parts = list(contributors)
        if len(parts) == 1:
            return self.total(key, ranks_in(parts[0][0]), round)
        result = np.zeros(int(np.prod(key.shape)), key.dtype)
        for bits, spans in parts:
            total = self.total(key, ranks_in(bits), round)
            for start, end in spans:
                result[start:end] = total[start:end]
        return result

    def _whole(self, key: KeyUse, rank: int, round: int) -> npt.NDArray[np.int64]:
        size = int(np.prod(key.shape))
        seed = sum(map(ord, key.name))
        start = (seed * 977 + round * 131) % (_ROW - size)
        values = self._numbers[rank, start : start + size]
        if key.kind is KeyKind.QUANTISED:
            return values % 3 - 1
        if key.kind is KeyKind.ROWS:
            rows = values.reshape(key.shape[0], -1)
            chosen: npt.NDArray[np.int64] = np.where(rows[:, :1] % 3 == 0, rows, 0).ravel()
            return chosen
        return values


def _unit(key: KeyUse) -> Array:
    return np.asarray(THRESHOLD if key.kind is KeyKind.QUANTISED else 1, key.dtype)


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
        later = node.machine.needs_state
        if node.rank in plan.group and not later:
            self._some = node.group("some", plan.group)
        if later:
            pending = Pending(node.timeline, f"rank {node.rank}: the job's state")
            node.pending.append(pending)
            node.process.call(lambda now: node.machine.fetch_state(self._take, pending.done, now))
            pending.then(lambda: self._next_step() if self._goes_on(pending.error) else None)
        else:
            self.has_state = True
            self._next_step()

    def _take(self, snapshot: StateSnapshot) -> None:
        state = msgspec.msgpack.decode(bytes(snapshot.content), type=_State)
        self.step = self.fetched = snapshot.step
        self._checks.begin(self.node, snapshot.rounds)
        for key in self._plan.keys:
            self._sums[key.name] = np.frombuffer(state.sums[key.name]).reshape(key.shape).copy()
            self._keys[key.name].begin_at(key.rounds_before(self.step))
        if self._group is not None and state.calls is not None:
            self._group.go_on_at(state.calls)
        self.has_state = True

    def _snapshot(self) -> StateSnapshot:
        group = self._group
        content = msgspec.msgpack.encode(
            _State(
                {name: value.tobytes() for name, value in self._sums.items()},
                None if group is None else group.position(),
                self.node.rank if self._plan.states_differ else 0,
            )
        )
        rounds = {self._keys[key.name].identity: key.rounds_before(self.step) for key in self._plan.keys}
        requests = self.node.machine.live.state_requests
        return StateSnapshot(
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
        if node.machine.live.has_newcomers and not self._offering:
            self._offering, snapshot = True, self._snapshot()

            def offer() -> None:
                self._offering = False
                if self.running:
                    node.process.call(lambda now: node.machine.offer_state(snapshot, now))

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
        exchange: TensorExchange,
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

        exchange = TensorExchange(
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

        exchange = TensorExchange(
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

        exchange = TensorExchange(
            text="gather",
            reduction=Reduction.COPY,
            element=Element.BYTES,
            segment_bytes=mine.nbytes,
            source=tuple(mine.view(np.uint8) if place == self.node.rank else None for place in range(places)),
            destination=tuple(np.full(mine.nbytes, 0x5A, np.uint8) for _ in range(places)),
        )
        self._call(group, exchange, expected)


# Checks of all results of a simulated job that nodes leave and join.
#
# Every result at every rank is the exact sum of the contributors that it names, and the same, bit for bit, as
# at all ranks that are in the job. So is the state that programs compute from results. A process that is out,
# and has not been told so yet, may have results that nobody else has; it is never in the job again.


class WrongResult(AssertionError):
    """A result is not what it says that it is, or differs between ranks."""


class ResultChecks:
    """The checks of one job.

    Attributes:
        values: what ranks contribute.
        checked: how many results were checked.
        partial: how many of them name other contributors than all places of the job.
        mixed: how many of them have parts with different contributors.
    """

    def __init__(self, values: ExactValues, places: int, is_member: Callable[[SimulatedNode], bool]) -> None:
        """Begin without results.

        Args:
            values: what ranks contribute.
            places: most ranks of the job.
            is_member: returns whether a process is in the job, as the scheduler says.
        """
        self.values: Final = values
        self.checked = 0
        self.partial = 0
        self.mixed = 0
        self._is_member: Final = is_member
        self._all: Final = (1 << places) - 1
        self._seen: Final[dict[tuple[object, ...], list[tuple[SimulatedNode, int]]]] = {}
        self._begins: Final[dict[tuple[int, int], int]] = {}
        self._since: Final[dict[tuple[int, int], tuple[SimulatedNode, float]]] = {}
        """By rank and key: the first round to which this process has contributed."""

    def begin(self, node: SimulatedNode, rounds: Mapping[int, int]) -> None:
        """Record with which rounds, by key, the program of a newcomer begins."""
        self._begins.update({(id(node), key): first for key, first in rounds.items()})

    def result(
        self, node: SimulatedNode, key: KeyUse, round: int, operation: Operation, value: Array
    ) -> None:
        """Check one result.

        Raises:
            WrongResult: it is wrong.
        """
        self.checked += 1
        named = self._named(operation)
        where = f"round {round} of key {key.name!r} at rank {node.rank}"
        if sum(end - start for _, spans in named for start, end in spans) != value.size:
            raise WrongResult(
                f"{where} names the contributors of {operation.contributors}, not of all chunks"
            )
        if any(bits & ~self._all for bits, _ in named):
            raise WrongResult(f"{where} names ranks that the job never has: {self._text(named)}")
        expected = self.values.expected(key, named, round)
        if expected.tobytes() != value.ravel().tobytes():
            got = value.ravel()
            wrong = (expected != got).nonzero()[0][:8]
            raise WrongResult(
                f"{where} is not the sum of the ranks that it names, {self._text(named)}: elements "
                f"{wrong.tolist()} are {got[wrong].tolist()}, not {expected[wrong].tolist()}"
            )
        self._contributors(node, where, operation)
        self.same(node, ("result", key.name, round), value.tobytes() + self._text(named).encode())

    def call(
        self,
        node: SimulatedNode,
        what: tuple[str, int],
        operation: Operation,
        value: Array,
        expected: Callable[[set[int]], Array],
    ) -> None:
        """Check the result of a collective call, whose chunks may have different contributors.

        Args:
            node: at which it is.
            what: the call, and its step.
            operation: names the contributors.
            value: the result, flat, in float32.
            expected: returns the right result, if all chunks had these contributors.

        Raises:
            WrongResult: it is wrong.
        """
        self.checked += 1
        named = self._named(operation)
        where = f"{what[0]} of step {what[1]} at rank {node.rank}"
        right = np.full(value.size, np.nan, np.float32)
        for bits, spans in named:
            all_right = expected(set(ranks_in(bits)))
            for start, end in spans:
                right[start // 4 : end // 4] = all_right[start // 4 : end // 4]
        if right.tobytes() != value.tobytes():
            raise WrongResult(f"{where} is {value.tolist()}, not {right.tolist()}: {self._text(named)}")
        self._contributors(node, where, operation)
        self.same(node, ("call", *what), value.tobytes() + self._text(named).encode())

    def _contributors(self, node: SimulatedNode, where: str, operation: Operation) -> None:
        """Check that a rank that contributes goes on doing so, and count what is partial."""
        bits = set(operation.contributors)
        self.partial += bits != {self._all}
        self.mixed += len(bits) > 1
        own = [bool(one >> node.rank & 1) for one in bits]
        key = operation.key.identity
        known, first = self._since.get((node.rank, key), (node, math.inf))
        if known is not node:
            first = math.inf
        if operation.round > first + operation.key.rounds_under_way and not all(own):
            raise WrongResult(f"{where} is without this rank, which has contributed to round {first}")
        # Before it has caught up, the process that had the place before may be in a sum.
        after = self._begins.get((id(node), key), 0) + 2 * operation.key.rounds_under_way
        if any(own) and operation.round >= after and node.machine.live.contributes:
            self._since[node.rank, key] = node, min(first, operation.round)

    def same(self, node: SimulatedNode, what: tuple[object, ...], content: bytes) -> None:
        """Check that something is the same at all ranks that are in the job.

        Raises:
            WrongResult: it differs.
        """
        if not self._is_member(node):
            return
        seen, digest = self._seen.setdefault(what, []), checksum(content)
        for other, known in seen:
            if known != digest and other.alive and self._is_member(other):
                raise WrongResult(f"{what} differs between ranks {other.rank} and {node.rank}")
        seen.append((node, digest))

    @staticmethod
    def _named(operation: Operation) -> list[tuple[int, list[tuple[int, int]]]]:
        bounds = operation.key.layout_of(operation.form).bounds
        return [
            (bits, [bounds[chunk] for chunk in ranks_in(chunks)])
            for bits, chunks in sorted(operation.contributors.items())
        ]

    @staticmethod
    def _text(named: list[tuple[int, list[tuple[int, int]]]]) -> str:
        return "; ".join(f"{ranks_in(bits)} in {spans}" for bits, spans in named)
