"""The keys of a job, the policies that their rounds run under, and the chunks that have moved to other ones.

All of it is the same for all nodes, and what of it rounds under way may need is kept for nodes that lose
their session with this scheduler, and come back to ask again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.protocol import messages as m
from netstorm.protocol.chunks import ChunkSizes
from netstorm.scheduler.log.outbox import Outbox
from netstorm.scheduler.log.records import Installed, KeyAdded
from netstorm.scheduler.log.replay import Leases, ReplayedJob
from netstorm.scheduler.membership.members import Members
from netstorm.scheduler.policies.policy_check import check_policy
from netstorm.scheduler.rounds.consistency import Consistency, needed
from netstorm.scheduler.rounds.key_registry import KeyConflict, KeyRegistry
from netstorm.topology.policy import Policy

__all__ = ["JobRounds"]


class JobRounds:
    """Of one job. What may end the job is returned.

    Attributes:
        keys: those that are registered.
    """

    def __init__(
        self, members: Members, policy: Policy, chunks: ChunkSizes, outbox: Outbox, past: ReplayedJob | None
    ) -> None:
        """Begin without a key.

        Args:
            members: the nodes.
            policy: what rounds run under.
            chunks: what sizes keys are cut into.
            outbox: takes down what another process needs to take over.
            past: what another process has left of this job; None: nothing.
        """
        self.keys: Final = KeyRegistry(chunks)
        self._members: Final = members
        self._outbox: Final = outbox
        self._policies: dict[int, Policy] = {policy.version: policy}
        """By version: those that some node may still need to be told of."""
        self._consistency: Final = Consistency(len(members), policy.version)
        self._leases: Final = Leases(() if past is None else past.granted)
        self._moves: Final[dict[tuple[int, int], list[m.Moved]]] = {}
        """By key and round, of those that are not over."""
        if past is not None:
            self._policies = dict(past.policies)
            for rank, spec in past.keys:
                self.keys.register(rank, spec)
            for key, (rows, granted) in enumerate(zip(past.rows, past.granted, strict=True)):
                self._consistency.restore(key, rows, granted)

    @property
    def policy(self) -> Policy:
        """The policy that rounds which nobody has been granted will run under."""
        return self._policies[self._consistency.version]

    def policies(self) -> list[Policy]:
        """Return those that a node may need, the oldest first."""
        return [self._policies[version] for version in sorted(self._policies)]

    def moves(self) -> Iterator[m.Moved]:
        """Yield what a node must hear that may not have heard it."""
        for said in list(self._moves.values()):
            yield from said

    def install(self, policy: Policy) -> dict[int, int]:
        """Let a new policy apply, in each key, from the first round on that nobody has been granted; return
        these rounds.

        Raises:
            UsageError: its version is not newer than all before, or it is for another number of nodes.
        """
        check_policy(policy, nodes=len(self._members), after=self._consistency.version)
        self._policies[policy.version] = policy
        starts = self._consistency.install(policy.version)
        self._outbox.note(Installed(policy=policy, starts=tuple(starts.items())))
        self._forget_moves()
        moved = {said.version for said in self.moves()}
        self._policies = needed(self._policies, self._consistency.versions_in_use() | moved)
        self._members.tell_all(m.NewPolicy(policy=policy))
        return starts

    def register(self, rank: int, message: m.RegisterKeys, now: float) -> m.PeerGone | None:
        """Number a node's keys.

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
                self._outbox.note(KeyAdded(rank=rank, spec=spec, version=self._consistency.version))
            self._consistency.add_key(grant.key)
            grants.append(grant)
            bindings += self._consistency.bindings(grant.key, 0)
        self._members.liveness.heard(rank, now, f"it registered {len(grants)} keys")
        self._members.tell([rank], m.KeysRegistered(grants=tuple(grants), bindings=tuple(bindings)))
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
            self._outbox.note(self._leases.take((event.key, event.round + 1) for event in message.begun))
        for event in message.begun:
            conflict = self._consistency.begun(rank, event)
            name = self.keys.name(event.key)
            if conflict is not None:
                reason = f"round {event.round} of key {name!r}: {conflict}"
                return m.PeerGone(rank=-1, kind="disagreement", reason=reason)
            bindings += self._consistency.bindings(event.key, event.round)
            self._members.liveness.heard(rank, now, f"round {event.round} of key {name!r}")
        self._members.tell([rank], m.TopologyAnswer(bindings=tuple(bindings)))
        return None

    def moved(self, rank: int, message: m.Moved) -> None:
        """Tell all nodes which chunks their root has given to a later policy.

        Raises:
            ProtocolViolation: of an unknown key, or to an unknown policy.
        """
        if message.key not in self.keys or not 0 <= message.version <= self._consistency.version:
            raise ProtocolViolation(
                f"rank {rank} has given chunks of key {message.key} to policy {message.version}: expected "
                f"one of {len(self.keys)} keys, and a version up to {self._consistency.version}"
            )
        kept = self._moves.setdefault((message.key, message.round), [])
        if message not in kept:
            kept.append(message)
        self._forget_moves()
        self._members.tell_all(message)

    def _forget_moves(self) -> None:
        for place in [place for place in self._moves if self._consistency.is_over(*place)]:
            del self._moves[place]
