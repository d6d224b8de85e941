"""What the user's program asks of a node: keys, operations, barriers, and the end. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from netstorm import errors
from netstorm.kvstore.asynchronous.asynchronous import Asynchronous
from netstorm.kvstore.node.deadlines import Deadlines
from netstorm.kvstore.node.late_start import LateStart
from netstorm.kvstore.node.lifecycle import Lifecycle, State
from netstorm.kvstore.node.live_job import LiveJob
from netstorm.kvstore.node.progress import Progress
from netstorm.kvstore.operations.allreduce import Done, Operation
from netstorm.kvstore.operations.asynchronous import AsyncOperation
from netstorm.kvstore.operations.point_to_point import (
    PointToPointOperation,
    ReceiveOperation,
    SendOperation,
)
from netstorm.kvstore.point_to_point.point_to_point import PointToPoint
from netstorm.kvstore.state_transfer.snapshot import Snapshot
from netstorm.kvstore.values.key import Key
from netstorm.protocol import messages as m

__all__ = ["NodeRequests"]


class NodeRequests:
    """The requests of one node's program. Nothing here blocks; each `done` is called exactly once.

    Attributes:
        live: who is in the job now; may be read in any thread.
        late_start: how a program begins that needs no state of the others.
        local_steps: reports what local steps take.
    """

    def __init__(self, lifecycle: Lifecycle, progress: Progress, deadlines: Deadlines) -> None:
        self._life: Final = lifecycle
        self._progress: Final = progress
        self._deadlines: Final = deadlines
        self.live: Final = LiveJob(lifecycle)
        self.late_start: Final = LateStart(lifecycle)
        self.local_steps: Final = lifecycle.local_steps

    @property
    def asynchronous(self) -> Asynchronous:
        """The asynchronous side of a node that has joined: pushes to owners, and what this rank owns."""
        return self._life.require_joined().asynchronous

    @property
    def point_to_point(self) -> PointToPoint:
        """The sends and receives of a node that has joined."""
        return self._life.require_joined().point_to_point

    def when_joined(self, done: Done) -> None:
        """Call `done` when all nodes have joined, or with the reason why that will not happen."""
        self._life.when_joined(done)

    def register(self, key: Key, now: float) -> None:
        """Make a key known to the job. Operations on it may be submitted at once."""
        self._life.registration.add(key)

    def submit(self, operation: Operation | AsyncOperation | PointToPointOperation, now: float) -> None:
        """Begin an operation as soon as it may begin. Its `done` is called in any case."""
        life = self._life
        if life.failure is not None:
            life.outbox.complete(operation.done, life.failure)
            return
        if isinstance(operation, (SendOperation, ReceiveOperation)):
            if life.state is not State.RUNNING:
                life.outbox.complete(operation.done, errors.Closed(f"{operation}: this rank has finished"))
                return
            self.point_to_point.submit(operation, now)
            return
        if not isinstance(operation, Operation):
            self.asynchronous.submit(operation, now)
            return
        self._progress.status.operation_begun(operation.round, now)
        if operation.key.identity < 0:
            operation.begun_at = now
            life.registration.enqueue(operation)
        else:
            life.require_joined().aggregation.submit(operation, now)
            self._progress.record_completed_rounds(now)
            self._progress.check_for_uneven_rounds()

    def report_replica(self, key: Key, round: int, digest: int, now: float) -> None:
        """Have this rank's value of a key after a round compared with those of the other ranks."""
        if not self._life.has_ended and key.identity >= 0:
            replica = m.ReplicaDigest(key=key.identity, round=round, digest=digest)
            self._life.outbox.send_to_scheduler(replica)

    @property
    def reproducible(self) -> bool:
        """Whether the results of the job are to be the same in each run."""
        joined = self._life.joined
        return joined is not None and joined.reproducible

    @property
    def needs_state(self) -> bool:
        """Whether this node has joined a job that had begun, and its program does not have the state yet."""
        joined = self._life.joined
        return joined is not None and joined.state.needed

    def fetch_state(self, take: Callable[[Snapshot], None], done: Done, now: float) -> None:
        """Fetch the job's state from the other ranks, before one of their steps.

        Args:
            take: called with the state. Operations of rounds from `Snapshot.rounds` on may be submitted then.
            done: called after that, or with the error that ended the job.
            now: the time.
        """
        life = self._life
        if life.failure is not None:
            life.outbox.complete(done, life.failure)
            return
        joined = life.require_joined()

        def begin(snapshot: Snapshot) -> None:
            joined.aggregation.begin_at(snapshot.rounds)
            life.barriers.start(snapshot.barriers)
            take(snapshot)

        joined.state.fetch(begin, done, changing=joined.aggregation.views.changing)

    def offer_state(self, snapshot: Snapshot, now: float) -> None:
        """Offer this rank's state to the newcomers whose requests it answers; the last one, also to all who
        come later.
        """
        if not self._life.has_ended:
            self._life.require_joined().state.providing.offer(snapshot)

    def barrier(self, done: Done, now: float) -> None:
        """Call `done` when every rank has entered as many barriers as this one."""
        if self._life.failure is not None:
            self._life.outbox.complete(done, self._life.failure)
            return
        self._life.barriers.enter(done, now)

    def finish(self, done: Done, now: float) -> None:
        """Push no more; call `done` when no rank needs this node. What is outstanding completes first."""
        life = self._life
        if life.failure is None and life.state is State.RUNNING:
            life.state = State.FINISHING
            self._deadlines.extend_finish(now)
            self._progress.flush()
            life.outbox.send_to_scheduler(self._progress.status.report(now))
            life.outbox.send_to_scheduler(m.Finished(last_rounds=life.registration.last_rounds()))
            life.require_joined().peer_finished(life.roster.rank)
            life.when_over(lambda error: self.point_to_point.end() if error is None else None)
            self._progress.begin_zero_contributions()
        life.when_over(done)

    def fail(self, reason: str, now: float) -> None:
        """Announce that this rank's program has failed, and stop."""
        error = errors.Closed(f"rank {self._life.roster.rank} has failed: {reason}")
        self._life.fail(error, announce=reason)

    def waiting_text(self, operation: Operation) -> str:
        """Return what an operation waits for, for a person."""
        joined = self._life.joined
        if joined is None or operation.key.identity < 0:
            return "the scheduler's answer"
        return joined.aggregation.waiting_text_of(operation).removeprefix(f"{operation}: ")

    def outstanding(self) -> int:
        """Return how many operations are not complete."""
        joined = self._life.joined
        begun = 0 if joined is None else sum(1 for _ in joined.outstanding())
        return len(self._life.registration.waiting_operations()) + begun
