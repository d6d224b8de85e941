"""A snapshot: everything about a job at one moment, for people and programs that watch it. Pure.

Its parts: the job's phase, what nodes last reported of themselves, and the policies of the past.

The scheduler's own thread takes snapshots, so that must be cheap: they only refer to values that never
change. Another thread turns a snapshot into a `JobStatus`.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from netstorm.protocol.messages import KeySpec, LinkMeasure, Measured, Member, NodeStatus, PeerGone
from netstorm.scheduler.awareness import FailedLinkRecord, LinkEstimate
from netstorm.topology.network import Network, Node
from netstorm.topology.policy import Policy

__all__ = [
    "MOST_CHARACTERS",
    "NOBODY_JOINED",
    "Announcements",
    "JobPhase",
    "JobSnapshot",
    "NodeSnapshot",
    "Outcome",
    "PolicyHistory",
    "ViewChange",
    "ViewSnapshot",
]


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
    described: Node | None = None
    """As the network file has it; None: there is none, or it does not."""


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
class JobSnapshot:
    """One job. Times are those of the scheduler's own clock."""

    now: float
    started_at: float
    job: str
    release: str
    num_workers: int
    phase: JobPhase
    text: str
    """How the job is doing, in one line; why it has failed, if it has."""
    nodes: tuple[NodeSnapshot, ...]
    policy: Policy
    policy_since: float
    former: tuple[ReplacedPolicy, ...]
    """The newest last."""
    keys: int
    key_bytes: int
    first_keys: tuple[tuple[KeySpec, int], ...] = ()
    """The first keys that were registered, and their bytes."""
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
    planned: Network | None = None
    """The network file's, by whose prices traffic is billed."""


# The phases of a job, and its outcome.

NOBODY_JOINED: Final = 78
"""Exit code of a job that no process has joined: sysexits.h calls it EX_CONFIG."""

_NOBODY_JOINED: Final = (
    "no process has joined the job: the script makes no NetStorm group or store. Write "
    'init_process_group("netstorm") (PyTorch), mx.kv.create("netstorm") (MXNet) or netstorm.Group() (NumPy), '
    "or start it unedited with python -m netstorm.run"
)


class JobPhase(enum.Enum):
    """Where a job is in its life, as its scheduler sees it."""

    GATHERING = "gathering"
    """Some nodes have not joined yet."""
    RUNNING = "running"
    """All nodes have joined, and some will push more."""
    FINISHED = "finished"
    """No node will push any more; nodes are leaving."""
    FAILED = "failed"
    """Nodes are told why, and are leaving."""
    OVER = "over"
    """The scheduler's process may end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job went."""

    exit_code: int
    text: str
    rank: int = -1
    """The rank whose end made the job fail; -1: none."""

    @classmethod
    def of(cls, job: str, failure: PeerGone | None, *, nodes: int, keys: int) -> Outcome:
        """Return the outcome of a job. `failure`: why it failed; None if it did not."""
        if failure is None:
            nothing = "" if keys else ", so nobody has summed anything over NetStorm"
            return cls(0, f"job {job!r} has ended well: {nodes} nodes, {keys} keys{nothing}")
        return cls(1, f"job {job!r} has failed: {failure.reason}", failure.rank)

    @classmethod
    def nobody_joined(cls, job: str) -> Outcome:
        """Return the outcome of a job whose processes have all ended, and none had asked to join."""
        return cls(NOBODY_JOINED, f"job {job!r} has failed: {_NOBODY_JOINED}")


# Announcements: what nodes last reported of themselves and of the links into them.

_log = logging.getLogger(__name__)

MOST_CHARACTERS: Final = 300
"""Of a text that a node says of itself."""

_REMEMBERED_TEXTS: Final = 32

_LOG_EVERY_S: Final = 1.0
"""A node cannot fill the log."""

_REMEMBERED_REPORTS: Final = 6
"""Reports of a node from which its present rates are computed: those of the last 5 heartbeat intervals."""


@dataclass(frozen=True, slots=True)
class TimedStatus:
    """A report of a node, and when it came."""

    at: float
    status: NodeStatus


class Announcements:
    """The newest reports of each rank."""

    def __init__(self, nodes: int) -> None:
        self._reports: Final = tuple(deque[TimedStatus](maxlen=_REMEMBERED_REPORTS) for _ in range(nodes))
        self._logged: Final[deque[str]] = deque(maxlen=_REMEMBERED_TEXTS)
        """What ranks have said of compression, which all say one after the other."""
        self._logged_at = -math.inf
        self._links: Final[dict[tuple[int, int], tuple[float, LinkMeasure]]] = {}

    def record_status(self, rank: int, status: NodeStatus, now: float) -> None:
        """Record a rank's report of itself."""
        self._reports[rank].append(TimedStatus(now, status))
        text = status.compression[:MOST_CHARACTERS]
        if text and text not in self._logged and now - self._logged_at >= _LOG_EVERY_S:
            self._logged.append(text)
            self._logged_at = now
            _log.info("compression: %s", "".join(each for each in text if each.isprintable()))

    def record_links(self, rank: int, measured: Measured, now: float) -> None:
        """Record a rank's report of the links into it. Links that cannot exist are left out."""
        for link in measured.links:
            if 0 <= link.source < len(self._reports) and link.source != rank:
                self._links[link.source, rank] = (now, link)

    def reports(self, rank: int) -> tuple[TimedStatus, ...]:
        """Return a rank's last reports of itself, the newest last."""
        return tuple(self._reports[rank])

    def links(self, now: float) -> Callable[[], list[LinkEstimate]]:
        """Return a function that makes estimates of all links, as last reported. Any thread may call it."""
        links = self._links.copy()
        return lambda: [
            LinkEstimate(
                source=source,
                target=target,
                rate=measure.rate,
                error=measure.error,
                latency=measure.latency,
                age=now - at if measure.rate > 0 else math.inf,
                censored=False,
            )
            for (source, target), (at, measure) in sorted(links.items())
        ]


# The policy history of a job: since when the policy in force applies, and the last ones before it.

_REMEMBERED_POLICIES: Final = 20
"""Replaced policies whose reasons are remembered."""


@dataclass(frozen=True, slots=True)
class ReplacedPolicy:
    """A policy that is not in force any more. Times are those of the scheduler's own clock."""

    version: int
    reason: str
    """Why it was formed."""
    begin: float
    end: float


class PolicyHistory:
    """The policies of one job.

    Attributes:
        since: when the policy in force was installed.
    """

    def __init__(self, policy: Policy, now: float) -> None:
        self.since = now
        self._replaced: deque[ReplacedPolicy] = deque(maxlen=_REMEMBERED_POLICIES)
        self._policy = policy

    def installed(self, policy: Policy, now: float) -> None:
        """Record that a policy has replaced the one before, unless that is known."""
        before = self._policy
        if policy.version == before.version:
            return
        self._replaced.append(
            ReplacedPolicy(version=before.version, reason=before.reason, begin=self.since, end=now)
        )
        self._policy, self.since = policy, now

    def former(self) -> tuple[ReplacedPolicy, ...]:
        """Return the last replaced policies, the newest last."""
        return tuple(self._replaced)
