"""Registration of keys, and the policy that each round is bound to (TRP, the topology request protocol)."""

from __future__ import annotations

from typing import Final

import msgspec

from netstorm.protocol.messages.kinds import Message
from netstorm.topology.policy import Policy

__all__ = [
    "ANY_RULE",
    "Binding",
    "CallTimedOut",
    "CallsWaiting",
    "KeyGrant",
    "KeySpec",
    "KeysRegistered",
    "Moved",
    "NewPolicy",
    "RegisterKeys",
    "ReplicaDigest",
    "RoundBegun",
    "TopologyAnswer",
    "TopologyRequest",
    "WaitingCall",
]


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
    tree. The slot depends only on the key's offset, so registering a key never moves another key's chunks."""
    offset: int
    """Byte offset of the key in the job: the position of its chunks in the global order."""
    chunk_size: int
    """Elements of a chunk of this key."""


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


class Binding(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rounds of a key from `from_round` on use policy `version`, until a later binding; valid up to round
    `granted`.
    """

    key: int
    from_round: int
    version: int
    granted: int


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
