"""Refusing a process: who is refused, for which reason, and how it is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from netstorm.observe.log import Counters
from netstorm.protocol.frames import Peer
from netstorm.protocol.messages import Member, PeerGone
from netstorm.pslite.machine import Disconnect
from netstorm.scheduler.membership.member_texts import describe_member, list_some
from netstorm.scheduler.outbox import Outbox

__all__ = ["Refusal", "job_full_reason", "refuse"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A process that cannot be in the job, and why; the reason is for a person."""

    peer: Peer
    reason: str


def refuse(refusal: Refusal, outbox: Outbox, counters: Counters) -> None:
    """Tell a process why it cannot be in the job, log and count that, and end the session."""
    _log.warning("refused: %s", refusal.reason)
    counters.add("refused")
    outbox.send([refusal.peer], PeerGone(rank=-1, kind="refused", reason=refusal.reason))
    outbox.add(Disconnect(peer=refusal.peer))


def job_full_reason(job: str, members: Sequence[Member], newcomer: str, rank: int = -1) -> str:
    """Return why no other node can join a job that has begun; `rank`: the one that it asks for."""
    again = (
        f"; if it is rank {rank}, started again: nobody can take a rank's place in a job that has begun, so "
        "start all nodes and the scheduler again"
        if rank >= 0
        else ""
    )
    return (
        f"job {job!r} has all its {len(members)} nodes ({list_some(map(describe_member, members))}); the "
        f"node at {newcomer} is one too many: start as many nodes as the scheduler's DMLC_NUM_WORKER says"
        f"{again}"
    )
