"""All messages, one class each, by subject.

Fields are append-only: a new field is the last one and has a default. Messages of a *session* (Hello … Query)
carry no sequence number. *Datagrams* are sent once and may be lost with a connection. All others are
*sequenced*: the session delivers each exactly once.
"""

import enum
import math
from typing import Final, TypeAlias

import msgspec

from netstorm.topology.policy import Policy

__all__ = [
    "ANY_RULE",
    "THROUGHPUT_PERIOD_S",
    "Accept",
    "Ack",
    "Alive",
    "AllFinished",
    "Applied",
    "AsynchronousMessage",
    "Barrier",
    "BarrierReached",
    "Binding",
    "BlockCopy",
    "CallTimedOut",
    "CallsWaiting",
    "CaughtUp",
    "CopiesHeld",
    "CopyKept",
    "CopyMessage",
    "CopyReleased",
    "CopyWanted",
    "CountRequest",
    "DataMessage",
    "Datagram",
    "Delivered",
    "Departure",
    "Failed",
    "FailedLink",
    "FailedLinks",
    "Finished",
    "Goodbye",
    "Heartbeat",
    "HeldClocks",
    "HeldCopy",
    "Hello",
    "HiddenKey",
    "JobReport",
    "Join",
    "Joined",
    "KeyGrant",
    "KeySpec",
    "KeysAnnounced",
    "KeysRegistered",
    "LaneAnswer",
    "LaneOffer",
    "Leave",
    "LinkMeasure",
    "LinkRestored",
    "LinkThroughput",
    "LinkTrial",
    "LossTerms",
    "Measured",
    "Member",
    "Message",
    "MessageCount",
    "Moved",
    "Nack",
    "NewPolicy",
    "NewView",
    "NodeStatus",
    "Offer",
    "Part",
    "PeerFinished",
    "PeerGone",
    "Phase",
    "Piece",
    "PointToPointMessage",
    "Probe",
    "Pull",
    "PullRows",
    "PullStates",
    "Push",
    "Query",
    "Recover",
    "RecoverAnswer",
    "Recovery",
    "Refused",
    "RegisterKeys",
    "Rejected",
    "ReplicaDigest",
    "Reserve",
    "Resume",
    "Resumed",
    "RoundBegun",
    "RoundResults",
    "Routed",
    "SendAgain",
    "SessionMessage",
    "SmallMessage",
    "StateAsked",
    "StateMessage",
    "StateOffered",
    "StatePiece",
    "StateReceived",
    "StateWanted",
    "States",
    "StepTimes",
    "StepsGranted",
    "Suspect",
    "Taken",
    "ThroughputReport",
    "Tick",
    "TopologyAnswer",
    "TopologyRequest",
    "Value",
    "ViewAgreed",
    "ViewReport",
    "Waiting",
    "WaitingCall",
    "Welcome",
]


# The kinds of messages. Fields are append-only: a new field is the last one and has a default.
#
# Messages of a *session* (Hello … Query) carry no sequence number. *Datagrams* are sent once and may be lost
# with a connection. All others are *sequenced*: the session delivers each exactly once.


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """Base class of all messages."""


class SessionMessage(Message, frozen=True):
    """For the session itself; never delivered to the machine."""


class Datagram(Message, frozen=True):
    """Sent once, without acknowledgement; may be lost."""


class DataMessage(Message, frozen=True):
    """Carries a payload in a frame of its own."""


# Sessions: messages between the two ends of one, which are never delivered to the machine.


class SharedMemory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Memory of a process, in which it has the payloads that it sends to others of its user and machine."""

    process: int
    """Its number, in its PID namespace."""
    descriptor: int
    """Number of its file descriptor there."""
    nbytes: int
    token: bytes
    """Random bytes at its begin, by which a reader knows it."""
    number: int
    """Of the connection that it is for, at the side that opened it."""


class Hello(SessionMessage, frozen=True, tag=1):
    """The first message on a connection, from the side that opened it."""

    job: str
    sender: int
    """Rank of the sender; -1 while it has none."""
    incarnation: int
    """Random number of the sender's process: a restarted rank has another one."""
    receiver: int
    """The rank that the sender expects at this address; -1: the scheduler. Ports are re-used. Below -1: a
    scheduler that takes the job over asks whoever is there."""
    session: int
    """Random number of this session; the same after a reconnect."""
    received: int
    """Highest contiguous sequence number received from the other side in this session."""
    beyond: tuple[int, ...] = ()
    """Sequence numbers received beyond it."""
    resuming: bool = False
    """The session was established before: a receiver that does not know it must refuse it, not begin a new
    one."""
    boot: int = 0
    """Number of the boot of the sender's machine, if the connection leads to a loopback address; a receiver
    of the same boot is on the same machine. 0: another address, or payloads are to be checked always."""
    memory: SharedMemory | None = None
    """Where payloads may lie that come over this connection; None: they come over it themselves."""


class Welcome(SessionMessage, frozen=True, tag=2):
    """Answer to `Hello`: data may flow. Both sides retransmit what the other one has not received."""

    incarnation: int
    session: int
    received: int
    beyond: tuple[int, ...] = ()
    unchecked: bool = False
    """Payloads need no checksums on this connection: it does not leave the machine."""
    token: int = 0
    """Random number of this session, which the sender alone has made: the same over each of its connections,
    so that no other process goes on with the session."""
    shares: bool = False
    """The receiver has the memory that Hello names: payloads may be references."""


class Refused(SessionMessage, frozen=True, tag=3):
    """Answer to `Hello`: the session is not accepted; the reason is for a person."""

    reason: str


class Ack(SessionMessage, frozen=True, tag=4):
    """Everything up to `received`, and each of `beyond`, has been received, checked and stored."""

    received: int
    beyond: tuple[int, ...] = ()
    query: int = 0
    """Number of the last `Query` on this connection: what was sent before it and is missing here is lost."""


class Nack(SessionMessage, frozen=True, tag=5):
    """Message `sequence` was not taken: its payload failed its checksum, or had no room. Send it again."""

    sequence: int
    later: bool = False
    """There is no room for it yet: keep it until another Nack asks for it. Others may be sent meanwhile."""


class Query(SessionMessage, frozen=True, tag=6):
    """A liveness check after a while without acknowledgement. Answered by `Ack`."""

    number: int = 0
    """Number of the query on this connection, from 1."""


class Goodbye(SessionMessage, frozen=True, tag=7):
    """The sender ends this session on purpose; silence from now on is no failure."""


class Reserve(SessionMessage, frozen=True, tag=10):
    """The first message on a connection that was opened ahead, in place of `Hello`, which may come later."""


class LaneOffer(SessionMessage, frozen=True, tag=8):
    """The sender has values that may be late, and would send them as packets beside this session."""

    number: int
    """By which acknowledgements of packets name the lane; the sender has no other one of this number."""
    key: bytes
    """Random, of the lane alone: packets are encrypted and authenticated with it."""
    channels: int
    """Sockets that the sender has."""


class LaneAnswer(SessionMessage, frozen=True, tag=9):
    """Answer to `LaneOffer`: packets may come."""

    number: int
    """That of the offer."""
    lane: int
    """By which packets of values name the lane."""
    ports: tuple[int, ...]
    """UDP ports of the sender's host, a channel each."""
    room: int
    """Bytes of incomplete messages that may be under way."""


# Values: what synchronous rounds carry, and its confirmation on auxiliary paths.


class Phase(enum.IntEnum):
    """Direction of a part in its tree."""

    REDUCE = 0
    BROADCAST = 1
    RECOVERY = 2
    """Not in a tree: a result from a rank that has it to one that lacks it, after a change of the view."""


class LossTerms(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A round may end without some contributions, which come too late (MLT's bounded loss)."""

    bound: float
    """Largest share of a step that may be missing, by absolute values."""
    deadline_s: float
    """How long all contributions are waited for."""
    important: float = 0.0
    """Share of the chunks that must be complete, those with the largest values (DGT); 0: none."""
    mass: float = 0.0
    """Sum of the absolute values of the contributions in this part; of a result 0."""
    least: float = -1.0
    """What `important` falls to as results become smaller; negative: it stays."""
    newest: float = 0.3
    """Weight of the newest result in the means that chunks are ranked by."""


class Part(DataMessage, frozen=True, tag=40):
    """A node to its tree neighbour: values of one chunk, in frame 1; without frame 1 they are zeros."""

    key: int
    round: int
    """Number of the push of this key, from 0 (its initial value); sums never mix rounds."""
    chunk: int
    """Number of the chunk within its key."""
    phase: Phase
    version: int
    """Version of the policy that this round of this key is bound to."""
    tree: int
    contributors: bytes
    """Bit set of the ranks already added in, little-endian (`bits_from_wire`). A result of nobody, with
    `loss`, says that the round has begun."""
    dtype: str
    """NumPy name of the values' type."""
    priority: int = 0
    """Higher goes first on every link."""
    codec: int = 0
    """Form of the values; 0: plain (see `protocol.codecs`)."""
    is_aux: bool = False
    """On an auxiliary path (the paper's IS_AUX): forward only."""
    path: tuple[int, ...] = ()
    """Node sequence of an auxiliary path (the paper's PATH); empty on a primary path."""
    hop: int = 0
    """Index in `path` of the node that this message is sent to."""
    around: bool = False
    """On a detour around a failed link: forward only, as on auxiliary paths, but the receiver confirms
    nothing, and path[0] may be on it twice."""
    call: int = 0
    """Digest of the collective call that the sender makes (`Operation.digest`): the same at all ranks, or
    they disagree; 0: not a collective round."""
    settled: int = -1
    """Up to this round of the key, all contributors have completed all; -1: not known, as in all jobs that
    nodes may not leave."""
    loss: LossTerms | None = None
    """The round may end without some contributions; None: it waits for all."""


class Delivered(Message, frozen=True, tag=41):
    """Back along an auxiliary path, node by node: a part has arrived, and path[0] may send another one."""

    path: tuple[int, ...]
    """Path of the part."""
    hop: int
    """Index in `path` of the node that this message is sent to."""
    key: int
    round: int
    chunk: int
    phase: Phase
    version: int = 0


# Keys, rounds and policies: registration of keys, and the policy that each round is bound to (TRP, the
# topology request protocol).


class KeySpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rank's description of a key."""

    namespace: int
    """The n-th store that the process created."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    form: int = 0
    """Codec of most of its rounds (see `Part.codec`); it determines the size of chunks."""
    members: tuple[int, ...] = ()
    """The ranks that contribute, ascending; empty: all."""


class RegisterKeys(Message, frozen=True, tag=62):
    """A node to the scheduler: keys that it wants to use."""

    keys: tuple[KeySpec, ...]


class KeyGrant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The number of a key, and the place of its chunks in the job."""

    namespace: int
    name: str
    key: int
    first_slot: int
    """Slot of the key's first chunk; further chunks have the next slots. `Policy.tree_of` maps a slot to a
    tree. The slot depends on the keys before it alone, so registering a key moves no other key's chunks."""
    offset: int
    """Byte offset of the key in the job: the position of its chunks in the global order."""
    chunk_size: int
    """Elements of a chunk of this key."""


class Binding(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rounds of a key from `from_round` on use policy `version`, until a later binding; valid up to round
    `granted`.
    """

    key: int
    from_round: int
    version: int
    granted: int


class KeysRegistered(Message, frozen=True, tag=63):
    """The scheduler's answer to `RegisterKeys`: round 0 of each key may begin, with the given bindings."""

    grants: tuple[KeyGrant, ...]
    bindings: tuple[Binding, ...]


ANY_RULE: Final = "*"
"""`RoundBegun.rule` of a rank that does not use the sum, since its program has ended."""


class RoundBegun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A round of a key that has begun at the sender."""

    key: int
    round: int
    rule: str
    """Fingerprint of the update rule that the sender applies to the sum; ranks must agree in each round."""


class TopologyRequest(Message, frozen=True, tag=64):
    """TRP, a node to the scheduler: these rounds have begun here; to which policy is the next one of each key
    bound?
    """

    begun: tuple[RoundBegun, ...]


class TopologyAnswer(Message, frozen=True, tag=65):
    """The scheduler's answer to `TopologyRequest`. A repeated request gets the same answer."""

    bindings: tuple[Binding, ...]


class NewPolicy(Message, frozen=True, tag=66):
    """The scheduler to all nodes, before any binding names the policy's version."""

    policy: Policy


class Moved(Message, frozen=True, tag=77):
    """Chunks of an open round are summed under a later policy than the one that the round is bound to.

    Their root sends it to the scheduler, which sends it to all nodes; a repetition changes nothing.
    """

    key: int
    round: int
    version: int
    """The later policy's."""
    chunks: tuple[int, ...]


class WaitingCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A collective call that has not completed for a while."""

    group: str
    number: int
    """Counts the calls of the group, from 0."""
    text: str
    """What was called, with which types and shapes: the same at every member."""


class CallsWaiting(Message, frozen=True, tag=78):
    """A node to the scheduler: these calls wait. If two ranks' n-th calls differ, neither will ever
    complete.
    """

    calls: tuple[WaitingCall, ...]


class CallTimedOut(Message, frozen=True, tag=79):
    """A node to the scheduler: a call has reached its time-out, which ends the job."""

    call: WaitingCall
    members: tuple[int, ...]
    """The ranks of the group."""
    seconds: float
    """The time-out."""


class ReplicaDigest(Message, frozen=True, tag=76):
    """A node to the scheduler: digest of a key's value after a round. All ranks must have the same value."""

    key: int
    round: int
    digest: int
    """CRC-32C of the value's bytes."""


# Membership: joining and leaving a job, barriers, and failures of nodes.


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
    """The scheduler to a node that is silent, or may have ended: nothing to do. Whether it can be sent, and
    how soon the kernel acknowledges it, is the answer.
    """


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


# Links: those that fail, and recover, while the nodes at both ends are alive.


class LinkTrial(Message, frozen=True, tag=95):
    """A node to another one, over a failed link: do you receive this? Answered over the same connection."""

    answer: bool = False


class LinkRestored(Message, frozen=True, tag=96):
    """A node to the scheduler: the link to a rank that it could not reach works again."""

    rank: int


class FailedLink(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A link that its source cannot use."""

    source: int
    target: int
    way: tuple[int, ...]
    """The detour: ranks from `source` to `target`, both included; all its links work."""


class FailedLinks(Message, frozen=True, tag=97):
    """The scheduler to all: the complete list of links that have failed at present."""

    links: tuple[FailedLink, ...]


# Local steps: (ESync) how long a node's steps take, and how many it may take before the next exchange.


class StepTimes(Message, frozen=True, tag=130):
    """A node to the scheduler: it has taken the local steps of a round, and begins to exchange."""

    training: int
    """The n-th of the process that balances its steps: the same at every node."""
    round: int
    """Counts the exchanges, from 0."""
    step_s: float
    """Mean duration of the round's local steps."""
    exchange_s: float = 0.0
    """Duration of the last exchange, with the wait for other nodes; 0 before the first."""
    least: int = 1
    """Fewest local steps of a round."""
    most: int = 1
    """Most local steps of a round."""


class StepsGranted(Message, frozen=True, tag=131):
    """The scheduler to a node: how many local steps it takes in the round after `round`."""

    training: int
    round: int
    steps: int


# Status and measurements: datagrams on nodes and links, of which only the newest counts.

THROUGHPUT_PERIOD_S: Final = 0.5
"""Seconds that a `ThroughputReport` covers."""


class Heartbeat(Datagram, frozen=True, tag=20):
    """A node to the scheduler, every `PS_HEARTBEAT_INTERVAL`."""

    busy: str = ""
    """What the node is waiting for, for a person; empty: nothing."""


class Waiting(Datagram, frozen=True, tag=21):
    """The scheduler to a node that waits for others: which nodes have joined and which are missing, for a
    person.
    """

    text: str


class LinkMeasure(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """A recent measurement of a link, by its receiver or (in `Measured.outgoing`) by its sender."""

    source: int
    """The node at the other end: the link's sender; in `Measured.outgoing` its receiver."""
    rate: float
    """Bit/s of payload and headers while the link was busy; 0: unknown."""
    error: float
    """Standard error of `rate`, as a fraction of it."""
    latency: float = -1.0
    """Seconds, one way: half of the round trip, so it holds for both directions; -1: unknown."""
    chunks: int = 0
    """Number of chunks that `rate` rests on."""
    shared: float = 0.0
    """Part of the measured time in which other links out of the sender or into the receiver were busy, unless
    it is known that they do not slow one another. Near 1, `rate` is only a lower bound."""
    signal: float = math.inf
    """Shortest time of a small message from `source` to the reporting node in s, plus the difference of their
    clocks, which cancels in the sum of both directions; infinite: unknown."""
    jumped: bool = False
    """The last measurements agree that the rate has changed."""
    delivered: bool = False
    """The rate is what the sender's kernel has delivered, which is more exact than the receiver's
    measurement."""
    trip: float = 0.0
    """Shortest recent round trip in s, by the kernel of the link's sender; 0: unknown."""


class LinkThroughput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one link delivered in one half second."""

    target: int
    rate: float
    """Bit/s."""
    backlogged: bool
    """There was unsent data all the time."""


class ThroughputReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the links out of a node delivered in one half second, by its kernel."""

    number: int
    """Number of the half second on the cluster clock, since its epoch; bytes count when they arrived."""
    links: tuple[LinkThroughput, ...]
    """The links that delivered something."""


class Measured(Datagram, frozen=True, tag=22):
    """A node to the scheduler: measurements of its links and of its access line."""

    links: tuple[LinkMeasure, ...]
    egress: float = 0.0
    """Bit/s of all links out of this node together while they limited one another; infinite: they do not.

    Below 0: nobody knows whether they do, and it is less the most that they carried together. 0: unknown.
    """
    ingress: float = 0.0
    """The same for all links into it."""
    outgoing: tuple[LinkMeasure, ...] = ()
    """The links out of this node, measured by what its kernel has delivered (`LinkMeasure.delivered`) or else
    by acknowledgements. The latter are less exact than the receivers' measurements, and `shared` covers this
    end alone; they serve for latencies and for links whose receivers report nothing."""
    throughput: tuple[ThroughputReport, ...] = ()
    """What the links out of this node have delivered since the last report."""


class NodeStatus(Datagram, frozen=True, tag=23):
    """A node to the scheduler: its progress, for people and metrics."""

    rounds: int
    """Rounds of all keys complete so far."""
    round_s: float
    """Duration of the last one in s."""
    waited_s: float
    """Seconds so far in which operations were outstanding."""
    bytes_sent: int
    """To other nodes, headers included."""
    clock_offset: float
    """Cluster clock less the node's, in s."""
    clock_drift: float
    """How much faster the cluster clock runs than the node's, in s/s."""
    detoured: int = 0
    """Chunks sent over auxiliary paths so far."""
    last_round: int = -1
    """Number of the newest round that is complete in all keys that have begun it; `round_s` is its time."""
    clock_error: float = -1.0
    """Largest error of `clock_offset`, in s; -1: unknown."""
    clock_hops: int = 0
    """Exchanges between this node's clock and the scheduler's: 1 if it asks the scheduler; 0: unknown."""
    compression: str = ""
    """How gradients travel, for a person; empty: as they are."""
    queued: int = -1
    """Bytes for other nodes that wait, or are not acknowledged yet; -1: unknown."""


# Views of elastic jobs: who is in a job that nodes may leave and join, and how rounds under way end when that
# changes.


class Departure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rank that is in the job no more."""

    rank: int
    reason: str
    """A full sentence, for a person."""


class NewView(Message, frozen=True, tag=110):
    """The scheduler to all members of a new view: stop, and report which results you have (`ViewReport`).

    Everything that has no result yet is summed anew under `policy`, among the members of this view.
    """

    view: int
    """Counts the views of a job, from 0."""
    policy: Policy
    members: tuple[Member, ...]
    """The nodes that are in the job, ascending by rank."""
    departures: tuple[Departure, ...] = ()
    """Ranks of the view before that are not in this one."""
    arrivals: tuple[int, ...] = ()
    """Ranks of this view whose process was not in the one before."""


class RoundResults(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The results of one round that the sender has."""

    key: int
    round: int
    chunks: bytes
    """Bit set of the chunks, little-endian."""
    known: bytes = b""
    """Bit set of chunks whose results were formed, and are not here: no rank wants them from here."""
    of: int = 0
    """How many chunks the round has; 0: not said."""


class ViewReport(Message, frozen=True, tag=111):
    """A node to the scheduler: which results it has. Until the answer it takes no others."""

    view: int
    complete: dict[int, int]
    """By key: the round up to which all are complete here."""
    results: tuple[RoundResults, ...]
    """Of rounds that another rank may not have completed."""
    fresh: bool = False
    """The sender has just joined: it has taken part in no view before."""
    begins: dict[int, int] = msgspec.field(default_factory=dict)
    """By key: the first round of the sender's program, if it joined later. Its state has all before, also
    those of which it has no results."""


class Recovery(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Results of one round that one rank sends to another one."""

    key: int
    round: int
    source: int
    target: int
    chunks: bytes
    """Bit set of the chunks, little-endian."""


class ViewAgreed(Message, frozen=True, tag=112):
    """The scheduler to all members, once all have reported: which results are sent to whom. All chunks that
    are not named, and have no result, are summed anew.
    """

    view: int
    recoveries: tuple[Recovery, ...]
    first_rounds: dict[int, int]
    """By key: the first round that some rank has not completed. New members get all results from there on."""
    lost: tuple[RoundResults, ...] = ()
    """Results that were formed, and no member has any more: operations that wait for them fail."""


class KeysAnnounced(Message, frozen=True, tag=114):
    """The scheduler to silent members: keys that others have registered, to forward their parts."""

    keys: tuple[KeySpec, ...]
    grants: tuple[KeyGrant, ...]


class CaughtUp(Message, frozen=True, tag=113):
    """A silent member to the scheduler: it has the job's state, and contributes as soon as it may."""


# A scheduler that was started again: nodes repeat to it what it may not have answered.


class JobReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a node knows of its job: all that another scheduler needs to take it over without a log."""

    members: tuple[Member, ...]
    """By rank. Those without a port are places that no node has."""
    policy: Policy
    """The newest one."""
    specs: tuple[KeySpec, ...]
    """The keys, in the order of their numbers."""
    grants: tuple[KeyGrant, ...]
    granted: dict[int, int]
    """By key: the last round that this node has been granted."""
    finished: dict[int, dict[int, int]]
    """By rank that has finished: its last rounds."""
    barriers: int
    """How many barriers this node has come to."""
    rows: dict[int, tuple[tuple[int, int], ...]] = msgspec.field(default_factory=dict)
    """By key: (first round, version of its policy). Of a job that nodes may not leave; in others what has no
    result yet runs under the policy of the next view."""
    policies: tuple[Policy, ...] = ()
    """Those that `rows` name, but for `policy`."""
    majority: bool = False
    """See `Joined`."""
    reproducible: bool = False
    """See `Joined`."""


class Resume(Message, frozen=True, tag=98):
    """A node to a scheduler that no longer knows its session: everything that may not have been answered."""

    keys: tuple[KeySpec, ...]
    """Requested and not granted."""
    begun: tuple[RoundBegun, ...]
    """The newest rounds that have begun here."""
    barriers: tuple[int, ...]
    """Numbers of the barriers that this node waits at."""
    last_rounds: dict[int, int] | None = None
    """As in `Finished`; None: the node has not finished."""
    suspected: tuple[int, ...] = ()
    """Ranks that this node cannot reach."""
    moved: tuple[Moved, ...] = ()
    """Chunks of open rounds that this node, their root, has given to a later policy."""
    view: int = 0
    """The newest view that this node knows."""
    job: JobReport | None = None
    """To a standby scheduler: what it needs to take the job over."""
    changing: bool = False
    """It does not know what was agreed on for that view."""
    number: int = 0
    """Counts the `Resume` of this node, so that no answer counts twice."""


class Resumed(Message, frozen=True, tag=99):
    """The scheduler's answer to `Resume`; policies and the answers to the requests follow."""

    proof: bytes = b""
    """That it is a scheduler of this job: a digest of `Resume.number` under `Joined.proof_key`. Without it a
    node of a job with a key believes nothing that is said here."""


class Recover(Message, frozen=True, tag=116):
    """A scheduler that takes a job over to a node: where it listens, if the node has lost its own one."""

    host: str
    port: int
    proof: bytes = b""
    """That it is a scheduler of this job: a digest of the address under the node's `Joined.proof_key`. Empty
    in the first question: whose key it must be, the answer says."""


class RecoverAnswer(Message, frozen=True, tag=117):
    """The answer to `Recover`."""

    accepted: bool
    """The node connects to that scheduler now, and reports what it knows of the job."""
    scheduler: str
    """Address of the scheduler that it follows, or waits for."""
    rank: int
    members: tuple[Member, ...]
    """By rank. Those without a port are places that no node has."""
    elastic: tuple[int, int] | None = None
    """See `Joined`."""
    unproven: bool = False
    """It goes to no scheduler without a proof, and this one has given none, or a wrong one."""


# State for ranks that have joined: offered by the others, and fetched in pieces.
#
# All of them are source-routed, as messages between two ranks are.


class _Directed(Message, frozen=True):
    """Forwarded from node to node along its path."""

    path: tuple[int, ...]
    hop: int
    """Index in `path` of the node that the message is sent to."""


class StateWanted(_Directed, frozen=True, tag=120):
    """A newcomer to all ranks that have the job's state: it has none yet. With `done`: it has it."""

    done: bool = False


class StateOffered(_Directed, frozen=True, tag=121):
    """A rank to a newcomer: its state before a step of its program, of which pieces may be asked for."""

    step: int
    """Counts the steps of the program. Equal steps of two ranks have equal state."""
    nbytes: int
    crc: int
    """CRC-32C of all bytes."""
    rounds: dict[int, int]
    """By key: the first round of that step."""
    barriers: int
    """How many barriers come before the step."""


class StateAsked(_Directed, frozen=True, tag=122):
    """A newcomer to a rank: send these pieces."""

    step: int
    first: int
    count: int


class StateReceived(_Directed, frozen=True, tag=124):
    """A silent rank to another one: up to these rounds, by key, it has all results."""

    rounds: dict[int, int]


class StatePiece(DataMessage, frozen=True, tag=123):
    """One piece of the state, in frame 1."""

    path: tuple[int, ...]
    hop: int
    step: int
    piece: int


StateMessage: TypeAlias = StateReceived | StateWanted | StateOffered | StateAsked | StatePiece


# Sends and receives: messages between two ranks, whatever the trees are.
#
# All of them are source-routed: `path` is the sequence of nodes from the sender to the receiver, both
# included. Nodes in between only forward. A small message goes at once. A large one is offered first, and its
# data goes in pieces once the receiver has a place for them.


class _Numbered(_Directed, frozen=True):
    number: int
    """Counts the messages from one rank to the other, small ones and offers, from 0."""


class _Announced(_Numbered, frozen=True):
    """The begin of a message that a program sends."""

    channel: str
    """Name of the process group."""
    tag: int
    what: str
    """Describes the values, for error messages: type and shape."""


class SmallMessage(_Announced, DataMessage, frozen=True, tag=100):
    """A sender to a receiver: a whole message of a program, in frame 1. Without frame 1 it has no bytes."""


class Offer(_Announced, frozen=True, tag=101):
    """A sender to a receiver: there is a message of this size; accept it when the program receives it."""

    nbytes: int


class Accept(_Numbered, frozen=True, tag=102):
    """A receiver to a sender: send the first `pieces` pieces of an offered message."""

    pieces: int
    """Grows as pieces arrive: it bounds what is under way."""
    missing: int = -1
    """Send again from this piece on: those before it have arrived; -1: send only what has not been sent."""


class Piece(_Numbered, DataMessage, frozen=True, tag=103):
    """A sender to a receiver: a piece of an accepted message, in frame 1. All but the last have 256
    KiB, or 1 MiB if the message has 32 MiB or more.
    """

    piece: int
    """Counts from 0."""


class Taken(_Numbered, frozen=True, tag=104):
    """A receiver to a sender: the program has the whole message."""


class Rejected(_Numbered, frozen=True, tag=105):
    """A receiver to a sender: the program will not have the message."""

    what: str
    """What the receiver expects instead; empty if it has finished."""
    nbytes: int
    """Size of what it expects."""


class CountRequest(_Directed, frozen=True, tag=106):
    """A rank to one that has finished: how many messages have you sent to me?"""


class MessageCount(_Directed, frozen=True, tag=107):
    """The answer to a `CountRequest`."""

    count: int


class SendAgain(_Directed, frozen=True, tag=108):
    """A rank to another one, in a new view: answers from here may be lost; announce again what is open."""


PointToPointMessage: TypeAlias = (
    SmallMessage | Offer | Accept | Piece | Taken | Rejected | CountRequest | MessageCount | SendAgain
)


# Asynchronous training: messages between ranks and the owners of blocks.
#
# All of them are source-routed: `path` is the sequence of nodes from the sender to the receiver, both
# included. Nodes in between only forward.
#
# In an elastic job a message says by which view its sender has chosen the receiver. A receiver with a later
# view drops it, since the sender sends it again once it has that view; one with an earlier view keeps it.


class _RoutedMessage(Message, frozen=True):
    """Forwarded from node to node along its path."""

    path: tuple[int, ...]
    hop: int
    """Index in `path` of the node that the message is sent to."""


class _BlockMessage(_RoutedMessage, frozen=True):
    """About one state of a block, between two ranks that keep it."""

    key: int
    block: int
    version: int
    """Number of pushes in the state."""
    view: int


class _KeyMessage(_RoutedMessage, frozen=True):
    key: int


class _KeyRequest(_KeyMessage, frozen=True):
    """A request for the newest values of a key."""

    number: int
    """Counts this rank's pulls of this key, from 0."""
    pushed: int
    """Number of this rank's pushes that the answer must include."""
    least: int = 0
    """Number of clocks of every unfinished rank that the answer must include; 0 or less: any."""
    counted: bool = False
    """Clocks are those that scripts count; otherwise each push of a key is one."""
    priority: int = 0
    confirmed: int = 0
    """See `Push`."""
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


class Push(_KeyMessage, DataMessage, frozen=True, tag=80):
    """A rank to an owner: a gradient's values for one chunk. They travel in frame 1, in the form of
    `codec`.
    """

    chunk: int
    number: int
    """Counts this rank's pushes of this key, from 0."""
    seen: int
    """Number of updates by other ranks in the value that the gradient was computed on."""
    clock: int
    """The rank's clock at the push."""
    dtype: str
    """NumPy name of the values' type."""
    rule: str
    """Fingerprint of the rank's update rule; the owner's must be the same."""
    live: tuple[float, ...] = ()
    """Parameters of the rule that scripts change between pushes (learning rate, scale of gradients), at this
    push."""
    priority: int = 0
    codec: int = 0
    """Form of the values. Without frame 1 all values are zero, or there are no rows."""
    threshold: float = 0.0
    """Value of a quantised 1."""
    confirmed: int = 0
    """Number of the sender's pushes of the key that owners have confirmed, without gaps."""
    begin: int = 0
    """What the sender's pushes are counted from where staleness is bounded: it has joined later."""
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


class Applied(_KeyMessage, frozen=True, tag=81):
    """An owner to a rank: the rank's push has become part of a block's value."""

    block: int
    number: int
    """Number of the push."""
    behind: int
    """Staleness: updates by other ranks between the value that the gradient was computed on and this one."""
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


class Pull(_KeyRequest, frozen=True, tag=82):
    """A rank to an owner: send the newest values of the blocks of a key that you own."""


class Value(_KeyMessage, DataMessage, frozen=True, tag=83):
    """An owner to a rank: the newest values of one chunk, or of the requested rows, in frame 1."""

    chunk: int
    number: int
    """Number of the pull."""
    others: int
    """Number of updates by ranks other than the receiver in the value."""
    dtype: str
    priority: int = 0
    slowest: int = 0
    """Pushes of the other rank that has the fewest, in an elastic job: a newcomer counts on from there."""
    clock: int = 0
    """The same of the clocks that scripts count."""
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


class Tick(_RoutedMessage, frozen=True, tag=84):
    """A rank to an owner: one of the rank's clocks has ended."""

    namespace: int
    """The n-th store that the process created."""
    clock: int
    """Number of clocks that have ended."""
    pushed: int
    """Number of blocks that the rank pushed to this owner in the clock that has ended; they may arrive
    later."""
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


class PullRows(_KeyMessage, DataMessage, frozen=True, tag=85):
    """A rank to an owner: send the newest values of some rows of a chunk; the answer is a `Value`.

    Frame 1 has the rows' numbers within the chunk, ascending, as little-endian `uint32`.
    """

    chunk: int
    number: int
    """This and the following: see `Pull`."""
    pushed: int
    least: int = 0
    counted: bool = False
    priority: int = 0
    confirmed: int = 0
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


class PullStates(_KeyRequest, frozen=True, tag=86):
    """A rank to an owner: send the state of your update rule for each block of a key that you own."""

    with_values: bool = False
    """And the block's values before it, of the same moment."""


class States(_KeyMessage, DataMessage, frozen=True, tag=87):
    """An owner to a rank: a piece of the state of its update rule for a block, in frame 1. What they
    carry together begins with the block's values, if these were asked for.
    """

    block: int
    number: int
    """Number of the pull."""
    piece: int
    pieces: int
    """Number of pieces; `piece` counts from 0."""
    priority: int = 0
    view: int = 0
    """Version of the policy that has the sender's view; 0: the job is not elastic."""


class BlockCopy(_BlockMessage, DataMessage, frozen=True, tag=88):
    """An owner to a block's replica, or whoever has a block's state to its next owner: a piece of the state.

    The pieces together are the values, and the state of the update rule behind them.
    """

    piece: int
    pieces: int
    values: int
    """Bytes of the values."""
    applied: tuple[int, ...]
    """Number of pushes of each rank's present process in the state."""
    begins: tuple[int, ...]
    """By rank: what its pushes are counted from where staleness is bounded; -1: it has not pushed yet."""


class CopyKept(_BlockMessage, frozen=True, tag=89):
    """A replica to a block's owner: the copy is here."""


class CopyWanted(_BlockMessage, frozen=True, tag=90):
    """A block's next owner to a rank that has the state: send it."""


class CopyReleased(_BlockMessage, frozen=True, tag=91):
    """A block's owner to a rank other than its replica: both of them have this state, so the rank may drop an
    older one, and knows what is lost if it finds none later.
    """


class HeldCopy(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """A state of a block."""

    key: int
    block: int
    version: int


class HeldClocks(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """The clocks of one store, as far as a rank has heard of them."""

    namespace: int
    ended: tuple[int, ...]
    """By rank: clocks that have ended; -1: its process has joined later, and has ended none."""


class CopiesHeld(_RoutedMessage, frozen=True, tag=92):
    """A rank to another one, at the begin of a view: what it has of the blocks that are the other one's."""

    view: int
    copies: tuple[HeldCopy, ...]
    clocks: tuple[HeldClocks, ...] = ()


CopyMessage: TypeAlias = BlockCopy | CopyKept | CopyWanted | CopyReleased
"""About the state of one block."""

AsynchronousMessage: TypeAlias = (
    Push
    | Applied
    | Pull
    | Value
    | Tick
    | PullRows
    | PullStates
    | States
    | BlockCopy
    | CopyKept
    | CopyWanted
    | CopyReleased
    | CopiesHeld
)


Routed: TypeAlias = AsynchronousMessage | PointToPointMessage | StateMessage
"""Messages that follow the path that they carry."""
