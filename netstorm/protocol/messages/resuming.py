"""How nodes continue with a restarted scheduler: they repeat what it may not have answered."""

from __future__ import annotations

import msgspec

from netstorm.protocol.messages.kinds import Message
from netstorm.protocol.messages.membership import Member
from netstorm.protocol.messages.rounds import KeyGrant, KeySpec, Moved, RoundBegun
from netstorm.topology.policy import Policy

__all__ = ["JobReport", "Recover", "RecoverAnswer", "Resume", "Resumed"]


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
