"""Views: who is in a job that nodes may leave and join, and how rounds under way end when that changes."""

from __future__ import annotations

import msgspec

from netstorm.protocol.messages.kinds import Message
from netstorm.protocol.messages.membership import Member
from netstorm.protocol.messages.rounds import KeyGrant, KeySpec
from netstorm.topology.policy import Policy

__all__ = [
    "CaughtUp",
    "Departure",
    "KeysAnnounced",
    "NewView",
    "Recovery",
    "RoundResults",
    "ViewAgreed",
    "ViewReport",
]


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
