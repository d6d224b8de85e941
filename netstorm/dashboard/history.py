"""What the page shows of a job over time, made of its statuses: frames, points of curves, events. Pure.

A frame is a status without what no page shows: numbers have four digits, trees come once a policy, and of a
large network those links alone that somebody looks for. So a night of it fits into one file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from netstorm.addresses import host_port
from netstorm.scheduler.bound import known_network, known_optimum
from netstorm.scheduler.status import (
    JobLine,
    JobStatus,
    KeysStatus,
    LinkStatus,
    NodeView,
    PolicyStatus,
    tree_traffic,
)
from netstorm.units import rounded

__all__ = [
    "Frame",
    "History",
    "JobEvent",
    "LinkFrame",
    "NodeFrame",
    "Point",
    "PolicyFrame",
    "Update",
    "frame_of",
]

_MOST_LINKS: Final = 1500
"""Links of a frame. Those of trees come first: with more, a browser's table is no table any more."""
_MOST_TREES: Final = 64
_MOST_POINTS: Final = 2000
"""More than a screen has columns. Beyond, every two become one."""
_MOST_EVENTS: Final = 1000
_MOST_POLICIES: Final = 300
_BOUND_EVERY_S: Final = 30.0
_BOUND_EVERY: Final = 0.1
"""Part of the job's time so far: a recorded night has 60 optima, not a thousand."""
_BOUND_SOONER: Final = 0.2
"""Part of the time between two, after which a new policy makes it worth to look again."""
_OLD_S: Final = 30.0
"""Age from which `netstorm top` shows a measurement as an old one, too."""


class NodeFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node; what is not known is left out."""

    rank: int | None
    name: str
    """HOST:PORT."""
    site: str
    state: str
    heard: float
    """Times in s, sizes in bytes, rates in bit/s, as in `NodeView`."""
    waits: str = ""
    said: str = ""
    busy: float = 0.0
    round: int | None = None
    took: float | None = None
    waited: float | None = None
    waiting: float | None = None
    sending: float | None = None
    sent: int | None = None
    queued: int | None = None
    egress: float | None = None
    ingress: float | None = None
    clock: float | None = None
    lat: float | None = None
    lon: float | None = None


class LinkFrame(msgspec.Struct, frozen=True, array_like=True):
    """One directed link."""

    source: int
    target: int
    rate: float | None
    latency: float | None
    load: float | None
    """Part of the rate that trees use at the present goodput; null: one of the two is not known."""
    marks: str
    """m: measured, o: not lately, c: censored, t: in a tree, f: failed."""


class PolicyFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A policy. It comes once, before the first frame that it is in force in."""

    version: int
    reason: str
    trees: list[tuple[int, float, tuple[int, ...], tuple[int, ...]]]
    """Root, share, parent by rank on the way up, and on the way down. The largest shares first."""
    more: int
    """Trees that are left out."""
    detours: list[tuple[int, ...]]


class Frame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job at one moment."""

    time: float
    job: str
    phase: str
    text: str
    age: float
    workers: int
    release: str
    scheduler: str
    policy: int
    """Version of the policy in force."""
    since: float
    considered: str
    nodes: list[NodeFrame]
    links: list[LinkFrame]
    all_links: int
    failed: list[tuple[int, int, str, float]]
    """Source, target, reason, for how long."""
    keys: KeysStatus
    goodput: float | None = None
    cost: float | None = None
    """Of an hour's traffic at the present rates, in the network file's currency."""
    share: float = 1.0
    view: str = ""
    jobs: tuple[JobLine, ...] = ()


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A point of the curves."""

    time: float
    round_s: float | None
    """Of the slowest node."""
    goodput: float | None
    """Bit/s of sums, at all nodes at once."""
    bound: float | None
    """The most that the measured links allow, by any trees."""


class JobEvent(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to a job, in words."""

    time: float
    kind: str
    """policy, view, link, node or job."""
    text: str


class Update(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of a job; with `reset` everything."""

    reset: bool = False
    frame: Frame | None = None
    points: list[Point] = []
    events: list[JobEvent] = []
    policies: list[PolicyFrame] = []
    lost: str = ""
    """Why there is no frame; empty: there is one."""


class History:
    """A job over time, bounded in memory."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.events: list[JobEvent] = []
        self.policies: Final[dict[int, PolicyFrame]] = {}
        self.last: JobStatus | None = None
        self._known: Final[set[tuple[object, ...]]] = set()
        """What events there were, by what makes each one unique."""
        self._every = 1
        """Of so many statuses one becomes a point."""
        self._skipped = 0
        self._bound: float | None = None
        self._bound_of: tuple[int, float] = (-1, -_BOUND_EVERY_S)

    def add(self, status: JobStatus) -> Update:
        """Take the next status, and return what is new in it."""
        events = sorted(self._new_events(status), key=lambda event: event.time)
        self.events = (self.events + events)[-_MOST_EVENTS:]
        policies = []
        if status.policy.version not in self.policies:
            policies = [_policy(status.policy)]
            self.policies[status.policy.version] = policies[0]
            for version in list(self.policies)[:-_MOST_POLICIES]:
                del self.policies[version]
        points = self._new_points(status)
        self.last = status
        return Update(frame=frame_of(status), points=points, events=events, policies=policies)

    def everything(self) -> Update:
        """Return all that is known, for somebody who knows nothing yet."""
        frame = None if self.last is None else frame_of(self.last)
        policies = list(self.policies.values())
        return Update(reset=True, frame=frame, points=self.points, events=self.events, policies=policies)

    def _new_points(self, status: JobStatus) -> list[Point]:
        self._skipped += 1
        if self._skipped < self._every:
            return []
        self._skipped = 0
        version, at = self._bound_of
        begin = self.points[0].time if self.points else status.time
        every = _BOUND_EVERY_S + _BOUND_EVERY * (status.time - begin)
        same = version == status.policy.version
        if abs(status.time - at) >= every * (1.0 if same else _BOUND_SOONER):
            self._bound, self._bound_of = _bound(status), (status.policy.version, status.time)
        rounds = [node.round_s for node in status.nodes if node.round_s is not None and node.state != "left"]
        point = Point(
            rounded(status.time, 13),
            rounded(max(rounds, default=None)),
            rounded(_goodput(status)),
            self._bound,
        )
        self.points.append(point)
        if len(self.points) > _MOST_POINTS:
            self.points = [_slower(*pair) for pair in zip(self.points[::2], self.points[1::2], strict=False)]
            self._every *= 2
        return [point]

    def _new_events(self, status: JobStatus) -> Iterator[JobEvent]:
        for event, identity in _events(status, self.last):
            if identity not in self._known:
                self._known.add(identity)
                yield event


def _events(status: JobStatus, before: JobStatus | None) -> Iterator[tuple[JobEvent, tuple[object, ...]]]:
    """Yield what a status says has happened, each with what tells it from all others."""
    now, policy = status.time, status.policy
    for old in status.former:
        text = f"Policy {old.version}: {old.reason or 'no reason given'}"
        yield JobEvent(rounded(now - old.ended_s - old.lasted_s, 13), "policy", text), ("policy", old.version)
    text = f"Policy {policy.version}: {policy.reason or 'no reason given'}"
    yield JobEvent(rounded(now - policy.since_s, 13), "policy", text), ("policy", policy.version)
    if status.view is not None:
        for change in status.view.changes:
            text = f"View {change.view}, {change.members} nodes: {change.text}"
            yield JobEvent(rounded(now - change.ago_s, 13), "view", text), ("view", change.view)
    for link in status.failed_links:
        at = now - link.since_s
        text = f"Link {link.source} → {link.target} has failed: {link.reason}"
        yield JobEvent(rounded(at, 13), "link", text), ("failed", link.source, link.target, round(at))
    if before is None:
        return
    failed = {(link.source, link.target) for link in status.failed_links}
    for link in before.failed_links:
        if (link.source, link.target) not in failed:
            text = f"Link {link.source} → {link.target} is back"
            yield JobEvent(now, "link", text), ("back", link.source, link.target, now)
    if status.phase != before.phase:
        yield JobEvent(now, "job", f"The job is {status.phase}: {status.text}"), ("phase", now)
    states = {_identity(node): node.state for node in before.nodes}
    for node in status.nodes:
        old_state = states.get(_identity(node))
        if old_state != node.state and (old_state or node.state) != "joining":
            who, becomes = _who(node), _BECOMES.get(node.state, f"is {node.state}")
            yield JobEvent(now, "node", f"{who} {becomes}"), ("node", who, node.state, now)


_BECOMES: Final = {"left": "has left", "finished": "has finished", "running": "runs"}


def _identity(node: NodeView) -> object:
    """Return what tells a node from others: its rank, or its address while it has none."""
    return (node.host, node.port) if node.rank is None else node.rank


def _who(node: NodeView) -> str:
    name = "A node" if node.rank is None else f"Rank {node.rank}"
    return f"{name} ({node.site or host_port(node.host, node.port)})"


def _slower(one: Point, other: Point) -> Point:
    """Return one point for two: a slow round must not vanish."""
    return max(one, other, key=lambda point: point.round_s or 0.0)


def frame_of(status: JobStatus) -> Frame:
    """Return what the page shows of a status."""
    goodput = _goodput(status)
    return Frame(
        time=rounded(status.time, 13),
        job=status.job,
        phase=status.phase,
        text=status.text,
        age=rounded(status.age_s),
        workers=status.num_workers,
        release=status.release,
        scheduler=status.scheduler,
        policy=status.policy.version,
        since=rounded(status.policy.since_s),
        considered=status.policy.considered,
        nodes=list(map(_node, status.nodes)),
        links=_links(status, goodput),
        all_links=len(status.links),
        failed=[
            (link.source, link.target, link.reason, rounded(link.since_s)) for link in status.failed_links
        ],
        keys=status.keys,
        goodput=rounded(goodput),
        cost=rounded(status.cost_an_hour),
        share=status.link_share,
        view=_view(status),
        jobs=status.jobs,
    )


def _view(status: JobStatus) -> str:
    view = status.view
    if view is None:
        return ""
    silent = f", ranks {', '.join(map(str, view.silent))} fetch the state" if view.silent else ""
    waiting = f"; {view.waiting}" if view.waiting else ""
    return f"view {view.number} of {view.fewest} to {view.most} nodes{silent}{waiting}"


def _node(node: NodeView) -> NodeFrame:
    return NodeFrame(
        rank=node.rank,
        name=host_port(node.host, node.port),
        site=node.site,
        state=node.state,
        heard=rounded(node.heard_s, 3),
        waits=node.waits_for,
        said=node.said,
        busy=rounded(node.busy_s, 3),
        round=node.last_round,
        took=rounded(node.round_s),
        waited=rounded(node.waited_s),
        waiting=rounded(node.waiting, 3),
        sending=rounded(node.sending),
        sent=node.bytes_sent,
        queued=node.queued,
        egress=rounded(node.egress),
        ingress=rounded(node.ingress),
        clock=rounded(node.clock_offset_s),
        lat=node.lat,
        lon=node.lon,
    )


def _links(status: JobStatus, goodput: float | None) -> list[LinkFrame]:
    """Return the links: those of trees, those that have failed, then the slowest, as far as there is room."""
    used = tree_traffic(status.policy.trees)
    failed = {(link.source, link.target) for link in status.failed_links}
    known = {(link.source, link.target): link for link in status.links}

    def rank(pair: tuple[int, int]) -> tuple[bool, float, tuple[int, int]]:
        link = known.get(pair)
        slow = link.rate if link is not None and link.measured and link.rate else float("inf")
        return pair not in used and pair not in failed, slow, pair

    pairs = sorted(known.keys() | used.keys() | failed, key=rank)[:_MOST_LINKS]
    return [
        _link(pair, known.get(pair), used.get(pair, 0.0), goodput, failed=pair in failed)
        for pair in sorted(pairs)
    ]


def _link(
    pair: tuple[int, int], link: LinkStatus | None, used: float, goodput: float | None, *, failed: bool
) -> LinkFrame:
    marks = ("t" if used else "") + ("f" if failed else "")
    rate = latency = load = None
    if link is not None:
        rate, latency = link.rate, link.latency_s
        marks += "m" if link.measured else ""
        marks += "o" if link.age_s is not None and link.age_s > _OLD_S else ""
        marks += "c" if link.censored else ""
        if rate and goodput is not None:
            load = used * goodput / rate
    return LinkFrame(*pair, rounded(rate), rounded(latency), rounded(load, 3), marks)


def _policy(policy: PolicyStatus) -> PolicyFrame:
    trees = sorted(policy.trees, key=lambda tree: (-tree.share, tree.root))
    return PolicyFrame(
        version=policy.version,
        reason=policy.reason,
        trees=[
            (tree.root, rounded(tree.share), tree.reduce_parent, tree.broadcast_parent)
            for tree in trees[:_MOST_TREES]
        ],
        more=max(0, len(trees) - _MOST_TREES),
        detours=[detour.path for detour in policy.detours],
    )


def _goodput(status: JobStatus) -> float | None:
    """Return how many bit/s of sums reach all nodes; None: nobody has said yet what it sends.

    A tree of n nodes has n - 1 links, and all data go over each of them up and down once.
    """
    sending = [node.sending for node in status.nodes if node.sending is not None and node.state != "left"]
    return sum(sending) / (2 * (len(sending) - 1)) if len(sending) > 1 else None


def _bound(status: JobStatus) -> float | None:
    """Return the most bit/s of sums that the known links allow; None: too many nodes, or too little known."""
    network = known_network(status)
    best = None if network is None else known_optimum(network, 1.0)
    return None if best is None else rounded(best.rate)
