"""The control plane: keys, and under which policy their rounds run."""

from __future__ import annotations

from typing import Final

import msgspec

from netstorm.protocol.messages.kinds import Message
from netstorm.topology.policy import Policy

__all__ = [
    "ANY_RULE",
    "Binding",
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
]


class KeySpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank says a key is."""

    namespace: int
    """The n-th store that the process created."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    form: int = 0
    """Codec that most of its rounds are to have (see `Part.codec`): it decides the size of chunks."""


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


ANY_RULE: Final = "*"
"""`RoundBegun.rule` of a rank that does nothing with the sum, since its program has ended."""


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


class Moved(Message, frozen=True, tag=77):
    """Chunks of a round under way are summed by a later policy than the one that the round is bound to. Their
    root to the scheduler, which tells all nodes; saying it twice changes nothing.
    """

    key: int
    round: int
    version: int
    """The later policy's."""
    chunks: tuple[int, ...]


class ReplicaDigest(Message, frozen=True, tag=76):
    """A node to the scheduler: what it holds of a key after a round. All ranks must hold the same."""

    key: int
    round: int
    digest: int
    """CRC-32C of the value's bytes."""
