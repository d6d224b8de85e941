"""The replay log: what a scheduler writes down so that another process can take over its job. Pure.

Records and their form in the file, a job as they describe it, and the outbox: what is to be done, in order,
and what has to be logged before that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import msgspec

from netstorm.errors import UsageError
from netstorm.protocol.codecs import ITEM_BYTES, granted_at_first
from netstorm.protocol.frames import Peer, checksum
from netstorm.protocol.messages import Departure, HiddenKey, KeyGrant, KeySpec, Member, Message
from netstorm.pslite.machine import Instruction, Send
from netstorm.scheduler.rounds import policies_needed, under_way_of
from netstorm.topology.policy import Policy

__all__ = [
    "LEASE",
    "MAGIC",
    "BarrierArrival",
    "Began",
    "Installed",
    "JobEnded",
    "KeyAdded",
    "Leased",
    "Leases",
    "LoggedOutbox",
    "RankFinished",
    "Record",
    "ReplayedJob",
    "Viewed",
    "departure_text",
    "encode",
    "read",
]


# A job as its replay log describes it: what another scheduler process needs to take it over.


@dataclass(slots=True, kw_only=True)
class ReplayedJob:
    """The state of a job after all records of its log."""

    began: Began
    policies: dict[int, Policy]
    """By version."""
    version: int
    """The policy in force."""
    keys: list[tuple[int, KeySpec]] = field(default_factory=list)
    """The rank that registered each key first, and the key, in the order of their numbers."""
    rows: list[list[tuple[int, int]]] = field(default_factory=list)
    """By key: (first round, version)."""
    granted: list[int] = field(default_factory=list)
    """By key: no round beyond this one was granted."""
    grants: tuple[KeyGrant, ...] = ()
    """The numbers of the keys, if they were not given out in the order of this log."""
    members: tuple[Member, ...]
    """The nodes, by rank. Without a port: a place that no node has."""
    taken_over: bool = False
    """The members were asked, instead of a log: a new view must begin before anything else."""
    agreed_size: int = 0
    """How many nodes the last view had that was agreed on."""
    view: int = 0
    view_version: int = -1
    """Version of the policy of the view; -1: no view has replaced the first one."""
    departed: dict[int, str] = field(default_factory=dict)
    """By incarnation of a process that is in the job no more: why."""
    barriers: list[int]
    """By rank: at how many barriers it has arrived."""
    reached: int = 0
    """At how many barriers all had arrived that were waited for."""
    finished: dict[int, dict[int, int]] = field(default_factory=dict)
    """By rank that will push no more: the last round that it pushed, by key."""

    @classmethod
    def replay(cls, records: Iterable[Record], name: str) -> ReplayedJob | None:
        """Return the job that a log describes; None if there is none, or it is over.

        Args:
            records: of the log.
            name: what errors call the log.

        Raises:
            UsageError: the records contradict each other.
        """
        job: ReplayedJob | None = None
        for record in records:
            if isinstance(record, Began):
                first = record.policy
                job = cls(
                    began=record,
                    policies={first.version: first},
                    version=first.version,
                    barriers=[0] * len(record.members),
                    members=record.members,
                    agreed_size=sum(member.port > 0 for member in record.members),
                )
            elif isinstance(record, JobEnded):
                job = None
            elif job is None:
                raise UsageError(f"{name} begins in the middle of a job: remove the file to begin anew")
            else:
                try:
                    job.apply(record)
                except (IndexError, KeyError) as error:
                    raise UsageError(
                        f"{name} contradicts itself ({error!r}): remove it to begin anew"
                    ) from None
        if job is not None:
            problem = contradiction(job)
            if problem:
                raise UsageError(f"{name} contradicts itself (it has {problem}): remove it to begin anew")
            job.prune()
        return job

    def apply(self, record: Record) -> None:
        """Apply one more record of a job that has begun."""
        match record:
            case KeyAdded():
                self.keys.append((record.rank, record.spec))
                self.rows.append([(0, record.version)])
                self.granted.append(granted_at_first(under_way_of(record.spec)))
            case Leased():
                for key, round in record.rounds:
                    self.granted[key] = max(self.granted[key], round)
            case Installed():
                self._wait_at_barriers(record.policy)
                self.policies[record.policy.version] = record.policy
                self.version = record.policy.version
                for key, start in record.starts:
                    rows = self.rows[key]
                    while rows and rows[-1][0] >= start:
                        rows.pop()
                    rows.append((start, self.version))
            case Viewed() if record.members:
                self._apply_view(record)
            case Viewed():
                self.agreed_size = sum(member.port > 0 for member in self.members)
            case BarrierArrival():
                self.barriers[record.rank] = max(self.barriers[record.rank], record.number + 1)
                self._reach()
            case RankFinished():
                self.finished[record.rank] = record.last_rounds

    def _apply_view(self, record: Viewed) -> None:
        self.view, self.view_version = record.view, record.version
        for departure in record.departures:
            member = self.members[departure.rank]
            self.departed[member.incarnation] = departure_text(departure, record.view)
            self.finished.pop(departure.rank, None)
        here = {member.rank: member for member in record.members}
        for member in self.members:
            if member.rank not in here or here[member.rank].incarnation != member.incarnation:
                self.barriers[member.rank] = 0
        self.members = tuple(
            here.get(member.rank, Member(member.rank, member.host, 0, member.site, 0))
            for member in self.members
        )

        self._reach()

    def _wait_at_barriers(self, policy: Policy) -> None:
        """Wait, from the oldest barrier that is not reached on, for ranks that contribute by now."""
        for rank in set(self.policies[self.version].silent).intersection(policy.members) - set(policy.silent):
            self.barriers[rank] = max(self.barriers[rank], self.reached)

    def _reach(self) -> None:
        silent = self.policies[self.version].silent
        waited_for = [
            self.barriers[member.rank]
            for member in self.members
            if member.port and member.rank not in silent and member.rank not in self.finished
        ]
        self.reached = max(self.reached, min(waited_for, default=max(self.barriers)))

    def prune(self) -> None:
        """Forget policies that no round needs any more: ranks are never many rounds apart."""
        for (_, spec), rows, granted in zip(self.keys, self.rows, self.granted, strict=True):
            while len(rows) > 1 and rows[1][0] <= granted - 2 * (LEASE + under_way_of(spec)):
                rows.pop(0)
        used = {self.version, max(self.view_version, 0)}.union(
            version for rows in self.rows for _, version in rows
        )
        self.policies = policies_needed(self.policies, used)


def departure_text(departure: Departure, view: int) -> str:
    """Return what a process is told that is in the job no more, since a view."""
    return f"rank {departure.rank} is out of the job since view {view}: {departure.reason}"


# The records of a replay log, and their form in the file: records <-> bytes.
#
#     the file    magic with the format's version, then records
#     a record    length of its body, CRC-32C of its body (each u32, little-endian), body in MessagePack
#
# A record is written before any node is told what it says. So no node knows of a record whose writing was cut
# off at the end of the file: it is left out. Any other damage is an error.

MAGIC: Final = b"NSSTATE\x01"

_HEAD: Final = struct.Struct("<II")

_MOST_RECORD_BYTES: Final = 64 * 2**20
"""A policy of 512 nodes has 5 MB. A larger length is damage."""


class _Base(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """Base of all records. Fields are append-only."""


class Began(_Base, frozen=True, tag=1):
    """All nodes have joined."""

    job: str
    release: str
    boot: str
    """Identity of the host's run since it was last started: a log from before may lack its end."""
    chunks: tuple[int, int, int]
    """Sizes of chunks: smallest, largest, and how many are enough (`ChunkSizes`)."""
    members: tuple[Member, ...]
    policy: Policy
    owners: tuple[int, ...] = ()
    """Weights by rank, for asynchronous training."""
    first_node_settings: dict[str, str] = msgspec.field(default_factory=dict)
    """By variable: the settings of the job's first node, on a scheduler of several jobs."""
    secret: HiddenKey = HiddenKey()
    """By which nodes recognise the job's schedulers."""
    reproducible: bool = False
    """Results are the same in each run (NETSTORM_REPRODUCIBLE)."""


class KeyAdded(_Base, frozen=True, tag=2):
    """A key was registered; its round 0 runs under `version`."""

    rank: int
    spec: KeySpec
    version: int


class Leased(_Base, frozen=True, tag=3):
    """Rounds up to these may have been granted: (key, round). Their policies are in the records before."""

    rounds: tuple[tuple[int, int], ...]


class Installed(_Base, frozen=True, tag=4):
    """A new policy applies from these rounds on: (key, round)."""

    policy: Policy
    starts: tuple[tuple[int, int], ...]


class BarrierArrival(_Base, frozen=True, tag=5):
    """A rank has arrived at a barrier."""

    rank: int
    number: int


class RankFinished(_Base, frozen=True, tag=6):
    """A rank will push no more."""

    rank: int
    last_rounds: dict[int, int]


class JobEnded(_Base, frozen=True, tag=7):
    """The job is over: there is nothing to take over."""

    text: str


class Viewed(_Base, frozen=True, tag=8):
    """A new view was announced, or, without members, agreed on. Its policy is in the record before."""

    view: int
    version: int = -1
    """Of its policy."""
    members: tuple[Member, ...] = ()
    """The nodes that are in the job, by rank."""
    departures: tuple[Departure, ...] = ()
    agreed: bool = False


Record: TypeAlias = Viewed | Began | KeyAdded | Leased | Installed | BarrierArrival | RankFinished | JobEnded

_DECODER: Final = msgspec.msgpack.Decoder(Record)


def encode(records: Iterable[Record]) -> bytes:
    """Return what is appended to the file for `records`."""
    parts = []
    for record in records:
        body = msgspec.msgpack.encode(record)
        parts += [_HEAD.pack(len(body), checksum(body)), body]
    return b"".join(parts)


def read(data: bytes, name: str) -> tuple[list[Record], int]:
    """Return the records of a file, and how many of its bytes they take. What follows was cut off.

    Args:
        data: the whole file.
        name: what errors call it.

    Raises:
        UsageError: the file is no such log, of another version, or damaged; says where.
    """
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return [], 0
        known = "written by another version of NetStorm" if data[:7] == MAGIC[:7] else "not a scheduler's log"
        raise UsageError(
            f"{name} is {known}: give another NETSTORM_STATE_DIR, or remove the file if its job is over"
        )
    records: list[Record] = []
    at = len(MAGIC)
    while at < len(data):
        rest = memoryview(data)[at:]
        if len(rest) < _HEAD.size:
            break
        size, crc = _HEAD.unpack_from(rest)
        end = _HEAD.size + size
        body = rest[_HEAD.size : end]
        if size == 0 or size > _MOST_RECORD_BYTES or len(body) < size or checksum(bytes(body)) != crc:
            if (end >= len(rest) and size <= _MOST_RECORD_BYTES) or not any(rest):
                break  # cut off, or never written
            raise UsageError(_damaged(name, at))
        try:
            records.append(_DECODER.decode(body))
        except (msgspec.DecodeError, ValueError) as error:
            raise UsageError(f"{_damaged(name, at)}: {error}") from None
        at += end
    return records, at


def _damaged(name: str, at: int) -> str:
    return f"{name} is damaged at byte {at}: its job cannot be taken over; remove the file to begin anew"


# Leases: grants of rounds are logged in blocks, so that most answers need no record.

LEASE: Final = 16
"""Rounds of a key that one record covers. After a restart the next policy applies at most that much later."""


class Leases:
    """The round up to which each key's grants are logged."""

    def __init__(self, granted: Iterable[int] = ()) -> None:
        """Begin with what the log holds: by key, the last round."""
        self._until: Final = dict(enumerate(granted))

    def extend(self, grants: Iterable[tuple[int, int]]) -> Leased | None:
        """Return the record to write before these (key, round) are granted; None: the log covers them."""
        extended = {}
        for key, round in grants:
            if round > self._until.get(key, 0):
                self._until[key] = extended[key] = round + LEASE
        return Leased(rounds=tuple(extended.items())) if extended else None


# Whether what a replay log says can be one job.
#
# Checksums find damage. This finds logs that another program has written, or somebody: a scheduler that went
# on with one would fail later, and say less.

_MOST: Final = 2**48
"""Of rounds, barriers and views: no job lasts as long."""


class CheckedJob(Protocol):
    """What is checked of a replayed job; see `ReplayedJob`."""

    @property
    def began(self) -> Began: ...

    @property
    def policies(self) -> Mapping[int, Policy]: ...

    @property
    def version(self) -> int: ...

    @property
    def keys(self) -> Sequence[tuple[int, KeySpec]]: ...

    @property
    def rows(self) -> Sequence[Sequence[tuple[int, int]]]: ...

    @property
    def granted(self) -> Sequence[int]: ...

    @property
    def members(self) -> Sequence[Member]: ...

    @property
    def barriers(self) -> Sequence[int]: ...

    @property
    def finished(self) -> Collection[int]: ...


def contradiction(job: CheckedJob) -> str:
    """Return what cannot be in a job's state; empty: nothing."""
    size = len(job.members)
    present = [member.incarnation for member in job.members if member.port]
    smallest, largest, enough = job.began.chunks
    if [member.rank for member in job.members] != list(range(size)) or len(set(present)) < len(present):
        return "members that are not one process a rank"
    if any(policy.size != size for policy in job.policies.values()):
        return f"policies for other numbers of nodes than {size}"
    if job.version not in job.policies:
        return f"no policy {job.version}, which is in force"
    if not 0 < smallest <= largest < _MOST or enough < 1:
        return f"chunks of {smallest} to {largest} bytes, of which {enough} are enough"
    if job.began.owners and (len(job.began.owners) != size or min(job.began.owners) < 0):
        return f"{len(job.began.owners)} owners' weights for {size} nodes"
    if not set(job.finished) <= set(range(size)) or not _are_counts(job.barriers):
        return "ranks that there are not, or counts of barriers that nobody reaches"
    names = [(spec.namespace, spec.name) for _, spec in job.keys]
    if len(set(names)) < len(names) or any(_is_odd(spec, size) for _, spec in job.keys):
        return "keys that no node registers"
    if not all(rows and _are_counts([start for start, _ in rows]) for rows in job.rows):
        return "keys without a policy"
    if any(version < 0 for rows in job.rows for _, version in rows) or not _are_counts(job.granted):
        return "rounds that nobody reaches"
    return ""


def _are_counts(numbers: Sequence[int]) -> bool:
    return all(0 <= number < _MOST for number in numbers)


def _is_odd(spec: KeySpec, size: int) -> bool:
    ranks = list(spec.members)
    return (
        spec.dtype not in ITEM_BYTES
        or min(spec.shape, default=0) < 0
        or ranks != sorted(set(ranks))
        or not set(ranks) <= set(range(size))
    )


# What the scheduler's state machines want done, in order, and what has to be logged before that.


class LoggedOutbox:
    """Instructions for the endpoint, and the log records that must be written before these may leave.

    Attributes:
        keeps_log: records are written.
    """

    def __init__(self, write: Callable[[list[Record]], None] | None = None) -> None:
        """Begin empty.

        Args:
            write: writes records to the replay log, before the instructions that follow from them are taken.
                None: the job has no log.
        """
        self.keeps_log: Final = write is not None
        self._instructions: list[Instruction] = []
        self._records: list[Record] = []
        self._write: Final = write

    def record(self, record: Record | None) -> None:
        """Add a record to the replay log, if there is one."""
        if self._write is not None and record is not None:
            self._records.append(record)

    def send(self, peers: Iterable[Peer], message: Message) -> None:
        """Send the same message to each of `peers`."""
        self._instructions += [Send(peer=peer, message=message) for peer in peers]

    def add(self, instruction: Instruction) -> None:
        """Append one instruction."""
        self._instructions.append(instruction)

    def take(self) -> list[Instruction]:
        """Write the records; then return all instructions, and forget them."""
        if self._records and self._write is not None:
            records, self._records = self._records, []
            self._write(records)
        taken, self._instructions = self._instructions, []
        return taken
