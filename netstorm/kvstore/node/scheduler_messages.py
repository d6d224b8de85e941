"""What a node does with each message of the scheduler. Pure."""

from __future__ import annotations

import logging
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.membership.scheduler_session import job_end_error
from netstorm.kvstore.node.lifecycle import Lifecycle, State
from netstorm.kvstore.node.progress import Progress
from netstorm.protocol import messages as m

__all__ = ["SchedulerMessages"]

_log = logging.getLogger(__name__)


class SchedulerMessages:
    """Handles the scheduler's messages for one node."""

    def __init__(self, lifecycle: Lifecycle, progress: Progress) -> None:
        self._life: Final = lifecycle
        self._progress: Final = progress

    def receive(self, message: m.Message, now: float) -> None:
        """Handle a message.

        Raises:
            ProtocolViolation: no correct scheduler sends it, or not now.
        """
        life = self._life
        match message:
            case m.Joined():
                life.start(message, now)
            case m.Waiting():
                life.scheduler.last_report = message.text
                _log.warning("%s", message.text)
            case m.KeysRegistered():
                life.require_joined().keys_registered(message, life.registration)
                self._progress.check_for_uneven_rounds()
            case m.TopologyAnswer():
                life.require_joined().topology_answer(message)
            case m.NewPolicy():
                life.require_joined().new_policy(message.policy)
            case m.Moved():
                life.require_joined().aggregation.chunks_moved(message)
            case m.BarrierReached():
                life.barriers.reached(message.number)
            case m.PeerFinished():
                self._peer_finished(message)
            case m.AllFinished():
                life.leave()
            case m.PeerGone():
                if message.rank != life.roster.rank or message.kind != "failed":
                    life.fail(job_end_error(message))
            case m.FailedLinks():
                life.require_joined().neighbours.failed_links(message)
            case m.Resumed():
                life.scheduler.resumed(now)
                life.roster.restart_suspicions(now)
            case _:
                raise ProtocolViolation(
                    f"a general node takes no {type(message).__name__} from the scheduler"
                )

    def resume(self) -> m.Resume:
        """Return what a scheduler that has been started again must know of this node."""
        life = self._life
        aggregation = life.require_joined().aggregation
        return m.Resume(
            keys=life.registration.unanswered(),
            begun=aggregation.topology_requests.recent(),
            barriers=life.barriers.waiting_numbers(),
            last_rounds=life.registration.last_rounds() if life.state is State.FINISHING else None,
            suspected=life.detours.failed_targets(),
            moved=aggregation.takeover.all_announcements(),
        )

    def _peer_finished(self, message: m.PeerFinished) -> None:
        self._life.roster.record_finished(message.rank, message.last_rounds)
        self._life.require_joined().asynchronous.finished(message.rank)
        self._progress.check_for_uneven_rounds()
