"""Every message, one class each. Fields are append-only: a new one goes to the end and has a default.

Messages of a *session* (Hello … Query) carry no sequence number. *Datagrams* are sent once and may be lost
with a connection. All others are *sequenced*: the session delivers each exactly once.
"""

from __future__ import annotations

import enum

import msgspec

from netstorm.topology.policy import Policy

__all__ = [
    "Ack",
    "AllFinished",
    "Barrier",
    "BarrierReached",
    "Binding",
    "DataMessage",
    "Datagram",
    "Delivered",
    "Failed",
    "Finished",
    "Goodbye",
    "Heartbeat",
    "Hello",
    "Join",
    "Joined",
    "KeyGrant",
    "KeySpec",
    "KeysRegistered",
    "Leave",
    "LinkMeasure",
    "Measured",
    "Member",
    "Message",
    "Nack",
    "NewPolicy",
    "NodeStatus",
    "Part",
    "PeerFinished",
    "PeerGone",
    "Phase",
    "Query",
    "Refused",
    "RegisterKeys",
    "ReplicaDigest",
    "RoundBegun",
    "SessionMessage",
    "Suspect",
    "TopologyAnswer",
    "TopologyRequest",
    "Waiting",
    "Welcome",
]


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """Base of everything that crosses a wire."""


# ------------------------------------------------------------------------------------------------ sessions


class SessionMessage(Message, frozen=True):
    """Consumed by the session itself; never delivered."""


class Hello(SessionMessage, frozen=True, tag=1):
    """The side that opened a connection, before anything else on it."""

    job: str
    sender: int
    """Rank of the sender; -1 while it has none."""
    incarnation: int
    """Random number of the sender's process: a restarted rank is somebody else."""
    receiver: int
    """Whom the sender believes to talk to: a rank, or -1 for the scheduler. Ports are re-used."""
    session: int
    """Random number of this session; the same after a reconnect."""
    received: int
    """Highest contiguous sequence number received from the other side in this session."""
    beyond: tuple[int, ...] = ()
    """Sequence numbers received beyond it."""
    resuming: bool = False
    """This session has been welcomed before: whoever does not remember it must refuse, not begin anew."""


class Welcome(SessionMessage, frozen=True, tag=2):
    """Answer to `Hello`: data may flow. What the opener has not yet been acknowledged is sent again."""

    incarnation: int
    session: int
    received: int
    beyond: tuple[int, ...] = ()


class Refused(SessionMessage, frozen=True, tag=3):
    """Answer to `Hello`: this connection will never be accepted; the reason is for a person."""

    reason: str


class Ack(SessionMessage, frozen=True, tag=4):
    """Everything up to `received`, and each of `beyond`, has been received, checked and stored."""

    received: int
    beyond: tuple[int, ...] = ()
    query: int = 0
    """Number of the last `Query` on this connection: whatever was sent before it and is missing here is
    lost.
    """


class Nack(SessionMessage, frozen=True, tag=5):
    """The payload of `sequence` failed its checksum: send it again."""

    sequence: int


class Query(SessionMessage, frozen=True, tag=6):
    """No acknowledgement for a while: are you there? Answered by `Ack`."""

    number: int = 0
    """Counts the queries of a connection, from 1."""


class Goodbye(SessionMessage, frozen=True, tag=7):
    """The sender closes this session on purpose; silence from now on is no failure."""


# ----------------------------------------------------------------------------------------------- datagrams


class Datagram(Message, frozen=True):
    """Sent once, without acknowledgement."""


class Heartbeat(Datagram, frozen=True, tag=20):
    """A node to the scheduler, every `PS_HEARTBEAT_INTERVAL`."""

    busy: str = ""
    """What the node is waiting for, for a person; empty if nothing."""


class Waiting(Datagram, frozen=True, tag=21):
    """The scheduler to a node that waits for others: who is here and who is missing, for a person."""

    text: str


class LinkMeasure(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """What a receiver has seen of the link from `source` of late, or a sender of the link to it."""

    source: int
    """The node at the other end: in `Measured.outgoing` that is the receiver."""
    rate: float
    """Bit/s of payload and headers while the link was busy; 0: no chunk has measured it."""
    error: float
    """Standard error of `rate`, as a fraction of it."""
    latency: float = -1.0
    """Seconds, one way: half of the way there and back, so it holds for both directions; -1: not known."""
    chunks: int = 0
    """How many have measured it."""
    shared: float = 0.0
    """Part of that time in which other links out of the sender or into the receiver were busy, too, unless it
    is known that they don't slow one another. Near 1, `rate` is only a lower bound.
    """


class Measured(Datagram, frozen=True, tag=22):
    """A node to the scheduler: what its traffic says of the links into it, and of its access link."""

    links: tuple[LinkMeasure, ...]
    egress: float = 0.0
    """Bit/s of all links out of this node together while they limited one another; 0: not seen."""
    ingress: float = 0.0
    """The same of all links into it."""
    outgoing: tuple[LinkMeasure, ...] = ()
    """The links out of this node, by the acknowledgements. Less exact than what their receivers say, who also
    know of what is shared at either end (`shared` is of this end alone here); for their latency, and for
    links whose receivers say nothing.
    """


class NodeStatus(Datagram, frozen=True, tag=23):
    """A node to the scheduler: how it is doing, for people and metrics."""

    rounds: int
    """Rounds of all keys complete so far."""
    round_s: float
    """Seconds from the begin to the end of the last one."""
    waited_s: float
    """Seconds so far in which operations were outstanding."""
    bytes_sent: int
    """To other nodes, headers included."""
    clock_offset: float
    """Cluster clock less the node's, in s."""
    clock_drift: float
    """How much faster the cluster clock goes."""
    detoured: int = 0
    """Chunks sent over auxiliary paths so far."""
    last_round: int = -1
    """Number of the newest round that is complete in all keys that have begun it; `round_s` is its time."""
    clock_error: float = -1.0
    """Most that `clock_offset` may be wrong, in s; -1: not known."""


# ------------------------------------------------------------------------------------------ the data plane


class Phase(enum.IntEnum):
    """Which way a part travels."""

    REDUCE = 0
    BROADCAST = 1


class DataMessage(Message, frozen=True):
    """Carries a payload in a frame of its own."""


class Part(DataMessage, frozen=True, tag=40):
    """A node to its tree neighbour: values of one chunk. They travel in frame 1; no frame 1 means zeros."""

    key: int
    round: int
    """Push count of the key, from 0 (its initial value); sums never mix rounds."""
    chunk: int
    """Number of the chunk within its key."""
    phase: Phase
    version: int
    """Policy version that this round of this key runs under."""
    tree: int
    contributors: bytes
    """Bit set of the ranks already added in, little-endian (`bits_from_wire`)."""
    dtype: str
    """NumPy name of the values' type."""
    priority: int = 0
    """Higher goes first on every link."""
    codec: int = 0
    """0: plain values."""
    is_aux: bool = False
    """On an auxiliary path (the paper's IS_AUX): forward only."""
    path: tuple[int, ...] = ()
    """Node sequence of an auxiliary path (the paper's PATH); empty on a primary path."""
    hop: int = 0
    """Index in `path` of the node that this message is sent to."""


class Delivered(Message, frozen=True, tag=41):
    """Back along an auxiliary path, node by node: a part is at its end, and path[0] may send another one."""

    path: tuple[int, ...]
    """Of the part."""
    hop: int
    """Index in `path` of the node that this message is sent to."""
    key: int
    round: int
    chunk: int
    phase: Phase


# --------------------------------------------------------------------------------------- the control plane


class Join(Message, frozen=True, tag=60):
    """A node to the scheduler: let me in."""

    asked_rank: int
    """-1: any."""
    num_workers: int
    host: str
    """Address that the other nodes can reach."""
    port: int
    site: str
    release: str
    """Version of the NetStorm package."""
    pid: int
    must_agree: dict[str, str] = {}
    """Job-wide settings that this node was given explicitly, by variable name."""


class Member(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One general node of the job."""

    rank: int
    host: str
    port: int
    site: str
    incarnation: int


class Joined(Message, frozen=True, tag=61):
    """The scheduler to each node, when all are here."""

    rank: int
    members: tuple[Member, ...]
    """By rank."""
    policy: Policy
    heartbeat_interval_s: float
    heartbeat_timeout_s: float


class KeySpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank says a key is."""

    namespace: int
    """The n-th store that the process created."""
    name: str
    shape: tuple[int, ...]
    dtype: str


class RegisterKeys(Message, frozen=True, tag=62):
    """A node to the scheduler: keys that it is about to use."""

    keys: tuple[KeySpec, ...]


class KeyGrant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a key is called from now on."""

    namespace: int
    name: str
    key: int
    first_slot: int
    """Slot of the key's first chunk, the next chunks have the next slots; `Policy.tree_of` maps a slot to a
    tree. It depends on the key's offset alone, so registering a key never moves another's chunks.
    """
    offset: int
    """Byte offset of the key in the job: its chunks' place in the global order."""
    chunk_size: int
    """Elements of a chunk of this key."""


class KeysRegistered(Message, frozen=True, tag=63):
    """The scheduler's answer to `RegisterKeys`; round 0 of each key may begin, under the bindings that come
    with it.
    """

    grants: tuple[KeyGrant, ...]
    bindings: tuple[Binding, ...]


class RoundBegun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A round of a key has begun at the sender."""

    key: int
    round: int
    rule: str
    """Fingerprint of what the sender will do with the sum (its update rule); ranks must agree, round by
    round.
    """


class TopologyRequest(Message, frozen=True, tag=64):
    """TRP: these rounds have begun here; under which policy does the next one of each key run?"""

    begun: tuple[RoundBegun, ...]


class Binding(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rounds of a key from `from_round` on run under `version`, until a later binding; valid up to
    `granted`.
    """

    key: int
    from_round: int
    version: int
    granted: int


class TopologyAnswer(Message, frozen=True, tag=65):
    """The scheduler's answer to `TopologyRequest`. Asking twice gets the same answer."""

    bindings: tuple[Binding, ...]


class NewPolicy(Message, frozen=True, tag=66):
    """The scheduler to all nodes, before any binding names its version."""

    policy: Policy


class Barrier(Message, frozen=True, tag=67):
    """A node has come to its n-th barrier."""

    number: int


class BarrierReached(Message, frozen=True, tag=68):
    """All nodes have come to barrier `number`."""

    number: int


class Finished(Message, frozen=True, tag=69):
    """A node will push no more; it goes on forwarding until all have finished."""

    last_rounds: dict[int, int]
    """Last round pushed of each key."""


class PeerFinished(Message, frozen=True, tag=70):
    """The scheduler to all others: that rank has finished."""

    rank: int
    last_rounds: dict[int, int]


class AllFinished(Message, frozen=True, tag=71):
    """The scheduler to all: nobody needs you any more."""


class Failed(Message, frozen=True, tag=72):
    """A node's program has failed."""

    reason: str


class Suspect(Message, frozen=True, tag=73):
    """A node cannot reach another one."""

    rank: int
    reason: str


class PeerGone(Message, frozen=True, tag=74):
    """The scheduler to all: the job cannot go on, because of `rank` (-1: because of a disagreement)."""

    rank: int
    kind: str
    """"lost", "failed", "disagreement" or "key"."""
    reason: str
    """A full sentence: rank, host, the last thing heard from it or what it said."""


class Leave(Message, frozen=True, tag=75):
    """A node closes its connection for good; after `AllFinished`, or because it gives up."""


class ReplicaDigest(Message, frozen=True, tag=76):
    """A node to the scheduler: what it holds of a key after a round. All ranks must hold the same."""

    key: int
    round: int
    digest: int
    """CRC-32C of the value's bytes."""
