"""Who may say what of keys and rounds: checks of messages against what the scheduler has fixed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from netstorm.errors import NotAuthorised, ProtocolViolation
from netstorm.protocol.codecs import COLLECTIVE
from netstorm.protocol.frames import bits_from_wire
from netstorm.protocol.messages import (
    CallTimedOut,
    Moved,
    ReplicaDigest,
    RoundResults,
    ViewReport,
    WaitingCall,
)
from netstorm.scheduler.rounds.consistency import Consistency
from netstorm.scheduler.rounds.key_registry import KeyRegistry
from netstorm.topology.policy import Policy
from netstorm.topology.tree import MemberTree

__all__ = ["RoundAuthority"]

_BEYOND: Final = 1024
"""Rounds after the last granted one that a report may still name: a scheduler that took the job over from
what some nodes have said may know of fewer."""


class RoundAuthority:
    """Checks what the nodes of one job say."""

    def __init__(self, keys: KeyRegistry, consistency: Consistency, nodes: int) -> None:
        self._keys: Final = keys
        self._consistency: Final = consistency
        self._nodes: Final = nodes

    def check_moved(
        self, rank: int, message: Moved, moves: Sequence[Moved], policies: Mapping[int, Policy]
    ) -> None:
        """Check that a rank is the root of chunks that it moves to a later policy.

        Args:
            rank: the sender.
            message: a new one.
            moves: earlier ones of the same round.
            policies: by version, those that are remembered.

        Raises:
            ProtocolViolation: it is not, or the policy takes nothing over.
        """
        key, later = message.key, policies.get(message.version)
        spec, grant = self._keys.spec(key), self._keys.grant(key)
        chunks = len(message.chunks)
        if spec.form != COLLECTIVE:
            chunks = -(-math.prod(spec.shape) // grant.chunk_size)
        bound = self._consistency.version_of(key, message.round)
        if bound is None and message.round > self._consistency.granted(key):
            raise ProtocolViolation(
                f"rank {rank} moves chunks of round {message.round} of key {key}, which no rank was granted"
            )
        if spec.members or min(message.chunks, default=0) < 0 or (later is not None and not later.takes_over):
            raise ProtocolViolation(
                f"rank {rank} moves chunks of key {self._keys.name(key)!r} to policy {message.version}, "
                "which takes none of them over"
            )
        if spec.form != COLLECTIVE and max(message.chunks, default=0) >= chunks:
            raise ProtocolViolation(
                f"rank {rank} moves chunk {max(message.chunks)} of key {self._keys.name(key)!r}, which has "
                f"{chunks}"
            )
        if bound is None or message.version <= bound:
            return  # nodes ignore it: all have begun later rounds, or are in a later view
        for chunk in message.chunks:
            now = max(
                (move.version for move in moves if move.version < message.version and chunk in move.chunks),
                default=bound,
            )
            root = _root(policies.get(now), grant.first_slot + chunk)
            if root is not None and root != rank:
                raise NotAuthorised(
                    f"rank {rank} moves chunk {chunk} of round {message.round} of key "
                    f"{self._keys.name(key)!r}; its root under policy {now} is rank {root}"
                )

    def check_digest(self, rank: int, message: ReplicaDigest) -> None:
        """Check that a rank can have a value of a key after a round.

        Raises:
            ProtocolViolation: it cannot.
        """
        if message.key not in self._keys:
            raise ProtocolViolation(f"rank {rank} reports key {message.key}, which nobody has registered")
        members, granted = self._keys.spec(message.key).members, self._consistency.granted(message.key)
        if (members and rank not in members) or not 0 <= message.round <= granted:
            raise ProtocolViolation(
                f"rank {rank} reports its value after round {message.round} of key {message.key}: expected a "
                f"rank of that key, and a round up to {granted}, the last one granted"
            )

    def check_call(self, rank: int, call: WaitingCall) -> None:
        """Check that a rank can wait for a call of a group.

        Raises:
            ProtocolViolation: it is no member of the group.
        """
        members = self._keys.members_of_group(call.group)
        if call.number < 0 or (members and rank not in members):
            raise NotAuthorised(
                f"rank {rank} waits for call {call.number} of group {call.group[:100]!r}, of ranks "
                f"{list(members[:16])}"
            )

    def check_timed_out(self, rank: int, message: CallTimedOut) -> None:
        """Check that a rank can have waited for a call in vain.

        Raises:
            ProtocolViolation: it is no member of the group, or no group has such members.
        """
        self.check_call(rank, message.call)
        members = message.members
        if rank not in members or max(members) >= self._nodes or not 0 <= message.seconds < math.inf:
            raise ProtocolViolation(
                f"rank {rank} says that a call of ranks {list(members[:16])} has timed out after "
                f"{message.seconds} s: expected ranks below {self._nodes}, its own among them"
            )

    def report_problem(self, message: ViewReport) -> str:
        """Return what no correct node can say of its results; empty: nothing."""
        for key, round in (*message.complete.items(), *message.begins.items()):
            if not self._may_know(key, round):
                return f"round {round} of key {key}"
        for results in message.results:
            if not self._may_know(results.key, results.round) or not _is_whole(results):
                return f"results of round {results.round} of key {results.key}"
        return ""

    def _may_know(self, key: int, round: int) -> bool:
        return key in self._keys and -1 <= round <= self._consistency.granted(key) + _BEYOND


def _is_whole(results: RoundResults) -> bool:
    """Return whether the chunks are those of the round."""
    chunks = bits_from_wire(results.chunks) | bits_from_wire(results.known)
    return results.of == 0 or chunks.bit_length() <= results.of


def _root(policy: Policy | None, slot: int) -> int | None:
    """Return the root of a slot's tree; None: the policy is not remembered."""
    if policy is None:
        return None
    tree = policy.trees[policy.tree_of(slot)]
    return MemberTree(tree, policy.members).root if policy.members else int(tree.root)
