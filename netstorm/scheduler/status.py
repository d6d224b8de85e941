"""The status of a job: the schema of /status.json. `build_status` fills it in. Pure.

Fields are append-only, because programs read them. Rates are in bit/s, times in s; unknown values are null.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = [
    "DetourStatus",
    "FailedLinkStatus",
    "FormerPolicy",
    "JobLine",
    "JobStatus",
    "KeyStatus",
    "KeysStatus",
    "LinkStatus",
    "NodeView",
    "PolicyStatus",
    "TreeStatus",
    "ViewChangeStatus",
    "ViewStatus",
    "tree_traffic",
]


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One general node."""

    rank: int | None
    """Null: it waits for the other nodes, and has asked for no particular rank."""
    host: str
    port: int
    site: str
    """As NETSTORM_SITE says, or else the network file."""
    state: str
    """joining, running, busy (alive, but its Python does not run), silent (it has no state yet), finished (it
    will push no more) or left."""
    heard_s: float
    """Time since its last sign of life."""
    busy_s: float = 0.0
    """For how long its Python has not run, although it is alive; 0: it runs."""
    said: str
    """Its last message that means something to a person."""
    waits_for: str
    """What it waits for, as it says; empty: nothing, or not for long."""
    rounds: int | None
    """Rounds that are complete there, of all keys together."""
    last_round: int | None
    """Number of the newest round that is complete in all keys."""
    round_s: float | None
    """How long that round took there, from the begin of its first key to the end of its last."""
    waited_s: float | None
    """Time in which operations of its script were outstanding."""
    waiting: float | None
    """Part of the last seconds in which they were, from 0 to 1."""
    bytes_sent: int | None
    """To other nodes, headers included."""
    sending: float | None
    """Bit/s sent in the last seconds."""
    compression: str | None
    """How its gradients travel; empty: as they are."""
    clock_offset_s: float | None
    """Cluster clock minus the host's clock."""
    clock_error_s: float | None
    """How far this may be wrong."""
    clock_drift: float | None
    """How much faster the cluster clock runs, as a fraction."""
    clock_hops: int | None
    """Exchanges between its clock and the scheduler's: 1 if it asks the scheduler."""
    detoured: int | None
    """Chunks sent over auxiliary paths."""
    egress: float | None
    """Bit/s of all its links out together, measured while its access line was the limit."""
    ingress: float | None
    """The same for its links in."""
    lat: float | None = None
    """Degrees north, if the network file says where the node is."""
    lon: float | None = None
    """Degrees east."""
    queued: int | None = None
    """Bytes that wait there for other nodes, or that these have not acknowledged yet."""


class TreeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One tree of the policy."""

    root: int
    share: float
    """Part of all data, from 0 to 1."""
    reduce_parent: tuple[int, ...]
    """By rank; -1 at the root, -2 for a rank that has left the job."""
    broadcast_parent: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check what walks of the tree rely on: then they end.

        Raises:
            ValueError: it is no tree.
        """
        size = len(self.reduce_parent)
        for parents in (self.reduce_parent, self.broadcast_parent):
            if not (0 <= self.root < size == len(parents) and max(parents) < size and parents[self.root] < 0):
                raise ValueError(f"no tree of {size} ranks with root {self.root}: parents {parents[:16]}")


def tree_traffic(trees: Iterable[TreeStatus]) -> dict[tuple[int, int], float]:
    """Return how often all data go over each link, from a rank to another, along some trees."""
    carried: dict[tuple[int, int], float] = {}
    for tree in trees:
        up = [(rank, parent) for rank, parent in enumerate(tree.reduce_parent) if parent >= 0]
        down = [(parent, rank) for rank, parent in enumerate(tree.broadcast_parent) if parent >= 0]
        for link in (*up, *down):
            carried[link] = carried.get(link, 0.0) + tree.share
    return carried


class DetourStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One auxiliary path of the policy."""

    path: tuple[int, ...]
    """The ranks on it, from a rank to its neighbour in a tree."""
    explore: bool
    """It explores: a few chunks go there to measure a link on it, even if that is slower."""


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that new rounds run under."""

    version: int
    reason: str
    """Why it was formed."""
    since_s: float
    """For how long it has been in force."""
    considered: str
    """Why a new one was last wanted or not; empty: none was considered."""
    trees: tuple[TreeStatus, ...]
    detours: tuple[DetourStatus, ...]


class FormerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that is not in force any more."""

    version: int
    reason: str
    ended_s: float
    """Time since it was replaced."""
    lasted_s: float


class KeyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One key."""

    name: str
    store: int
    """The n-th store, or group, that its processes made."""
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    """Of its rounds, as they are shared among the trees."""
    members: int
    """Ranks that contribute; 0: all."""


class KeysStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the job."""

    count: int
    bytes: int
    """Of all keys together."""
    first: tuple[KeyStatus, ...] = ()
    """Those that were registered first; not all, if there are many."""


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one directed link."""

    source: int
    target: int
    rate: float | None
    """Bit/s that policies are formed for; in jobs of more than 24 nodes, as last reported."""
    measured: bool
    """Whether it was ever measured; if not, the rate is assumed."""
    error: float | None
    """Standard error of the rate, as a fraction of it."""
    latency_s: float | None
    age_s: float | None
    """Time since it was last measured."""
    censored: bool
    """Measured only while an access line was the limit: the rate is what the access lines allow."""


class FailedLinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One directed link that has failed; the job goes on without it."""

    source: int
    target: int
    reason: str
    """What the rank at its source reported."""
    since_s: float


class ViewChangeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the view."""

    view: int
    members: int
    text: str
    """Who left or came, and why."""
    ago_s: float


class ViewStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Who is in a job that nodes may leave and join."""

    number: int
    fewest: int
    most: int
    silent: tuple[int, ...]
    """Ranks that have joined and do not have the job's state yet."""
    waiting: str
    """For whose reports the view waits; empty: for none."""
    changes: tuple[ViewChangeStatus, ...]
    """The newest first."""


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one job of a scheduler of several."""

    job: str
    phase: str
    num_workers: int
    text: str


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job at one moment."""

    format: int = 1
    """Changes when a field changes its meaning."""
    time: float
    """Of the snapshot, in s since the Unix epoch."""
    job: str
    release: str
    scheduler: str
    """HOST:PORT at which nodes reach the scheduler."""
    http: str
    """HOST:PORT at which this can be read."""
    phase: str
    """gathering, running, finished, failed or over."""
    text: str
    """How the job is doing, in one line; why it has failed, if it has."""
    age_s: float
    num_workers: int
    nodes: tuple[NodeView, ...]
    """By rank."""
    policy: PolicyStatus
    former: tuple[FormerPolicy, ...]
    """The newest first."""
    keys: KeysStatus
    links: tuple[LinkStatus, ...]
    counters: dict[str, float]
    """Of the job; on a scheduler of one job, of its whole process."""
    failed_links: tuple[FailedLinkStatus, ...] = ()
    link_share: float = 1.0
    """The part of each link's rate that the job plans with. The other jobs of its scheduler have the rest."""
    jobs: tuple[JobLine, ...] = ()
    """All jobs of a scheduler of several, in order of arrival."""
    routed_pairs: tuple[tuple[int, int], ...] = ()
    """(source, target) that are no links of their own: their routes were inferred to pass other nodes."""
    view: ViewStatus | None = None
    """Of a job that nodes may leave and join; null: of any other job."""
    crowded: bool = False
    """Links were measured to carry less under contention: they share lines, with known rates or not."""
    cost_an_hour: float | None = None
    """Of the traffic at its present rates, by the prices of the network file and in its currency."""
