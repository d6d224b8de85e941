"""What follows when rounds begin and complete on a node: status, announcements, zeros, uneven ends. Pure."""

from __future__ import annotations

from typing import Final

from netstorm.kvstore.membership.node_status import NodeStatusTracker
from netstorm.kvstore.node.deadlines import Deadlines
from netstorm.kvstore.node.lifecycle import Lifecycle, State
from netstorm.kvstore.rounds.zero_contributions import ZeroContributions

__all__ = ["Progress"]


class Progress:
    """The progress of one node's rounds.

    Attributes:
        status: counts operations and their time.
    """

    def __init__(self, lifecycle: Lifecycle, deadlines: Deadlines) -> None:
        self.status: Final = NodeStatusTracker(lifecycle.counters)
        self._life: Final = lifecycle
        self._deadlines: Final = deadlines
        self._zeros: Final = ZeroContributions()

    def record_completed_rounds(self, now: float) -> None:
        """Count the rounds that have just become complete."""
        joined = self._life.joined
        if joined is not None and joined.aggregation.completed_rounds:
            aggregation = joined.aggregation
            for round in aggregation.completed_rounds:
                self.status.operation_ended(round, now)
            aggregation.completed_rounds.clear()
            aggregation.topology_requests.round_s = self.status.round_s

    def check_for_uneven_rounds(self) -> None:
        """End the job if an operation waits for a round that a finished rank never pushed."""
        joined = self._life.joined
        if joined is not None:
            error = self._life.roster.uneven_error(joined.aggregation.outstanding())
            if error is not None:
                self._life.end_job(error)

    def flush(self) -> None:
        """Send registrations and topology requests, one message for all that have gathered."""
        life = self._life
        if life.failure is None and life.joined is not None:
            if life.registration.has_request():
                life.outbox.send_to_scheduler(life.registration.take_request())
            for announcement in life.joined.take_announcements():
                life.outbox.send_to_scheduler(announcement)
            for report in life.joined.aggregation.calls.take_reports():
                life.outbox.send_to_scheduler(report)

    def has_announcements(self) -> bool:
        """Return whether `flush` has something to send."""
        joined = self._life.joined
        return joined is not None and (
            self._life.registration.has_request()
            or joined.has_announcements()
            or joined.aggregation.calls.has_reports()
        )

    def begin_zero_contributions(self) -> None:
        """Contribute zeros from now on, if NETSTORM_UNEVEN=join: this rank's program has ended."""
        if self._life.roster.pads_with_zeros:
            self._zeros.begin(self._life.registration.granted_keys())

    def zeros_are_due(self) -> bool:
        """Return whether `contribute_zeros` has something to do."""
        return (
            self._zeros.has_pending()
            and self._life.state is State.FINISHING
            and bool(self._life.roster.unfinished())
        )

    def contribute_zeros(self, now: float) -> None:
        """Contribute zeros to the other ranks' rounds."""
        if self.zeros_are_due():
            self._deadlines.extend_finish(now)  # the other ranks make progress
            for operation in self._zeros.take():
                self._life.require_joined().aggregation.submit(operation, now)
