"""A snapshot: everything about a job at one moment, for people and programs that watch it. Pure.

The scheduler's own thread takes snapshots, so that must be cheap: they only refer to values that never
change. Another thread turns a snapshot into a `JobStatus`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from netstorm.protocol.messages import Member
from netstorm.scheduler.awareness.failed_link import FailedLinkRecord
from netstorm.scheduler.awareness.network_estimate import LinkEstimate
from netstorm.scheduler.job_phase import Phase
from netstorm.scheduler.observe.announcements import TimedStatus
from netstorm.scheduler.observe.policy_history import ReplacedPolicy
from netstorm.topology.policy import Policy

__all__ = ["NodeSnapshot", "Snapshot", "ViewChange", "ViewSnapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """One node. Before it has a rank, `member.rank` is the one that it asks for (-1: any)."""

    member: Member
    joined: bool
    heard_at: float
    busy_s: float = 0.0
    """For how long its Python has not run, although it is alive; 0: it runs, or did so lately."""
    last_event: str = ""
    """Its last message that means something to a person."""
    waiting_for: str = ""
    """What it waits for, as it says; empty: nothing."""
    finished: bool = False
    left: bool = False
    silent: bool = False
    """It has joined a job that had begun, and contributes nothing yet."""
    reports: tuple[TimedStatus, ...] = ()
    egress: float = 0.0
    """Bit/s of all its links out together; 0: not measured."""
    ingress: float = 0.0
    """Bit/s of all its links in together; 0: not measured."""


@dataclass(frozen=True, slots=True)
class ViewChange:
    """A change of the view. The time is that of the scheduler's own clock."""

    at: float
    view: int
    members: int
    text: str
    """Who left or came, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSnapshot:
    """The view of a job that nodes may leave and join."""

    number: int
    fewest: int
    most: int
    silent: tuple[int, ...]
    """Ranks that do not have the job's state yet."""
    waiting: str
    """For whose reports the view waits; empty: for none."""
    changes: tuple[ViewChange, ...]
    """The last ones, the newest last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One job. Times are those of the scheduler's own clock."""

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
    former: tuple[ReplacedPolicy, ...]
    """The newest last."""
    keys: int
    key_bytes: int
    considered: str
    """Why a new policy was last wanted or not; empty: none was considered."""
    links: Callable[[], Sequence[LinkEstimate]]
    """Makes the estimates of all links; any thread may call it."""
    counters: Mapping[str, float]
    failed_links: tuple[FailedLinkRecord, ...] = ()
    """Links that have failed and are not restored."""
    link_share: float = 1.0
    """The part of each link's rate that the job plans with."""
    routed: frozenset[tuple[int, int]] = frozenset()
    """(source, target) whose routes were inferred to pass other nodes."""
    view: ViewSnapshot | None = None
    """Of a job that nodes may leave and join."""
    contended: bool = False
    """Links were measured to carry less under contention."""
