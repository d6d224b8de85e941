"""The state of an elastic job, as frontends give it to ranks that join later, or get it.

A newcomer fetches the state of one step; the others offer theirs before a step. See `state_transfer`.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from netstorm import clock
from netstorm.errors import ProtocolViolation, UsageError, WaitTimeout
from netstorm.kvstore.asynchronous.blocks import block_extent
from netstorm.kvstore.forms import Array, Key
from netstorm.kvstore.membership import StepsRequest
from netstorm.kvstore.operations import Pushes, RoundTimes, StatesOperation
from netstorm.kvstore.process.runtime import Runtime, future_end
from netstorm.kvstore.state_transfer import StateSnapshot
from netstorm.protocol.frames import Buffer, checksum
from netstorm.protocol.messages import StepTimes

__all__ = [
    "HeldKey",
    "Newcomer",
    "SavingRank",
    "StepPacer",
    "collect_from_owners",
    "fetch_state",
    "offer_state",
    "wait_for_enough_nodes",
]


_log = logging.getLogger(__name__)

_SLICE_S: Final = 0.2
"""Blocking waits are cut into slices, so that Python's signal handlers run."""
_REPORT_S: Final = 10.0
"""How often a wait is reported."""
_PROGRESS: Final = "state_bytes_fetched"


def offer_state(
    runtime: Runtime,
    step: int,
    content: Buffer,
    rounds: Mapping[int, int],
    requests: frozenset[int] | None,
    *,
    barriers: int = 0,
) -> None:
    """Offer this rank's state; from any thread.

    Args:
        runtime: of this process.
        step: of the program; ranks that offer the same step offer the same bytes.
        content: the state; it must not change any more.
        rounds: by key, the first round of the step.
        requests: those that there were before the state was made; it answers them alone. None: the
            program has ended, and it answers all, also those of ranks that come later.
        barriers: how many the program has passed.
    """
    snapshot = StateSnapshot(
        step=step,
        content=content,
        crc=checksum(content),
        rounds=dict(rounds),
        barriers=barriers,
        requests=requests,
    )
    _log.info("the state before step %d is offered to newcomers: %d bytes", step, snapshot.nbytes)
    runtime.post(lambda node, now: node.offer_state(snapshot, now))


def fetch_state(runtime: Runtime) -> StateSnapshot:
    """Wait for the state of a step, and return it.

    Raises:
        WaitTimeout: nothing has come for too long; names the ranks that have not answered.
        NetStormError: the job has failed.
    """
    runtime.check()
    _log.warning("rank %d has joined a job that trains already: it fetches the job's state", runtime.rank)
    begun = clock.monotonic()
    found: list[StateSnapshot] = []
    future, done = future_end()
    runtime.post(lambda node, now: node.fetch_state(found.append, done, now))
    _wait_for_state(runtime, future, begun)
    snapshot = found[0]
    _log.warning(
        "rank %d has the job's state before step %d: %.1f MB in %.1f s",
        runtime.rank,
        snapshot.step,
        snapshot.nbytes / 1e6,
        clock.monotonic() - begun,
    )
    return snapshot


def _wait_for_state(runtime: Runtime, future: concurrent.futures.Future[None], begun: float) -> None:
    limit_s = runtime.settings.wait_for_nodes_s
    progress, since, reported = -1.0, begun, begun
    while not concurrent.futures.wait([future], _SLICE_S).done:
        runtime.check()
        now, fetched = clock.monotonic(), runtime.counters.snapshot().get(_PROGRESS, 0)
        if fetched != progress:
            progress, since = fetched, now
        if now - reported >= _REPORT_S:
            reported = now
            _log.warning("still waiting for %s", _waiting_text(runtime))
        if now - since > limit_s:
            raise WaitTimeout(
                f"rank {runtime.rank} has got nothing of the job's state for {limit_s:g} s "
                f"(NETSTORM_WAIT_FOR_NODES): it waits for {_waiting_text(runtime)}"
            )
    future.result()


def _waiting_text(runtime: Runtime) -> str:
    text: concurrent.futures.Future[str] = concurrent.futures.Future()
    runtime.post(lambda node, _: text.set_result(node.live.waiting_text()))
    try:
        return text.result(timeout=1.0) or "the scheduler"
    except concurrent.futures.TimeoutError:
        return "its own I/O thread"


# How many local steps this node takes before each exchange: it measures, reports, and gets the answer.


class StepPacer:
    """ESync's side of one node, for one training.

    In a round: `steps` says how many steps to take. The program calls `round_ends` when it has asked for the
    last one; the others may be called later, by whoever carries steps and exchange out: `exchange_begins`
    when the steps are done, and `exchange_ends` when the average is here.
    """

    def __init__(self, runtime: Runtime, *, least: int, most: int) -> None:
        """Begin before the first step. The n-th pacer of every process is of the same training.

        Args:
            runtime: of this process.
            least: fewest local steps of a round.
            most: most.

        Raises:
            UsageError: these are no bounds; or the job is reproducible.
        """
        if not 1 <= least <= most:
            raise UsageError(
                f"least_steps={least}, most_steps={most}: expected whole numbers from 1 on, the first one "
                "not above the second"
            )
        runtime.refuse_if_reproducible("ESync")
        self._runtime: Final = runtime
        self._training: Final = runtime.open_namespace()
        self._least, self._most = least, most
        self._times: Final = RoundTimes(clock.monotonic())
        self._lock: Final = threading.Lock()
        self._round = -1
        """The last one whose steps are done."""
        self._steps = least
        """Of the round after that; before the first answer, the fewest."""
        self._taken = least
        """Of the round that has ended last."""
        self._answered = threading.Event()
        self._answered.set()
        self._request: StepsRequest | None = None
        self._error: Exception | None = None

    def steps(self) -> int:
        """Return the number of steps of the present round. Waits for the state server, if it has not
        answered: it does so when all nodes have begun the exchange before.

        Raises:
            WaitTimeout: it has not answered within NETSTORM_WAIT_TIMEOUT.
            NetStormError: the job has failed.
        """
        limit_s = self._runtime.settings.wait_timeout_s
        deadline = clock.monotonic() + limit_s
        while not self._answered.wait(_SLICE_S):
            self._runtime.check()
            if clock.monotonic() > deadline:
                raise WaitTimeout(
                    f"no answer of the state server within {limit_s:g} s (NETSTORM_WAIT_TIMEOUT) to the "
                    f"steps of round {self._round}: a rank has not taken its own"
                )
        if self._error is not None:
            raise self._error
        return self._steps

    def round_ends(self, taken: int) -> None:
        """Have `steps` wait for the answer to the round that ends: `exchange_begins` will report it.

        Args:
            taken: how many steps it has: fewer than `steps` if this node has just joined an elastic job.
        """
        self._taken = taken
        self._answered.clear()

    def exchange_begins(self, round: int) -> None:
        """Record that the steps of a round are done, and report them; from any thread, and does not wait.
        A round that was recorded before is ignored.
        """
        with self._lock:
            if round <= self._round:
                return
            self._round = round
            step_s, exchange_s = self._times.exchange_begins(self._taken, clock.monotonic())
            report = StepTimes(
                training=self._training,
                round=round,
                step_s=step_s,
                exchange_s=exchange_s,
                least=self._least,
                most=self._most,
            )
            request = self._request = StepsRequest(
                report=report, done=lambda error: self._done(request, error)
            )
        self._runtime.post(lambda node, _: node.local_steps.report(request))

    def exchange_ends(self) -> None:
        """Record that an average, or one of its parts, is here; from any thread."""
        with self._lock:
            self._times.exchange_ends(clock.monotonic())

    def _done(self, request: StepsRequest, error: Exception | None) -> None:
        if request is not self._request:
            return  # a later round has been reported since
        if error is None:
            self._steps = request.steps
        self._error = error
        self._answered.set()


# Programs of elastic jobs wait while fewer nodes are there than NETSTORM_ELASTIC demands.

_LOOK_S: Final = 0.05
"""How often a program that waits looks whether nodes have come."""


def wait_for_enough_nodes(runtime: Runtime, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait while too few nodes are in an elastic job. Costs nothing if there are enough.

    Args:
        runtime: of this process.
        meanwhile: called at each look.

    Raises:
        WaitTimeout: nobody has come for NETSTORM_WAIT_FOR_NODES.
        NetStormError: the job has failed.
    """
    settings, live = runtime.settings, runtime.node.live
    fewest = (settings.elastic_range or (0, 0))[0]
    if len(live.ranks) >= fewest:
        return
    limit_s = settings.wait_for_nodes_s
    begun = clock.monotonic()
    reported = begun - _REPORT_S
    while len(live.ranks) < fewest:
        runtime.check()
        meanwhile()
        now = clock.monotonic()
        here = f"{len(live.ranks)} nodes (ranks {', '.join(map(str, live.ranks))})"
        if now - begun > limit_s:
            raise WaitTimeout(
                f"the job has {here} and needs at least {fewest} (NETSTORM_ELASTIC={settings.elastic}); no "
                f"others came within {limit_s:g} s (NETSTORM_WAIT_FOR_NODES)"
            )
        if now - reported >= _REPORT_S:
            reported = now
            _log.warning(
                "the job has %s and waits until there are %d (NETSTORM_ELASTIC=%s), at most %.0f s more",
                here,
                fewest,
                settings.elastic,
                limit_s - (now - begun),
            )
        clock.sleep(_LOOK_S)


# A process that joins an elastic job late, whose values are with owners: nobody has a state for it.


class Newcomer:
    """This process, if it has joined an elastic job that had begun; of any other process it says so.

    It owns nothing at first. Its program gets the owners' values, which are then what it has for blocks that
    nobody has ever updated. Then it takes part.

    Attributes:
        waits: it has joined later, and does not take part yet.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Begin; no key is known."""
        self._runtime: Final = runtime
        self.waits = runtime.node.needs_state

    def knows(self, key: Key) -> bool:
        """Return whether the others had a key before this process came."""
        return self._runtime.node.was_known(key)

    def begin_key(self, key: Key) -> None:
        """Begin with a key whose first round, that of the initial value, was that of the others."""
        key.begin_at(1)
        self._runtime.post(lambda node, now: node.begin_key(key, 1, now))

    def take_part(self) -> None:
        """Take part from now on: this process may own blocks, and others wait for it at barriers."""
        self.waits = False
        self._runtime.post(lambda node, now: node.begin_without_state(now))


# What one rank needs to save asynchronous training by itself: what owners hold, and whether it is its turn.
#
# In an elastic job ranks have no step in common, and none may wait for all others. So one rank asks the
# owners of all blocks. Each block comes with the states of its update rule, as both were between two updates.
# Other blocks may have been updated a little more or less often by then, as in a pull.

_Bytes: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class HeldKey:
    """What the owners of a key hold."""

    values: Array
    """All of them, flat."""
    states: dict[int, bytes]
    """Of the update rule, by block."""


def collect_from_owners(
    runtime: Runtime, keys: Sequence[tuple[Key, Pushes]], *, whole: bool
) -> list[HeldKey]:
    """Return what owners hold of some keys, with all earlier pushes of this rank.

    Args:
        runtime: of this process.
        keys: with this rank's counts of pushes and pulls.
        whole: blocks are whole keys.

    Raises:
        WaitTimeout: no answer of an owner within NETSTORM_WAIT_TIMEOUT.
        NetStormError: the job has failed.
    """
    held: list[dict[int, bytes]] = []
    ends: list[concurrent.futures.Future[None]] = []
    for key, pushes in keys:
        end, done = future_end()
        operation = StatesOperation(
            key=key,
            number=pushes.take_pull(),
            pushed=pushes.total,
            destination={},
            with_values=True,
            whole=whole,
            done=done,
        )
        held.append(operation.destination)
        ends.append(end)
        runtime.submit(operation)
    runtime.wait_for_owners(ends, "what it holds cannot be saved")
    return [_divided(key, blocks, whole=whole) for (key, _), blocks in zip(keys, held, strict=True)]


def _divided(key: Key, blocks: Mapping[int, bytes], *, whole: bool) -> HeldKey:
    """Return the values and the states in blocks that consist of both."""
    values = np.zeros(key.elements, key.dtype)
    states = {}
    for block, data in blocks.items():
        own = values[block_extent(key, block, whole=whole)]
        if len(data) < own.nbytes:
            raise ProtocolViolation(
                f"block {block} of key {key.name!r} has come from its owner with {len(data)} bytes: its "
                f"values alone have {own.nbytes}"
            )
        own[:] = np.frombuffer(data, key.dtype, len(own))
        states[block] = data[own.nbytes :]
    return HeldKey(values, states)


class SavingRank:
    """A rank that writes a checkpoint alone, with the methods of `netstorm.checkpoint`'s `SavingRanks`."""

    writes_alone: Final = True

    def __init__(self, runtime: Runtime) -> None:
        """Prepare; nothing is sent."""
        self._runtime: Final = runtime

    @property
    def is_due(self) -> bool:
        """Whether this rank saves: the lowest of those that take part and whose programs have not ended."""
        training = self._runtime.node.live.training
        return bool(training) and training[0] == self.rank

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._runtime.rank

    def incarnations(self) -> dict[int, int]:
        """Return this rank alone: nobody else is waited for."""
        return {self.rank: 0}

    def gather(self, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return this rank's numbers."""
        return {self.rank: tuple(numbers)}

    def from_rank(self, rank: int, size: int, data: _Bytes | None) -> _Bytes:
        """Raise an error: nobody sends anything."""
        raise NotImplementedError(
            f"{size} bytes of rank {rank} for a checkpoint that rank {self.rank} writes alone"
        )
