"""Membership: joining and leaving a job, barriers, and failures of nodes."""

from __future__ import annotations

import msgspec

from netstorm.protocol.messages.kinds import Message
from netstorm.protocol.messages.rounds import KeyGrant, KeySpec
from netstorm.topology.policy import Policy

__all__ = [
    "Alive",
    "AllFinished",
    "Barrier",
    "BarrierReached",
    "Failed",
    "Finished",
    "HiddenKey",
    "Join",
    "Joined",
    "Leave",
    "Member",
    "PeerFinished",
    "PeerGone",
    "Probe",
    "Suspect",
]


class Join(Message, frozen=True, tag=60):
    """A node to the scheduler: a request to join the job."""

    asked_rank: int
    """The rank that the node asks for; -1: any."""
    num_workers: int
    host: str
    """Address that the other nodes can reach."""
    port: int
    site: str
    release: str
    """Version of the NetStorm package."""
    pid: int
    must_agree: dict[str, str] = msgspec.field(default_factory=dict)
    """Job-wide settings that were set explicitly on this node, by variable name."""
    framework: str = ""
    """Whose tensors the node's program sums; the same at all nodes of a job."""
    machine: int = 0
    """The same at all processes that reach each other over loopback; 0: unknown."""


class Member(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One general node of the job."""

    rank: int
    host: str
    port: int
    site: str
    incarnation: int
    user: str = ""
    """Text of the public key with which it connects; empty: the job has no key."""


class HiddenKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A secret, which no log shows."""

    key: bytes = b""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"


class Joined(Message, frozen=True, tag=61):
    """The scheduler to each node, when all nodes have joined."""

    rank: int
    members: tuple[Member, ...]
    """By rank."""
    policy: Policy
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    joins: bool = False
    """Ranks that have finished contribute zeros until all have (NETSTORM_UNEVEN=join)."""
    owners: tuple[int, ...] = ()
    """Weight of each rank as an owner in asynchronous training; 0: it owns nothing. Fixed for the job."""
    resume_s: float = 0.0
    """How long to go on without the scheduler, which will know this job after a restart; 0: it will not know
    it."""
    elastic: tuple[int, int] | None = None
    """Fewest and most nodes, of a job that nodes may leave and join; None: of any other job. Members without
    a port are places that no node has."""
    later: bool = False
    """The job had begun before, and the node has no state yet."""
    barriers: int = 0
    """How many barriers the others have reached."""
    keys: tuple[KeySpec, ...] = ()
    """Keys that the others have registered, in the order of their numbers."""
    grants: tuple[KeyGrant, ...] = ()
    """The numbers and places of these keys."""
    majority: bool = False
    """The scheduler goes on only with a majority of the last view, since another one may take the job over
    with the others."""
    proof_key: HiddenKey = HiddenKey()
    """By which this node alone recognises the schedulers of its job; empty: the job has no key."""
    reproducible: bool = False
    """Values are added in a fixed order, so that results are the same in each run (NETSTORM_REPRODUCIBLE)."""


class Barrier(Message, frozen=True, tag=67):
    """A node to the scheduler: it has reached its n-th barrier."""

    number: int


class BarrierReached(Message, frozen=True, tag=68):
    """The scheduler to all: all nodes have reached barrier `number`."""

    number: int


class Finished(Message, frozen=True, tag=69):
    """A node to the scheduler: it pushes no more, but goes on forwarding until all have finished."""

    last_rounds: dict[int, int]
    """Last round pushed of each key."""


class PeerFinished(Message, frozen=True, tag=70):
    """The scheduler to all other nodes: a rank has finished."""

    rank: int
    last_rounds: dict[int, int]


class AllFinished(Message, frozen=True, tag=71):
    """The scheduler to all: every node has finished, so forwarding is no longer needed."""


class Failed(Message, frozen=True, tag=72):
    """A node to the scheduler: its program has failed."""

    reason: str


class Suspect(Message, frozen=True, tag=73):
    """A node to the scheduler: it cannot reach another node."""

    rank: int
    reason: str
    refused: bool = False
    """No process listens at that node's address."""
    busy: bool = False
    """It may be busy: it does not answer, but the kernel of its machine acknowledges. The scheduler says if
    it knows better (`Alive`)."""


class Probe(Message, frozen=True, tag=115):
    """The scheduler to a node that may have ended: nothing to do. Whether it can be sent is the answer."""


class Alive(Message, frozen=True, tag=132):
    """The scheduler to a node that takes another one for busy: it is not, so their connection is broken."""

    rank: int


class PeerGone(Message, frozen=True, tag=74):
    """The scheduler to all: the job has failed because of `rank` (-1: because of a disagreement)."""

    rank: int
    kind: str
    """"lost", "failed", "disagreement", "key" or "timeout"; "removed": this node alone is out of the job."""
    reason: str
    """A full sentence: rank, host, and the last message from it or its own reason."""
    proof: bytes = b""
    """If it answers `Resume`: as in `Resumed`."""


class Leave(Message, frozen=True, tag=75):
    """A node closes its connection for good; after `AllFinished`, or because it gives up."""
