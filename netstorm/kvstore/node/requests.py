"""What the user's program asks of a node: keys, operations, barriers, and the end. Pure."""

from __future__ import annotations

from typing import Final

from netstorm import errors
from netstorm.kvstore.asynchronous.asynchronous import Asynchronous
from netstorm.kvstore.node.deadlines import Deadlines
from netstorm.kvstore.node.lifecycle import Lifecycle, State
from netstorm.kvstore.node.progress import Progress
from netstorm.kvstore.operations.allreduce import Done, Operation
from netstorm.kvstore.operations.asynchronous import AsyncOperation
from netstorm.kvstore.values.key import Key
from netstorm.protocol import messages as m

__all__ = ["NodeRequests"]


class NodeRequests:
    """The requests of one node's program. Nothing here blocks; each `done` is called exactly once."""

    def __init__(self, lifecycle: Lifecycle, progress: Progress, deadlines: Deadlines) -> None:
        self._life: Final = lifecycle
        self._progress: Final = progress
        self._deadlines: Final = deadlines

    @property
    def asynchronous(self) -> Asynchronous:
        """The asynchronous side of a node that has joined: pushes to owners, and what this rank owns."""
        return self._life.require_joined().asynchronous

    def when_joined(self, done: Done) -> None:
        """Call `done` when all nodes have joined, or with the reason why that will not happen."""
        self._life.when_joined(done)

    def register(self, key: Key, now: float) -> None:
        """Make a key known to the job. Operations on it may be submitted at once."""
        self._life.registration.add(key)

    def submit(self, operation: Operation | AsyncOperation, now: float) -> None:
        """Begin an operation as soon as it may begin. Its `done` is called in any case."""
        life = self._life
        if life.failure is not None:
            life.outbox.complete(operation.done, life.failure)
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
            self.asynchronous.finished(life.roster.rank)
            self._progress.begin_zero_contributions()
        life.when_over(done)

    def fail(self, reason: str, now: float) -> None:
        """Announce that this rank's program has failed, and stop."""
        error = errors.Closed(f"rank {self._life.roster.rank} has failed: {reason}")
        self._life.fail(error, announce=reason)

    def outstanding(self) -> int:
        """Return how many operations are not complete."""
        joined = self._life.joined
        begun = 0 if joined is None else sum(1 for _ in joined.outstanding())
        return len(self._life.registration.waiting_operations()) + begun
