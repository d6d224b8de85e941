"""Everything about a job at one moment, for people and programs that watch it. Pure.

Taking a snapshot is cheap, since the scheduler's own thread does it: it copies references to what never
changes. Making a `status` of it is somebody else's work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from netstorm.protocol.messages import Member
from netstorm.scheduler.awareness.failed_link import FailedLinkRecord
from netstorm.scheduler.awareness.network_estimate import LinkEstimate
from netstorm.scheduler.job_phase import Phase
from netstorm.scheduler.observe.announcements import TimedStatus
from netstorm.topology.policy import Policy

__all__ = ["NodeSnapshot", "Snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """One node. Before it has a rank, its member's is the one that it asks for (-1: any)."""

    member: Member
    joined: bool
    heard_at: float
    said: str = ""
    """The last thing heard from it that means something to a person."""
    busy: str = ""
    """What it says that it waits for."""
    finished: bool = False
    left: bool = False
    reports: tuple[TimedStatus, ...] = ()
    egress: float = 0.0
    """Bit/s; 0: not seen."""
    ingress: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A job. Times are those of the scheduler's own clock."""

    now: float
    started_at: float
    job: str
    release: str
    num_workers: int
    phase: Phase
    text: str
    """How the job is doing, in one line; why it has failed, if it has."""
    nodes: tuple[NodeSnapshot, ...]
    policy: Policy
    policy_since: float
    former: tuple[tuple[int, str, float, float], ...]
    """Version, reason, begin and end of former policies, the newest last."""
    keys: int
    key_bytes: int
    considered: str
    """What was last thought of a new policy; empty: nothing was."""
    links: Callable[[], Sequence[LinkEstimate]]
    """Says what is known of each link, in any thread."""
    counters: Mapping[str, float]
    failed_links: tuple[FailedLinkRecord, ...] = ()
    """Those that the job does without at present."""
    link_share: float = 1.0
    """Of each link's rate that the job plans with."""
    routed: frozenset[tuple[int, int]] = frozenset()
    """(source, target) whose ways are found to lead past other nodes."""
    crowded: bool = False
    """Links are found to carry less in company."""
