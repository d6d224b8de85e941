"""What a node does with each message of the scheduler. Pure."""

from __future__ import annotations

import logging
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.kvstore.membership.scheduler_session import job_end_error
from netstorm.kvstore.node.job_report import job_report
from netstorm.kvstore.node.joined_node import add_granted_keys
from netstorm.kvstore.node.lifecycle import Lifecycle, State
from netstorm.kvstore.node.node_views import NodeViews
from netstorm.kvstore.node.progress import Progress
from netstorm.protocol import messages as m

__all__ = ["SchedulerMessages"]

_log = logging.getLogger(__name__)


class SchedulerMessages:
    """Handles the scheduler's messages for one node."""

    def __init__(self, lifecycle: Lifecycle, progress: Progress) -> None:
        self._life: Final = lifecycle
        self._progress: Final = progress
        self._views: Final = NodeViews(lifecycle)

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
                life.require_joined().routes.failed_links(message)
                life.require_joined().neighbours.failed_links(message)
            case m.Resumed():
                life.scheduler.resumed(now)
                life.roster.restart_suspicions(now)
                life.local_steps.report_again()
            case _:
                self._view_message(message, now)

    def _view_message(self, message: m.Message, now: float) -> None:
        """Handle a message about views, about local steps, or about a node that may be busy."""
        match message:
            case m.StepsGranted():
                self._life.local_steps.granted(message)
            case m.Probe():
                pass
            case m.Alive():
                self._life.roster.running[message.rank] = now
            case m.NewView():
                self._views.begin(message)
                self._progress.check_for_uneven_rounds()
            case m.ViewAgreed():
                self._views.agree(message)
            case m.KeysAnnounced():
                add_granted_keys(self._life.require_joined().aggregation, message.keys, message.grants)
            case _:
                raise ProtocolViolation(
                    f"a general node takes no {type(message).__name__} from the scheduler"
                )

    def resume(self) -> m.Resume:
        """Return what a scheduler that has been started again must know of this node."""
        life = self._life
        aggregation = life.require_joined().aggregation
        aggregation.calls.report_again()
        return m.Resume(
            keys=life.registration.unanswered(),
            begun=aggregation.topology_requests.recent(),
            barriers=life.barriers.waiting_numbers(),
            last_rounds=life.registration.last_rounds() if life.state is State.FINISHING else None,
            suspected=life.detours.failed_targets(),
            moved=aggregation.takeover.all_announcements(),
            view=self._views.number,
            job=job_report(life) if life.scheduler.tries_another else None,
            changing=aggregation.views.changing,
        )

    def _peer_finished(self, message: m.PeerFinished) -> None:
        self._life.roster.record_finished(message.rank, message.last_rounds)
        self._life.require_joined().peer_finished(message.rank)
        self._progress.check_for_uneven_rounds()
