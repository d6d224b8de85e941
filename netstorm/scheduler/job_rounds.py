"""The keys of a job, the policies that their rounds run under, and the chunks that moved to a later policy.

All of it is the same for all nodes. What rounds in progress may need is kept, for nodes that lose their
session with this scheduler and ask again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.chunks import ChunkSizes
from netstorm.scheduler.membership.members import Members
from netstorm.scheduler.outbox import Outbox
from netstorm.scheduler.policies.policy_check import check_policy
from netstorm.scheduler.replay_log.leases import Leases
from netstorm.scheduler.replay_log.records import Installed, KeyAdded
from netstorm.scheduler.replay_log.replay import ReplayedJob
from netstorm.scheduler.rounds.consistency import Consistency, policies_needed
from netstorm.scheduler.rounds.key_registry import KeyConflict, KeyRegistry
from netstorm.topology.policy import Policy

__all__ = ["JobRounds"]


class JobRounds:
    """The keys and rounds of one job. A method that finds that the job cannot go on returns the reason.

    Attributes:
        keys: the registered keys.
    """

    def __init__(
        self,
        members: Members,
        policy: Policy,
        chunks: ChunkSizes,
        outbox: Outbox,
        replayed: ReplayedJob | None,
    ) -> None:
        """Begin without a key, or as another process left the job.

        Args:
            members: the nodes.
            policy: what rounds run under.
            chunks: the sizes of chunks.
            outbox: takes messages and log records.
            replayed: the job as another process left it; None: a new job.
        """
        self.keys: Final = KeyRegistry(chunks)
        self._members: Final = members
        self._outbox: Final = outbox
        self._policies: dict[int, Policy] = {policy.version: policy}
        """By version: those that some node may still have to be told."""
        self._consistency: Final = Consistency(len(members), policy.version)
        self._leases: Final = Leases(() if replayed is None else replayed.granted)
        self._moves: Final[dict[tuple[int, int], list[m.Moved]]] = {}
        """By key and round, of rounds that are not complete everywhere."""
        if replayed is not None:
            self._policies = dict(replayed.policies)
            for rank, spec in replayed.keys:
                self.keys.register(rank, spec)
            for key, (rows, granted) in enumerate(zip(replayed.rows, replayed.granted, strict=True)):
                self._consistency.restore(key, rows, granted)

    @property
    def policy(self) -> Policy:
        """The policy of all rounds that no node has been granted yet."""
        return self._policies[self._consistency.version]

    def policies(self) -> list[Policy]:
        """Return the policies that a node may need, the oldest first."""
        return [self._policies[version] for version in sorted(self._policies)]

    def moves(self) -> Iterator[m.Moved]:
        """Yield the moves of chunks that a node may have missed."""
        for moves in list(self._moves.values()):
            yield from moves

    def install(self, policy: Policy) -> None:
        """Let a new policy apply, in each key, from the first round that no node has been granted.

        Raises:
            UsageError: its version is not newer than all before, or it is for another number of nodes.
        """
        check_policy(policy, nodes=len(self._members), after=self._consistency.version)
        self._policies[policy.version] = policy
        starts = self._consistency.install(policy.version)
        self._outbox.record(Installed(policy=policy, starts=tuple(starts.items())))
        self._forget_moves()
        moved = {move.version for move in self.moves()}
        self._policies = policies_needed(self._policies, self._consistency.versions_in_use() | moved)
        self._members.send_all(m.NewPolicy(policy=policy))

    def register(self, rank: int, message: m.RegisterKeys, now: float) -> m.PeerGone | None:
        """Number a node's keys, and bind their first rounds.

        Raises:
            ProtocolViolation: no correct node registers them.
        """
        grants, bindings = [], []
        for spec in message.keys:
            known = len(self.keys)
            grant = self.keys.register(rank, spec)
            if isinstance(grant, KeyConflict):
                return m.PeerGone(rank=-1, kind="key", reason=str(grant))
            if grant.key == known:
                self._outbox.record(KeyAdded(rank=rank, spec=spec, version=self._consistency.version))
            self._consistency.add_key(grant.key)
            grants.append(grant)
            bindings += self._consistency.bindings(grant.key, 0)
        self._members.liveness.heard(rank, now, f"it registered {len(grants)} keys")
        self._members.send([rank], m.KeysRegistered(grants=tuple(grants), bindings=tuple(bindings)))
        return None

    def begun(self, rank: int, message: m.TopologyRequest, now: float) -> m.PeerGone | None:
        """Grant a node that has begun rounds the next ones.

        Raises:
            ProtocolViolation: no correct node can have begun them.
        """
        unknown = next((event.key for event in message.begun if event.key not in self.keys), None)
        if unknown is not None:
            raise ProtocolViolation(f"rank {rank} asks about key {unknown}, which nobody has registered")
        bindings = []
        if self._outbox.keeps_log:
            self._outbox.record(self._leases.extend((event.key, event.round + 1) for event in message.begun))
        for event in message.begun:
            conflict = self._consistency.begun(rank, event)
            name = self.keys.name(event.key)
            if conflict is not None:
                reason = f"round {event.round} of key {name!r}: {conflict}"
                return m.PeerGone(rank=-1, kind="disagreement", reason=reason)
            bindings += self._consistency.bindings(event.key, event.round)
            self._members.liveness.heard(rank, now, f"round {event.round} of key {name!r}")
        self._members.send([rank], m.TopologyAnswer(bindings=tuple(bindings)))
        return None

    def moved(self, rank: int, message: m.Moved) -> None:
        """Tell all nodes which chunks their root has moved to a later policy.

        Raises:
            ProtocolViolation: the key or the policy is unknown.
        """
        if message.key not in self.keys or not 0 <= message.version <= self._consistency.version:
            raise ProtocolViolation(
                f"rank {rank} moved chunks of key {message.key} to policy {message.version}: expected "
                f"one of {len(self.keys)} keys, and a version up to {self._consistency.version}"
            )
        moves = self._moves.setdefault((message.key, message.round), [])
        if message not in moves:
            moves.append(message)
        self._forget_moves()
        self._members.send_all(message)

    def _forget_moves(self) -> None:
        complete = [key_round for key_round in self._moves if self._consistency.is_complete(*key_round)]
        for key_round in complete:
            del self._moves[key_round]
