"""The keys of a job, the policies that their rounds run under, and the chunks that moved to a later policy.

All of it is the same for all nodes. What rounds in progress may need is kept, for nodes that lose their
session with this scheduler and ask again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from netstorm.errors import ProtocolViolation, UsageError
from netstorm.protocol import messages as m
from netstorm.protocol.codecs import ChunkSizes, granted_by
from netstorm.scheduler.members import Members
from netstorm.scheduler.policies import check_policy
from netstorm.scheduler.replay_log import Installed, KeyAdded, Leases, LoggedOutbox, ReplayedJob
from netstorm.scheduler.rounds import (
    CallOrder,
    Consistency,
    KeyConflict,
    KeyRegistry,
    RoundAuthority,
    policies_needed,
    under_way_of,
)
from netstorm.topology.policy import Policy

__all__ = ["JobRounds"]


class JobRounds:
    """The keys and rounds of one job. A method that finds that the job cannot go on returns the reason.

    Attributes:
        keys: the registered keys.
        authority: checks what nodes say.
        silent: members that contribute nothing yet.
        later: members that joined later.
    """

    def __init__(
        self,
        members: Members,
        policy: Policy,
        chunks: ChunkSizes,
        outbox: LoggedOutbox,
        replayed: ReplayedJob | None,
        *,
        elastic: bool = False,
        reproducible: bool = False,
    ) -> None:
        """Begin without a key, or as another process left the job.

        Args:
            members: the nodes.
            policy: what rounds run under.
            chunks: the sizes of chunks.
            outbox: takes messages and log records.
            replayed: the job as another process left it; None: a new job.
            elastic: nodes may leave the job and join it: policies name the members.
            reproducible: a key's trees do not depend on who registers it first.
        """
        self.keys: Final = KeyRegistry(chunks, by_name=reproducible)
        self.silent: tuple[int, ...] = ()
        self.later: tuple[int, ...] = ()
        self._elastic: Final = elastic
        self._members: Final = members
        self._outbox: Final = outbox
        self._policies: dict[int, Policy] = {policy.version: policy}
        """By version: those that some node may still have to be told."""
        self._consistency: Final = Consistency(len(members), policy.version)
        self._calls: Final = CallOrder()
        self.authority: Final = RoundAuthority(self.keys, self._consistency, len(members))
        self._leases: Final = Leases(() if replayed is None else replayed.granted)
        self._moves: Final[dict[tuple[int, int], list[m.Moved]]] = {}
        """By key and round, of rounds that are not complete everywhere."""
        if replayed is not None:
            self._policies = dict(replayed.policies)
            for rank, spec in replayed.keys if not replayed.grants else ():
                self._register_again(rank, spec)
            for (rank, spec), grant in zip(replayed.keys, replayed.grants, strict=False):
                self.keys.restore(rank, spec, grant)
            for key, (rows, granted) in enumerate(zip(replayed.rows, replayed.granted, strict=True)):
                self._consistency.restore(key, self.keys.spec(key), rows, granted)
            self._restore_view(replayed)
        for rank in set(range(len(members))) - set(members.present):  # places that no node has yet
            self._consistency.without(rank)

    def _register_again(self, rank: int, spec: m.KeySpec) -> None:
        """Number a key as another process did.

        Raises:
            UsageError: no node can have registered it.
        """
        try:
            self.keys.register(rank, spec)
        except ProtocolViolation as error:
            raise UsageError(f"the job's log contradicts itself ({error}): remove it to begin anew") from None

    def _restore_view(self, replayed: ReplayedJob) -> None:
        self.silent = replayed.policies[replayed.version].silent
        self.later = replayed.policies[replayed.version].later
        if replayed.view_version >= 0:
            self._consistency.begin_view(replayed.view_version, self.silent)
        for member in replayed.members:
            if not member.port or member.rank in self.silent:
                self._consistency.without(member.rank)

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

    def install(self, policy: Policy) -> dict[int, int]:
        """Let a new policy apply, in each key, from the first round that no node has been granted. Return
        these rounds.

        Raises:
            UsageError: its version is not newer than all before, or it is for another number of nodes.
        """
        check_policy(policy, nodes=len(self._members), after=self._consistency.version)
        if self._elastic:
            policy = msgspec.structs.replace(
                policy, members=self._members.present, silent=self.silent, later=self.later
            )
        starts = self._install(policy)
        self._members.send_all(m.NewPolicy(policy=policy))
        return starts

    def install_view(self, policy: Policy, silent: Iterable[int]) -> None:
        """Let the policy of a new view apply to everything that has no result yet. The view's announcement
        tells nodes.
        """
        self.silent, self.later = tuple(silent), policy.later
        self._install(policy)
        self._consistency.begin_view(policy.version, self.silent)
        for rank in self.silent:
            self._consistency.without(rank)
        self._moves.clear()

    def without(self, rank: int) -> None:
        """Wait no more for a rank, which is in the job no more, to begin rounds; nor compare with it."""
        self._consistency.without(rank)
        self._calls.without(rank)

    def with_contributor(self, rank: int, starts: Mapping[int, int]) -> None:
        """Wait for a rank, too: by key, from these rounds on."""
        self._consistency.with_rank(rank, starts)

    def members_of(self, key: int) -> tuple[int, ...]:
        """Return the ranks that take part in a key; empty: all, or the key is not known. A group whose ranks
        have all left has none (-1).
        """
        members = self.keys.spec(key).members if key in self.keys else ()
        return tuple(rank for rank in members if rank not in self.later) or (-1,) * bool(members)

    def grants(self) -> tuple[tuple[m.KeySpec, ...], tuple[m.KeyGrant, ...]]:
        """Return all keys and their numbers, for a node that joins later."""
        known = range(len(self.keys))
        return tuple(map(self.keys.spec, known)), tuple(map(self.keys.grant, known))

    def _install(self, policy: Policy) -> dict[int, int]:
        self._policies[policy.version] = policy
        starts = self._consistency.install(policy.version)
        self._outbox.record(Installed(policy=policy, starts=tuple(starts.items())))
        self._forget_moves()
        moved = {move.version for move in self.moves()}
        self._policies = policies_needed(self._policies, self._consistency.versions_in_use() | moved)
        return starts

    def register(self, rank: int, message: m.RegisterKeys, now: float) -> m.PeerGone | None:
        """Number a node's keys, and bind their first rounds.

        Raises:
            ProtocolViolation: no correct node registers them.
        """
        grants, bindings = [], []
        for spec in message.keys:
            self._check_members(rank, spec)
            known = len(self.keys)
            grant = self.keys.register(rank, spec)
            if isinstance(grant, KeyConflict):
                return m.PeerGone(rank=-1, kind="key", reason=str(grant))
            if grant.key == known:
                if self.silent:
                    self._members.send(self.silent, m.KeysAnnounced(keys=(spec,), grants=(grant,)))
                self._outbox.record(KeyAdded(rank=rank, spec=spec, version=self._consistency.version))
            self._consistency.add_key(grant.key, spec)
            grants.append(grant)
            bindings += self._consistency.bindings(grant.key, 0)
        self._members.liveness.heard(rank, now, f"it registered {len(grants)} keys")
        self._members.send([rank], m.KeysRegistered(grants=tuple(grants), bindings=tuple(bindings)))
        return None

    def receive(
        self, rank: int, message: m.TopologyRequest | m.CallsWaiting | m.CallTimedOut, now: float
    ) -> m.PeerGone | None:
        """Handle what a node says of its rounds and calls.

        Raises:
            ProtocolViolation: no correct node says so.
        """
        if isinstance(message, m.TopologyRequest):
            return self.begun(rank, message, now)
        if isinstance(message, m.CallTimedOut):
            self.authority.check_timed_out(rank, message)
            self._calls.timed_out(rank, message, now)
            return None
        return self._waiting(rank, message)

    def tick(self, now: float) -> m.PeerGone | None:
        """Return why the job cannot go on, if a call has timed out."""
        reason = self._calls.decision(now)
        return None if reason is None else m.PeerGone(rank=-1, kind="timeout", reason=reason)

    def next_tick(self) -> float:
        """Return when `tick` has something to do."""
        return self._calls.decide_at()

    def begun(self, rank: int, message: m.TopologyRequest, now: float) -> m.PeerGone | None:
        """Grant a node that has begun rounds the next ones.

        Raises:
            ProtocolViolation: no correct node can have begun them.
        """
        unknown = next((event.key for event in message.begun if event.key not in self.keys), None)
        if unknown is not None:
            raise ProtocolViolation(f"rank {rank} asks about key {unknown}, which nobody has registered")
        for event in message.begun:  # before anything is granted, and logged
            self._consistency.check(rank, event)
        bindings = []
        if self._outbox.keeps_log:
            self._outbox.record(self._leases.extend(self._granted_by(event) for event in message.begun))
        for event in message.begun:
            conflict = self._consistency.begun(rank, event)
            name = self.keys.name(event.key)
            if conflict is not None:
                where = "" if conflict.collective else f"round {event.round} of key {name!r}: "
                reason = f"{where}{conflict}"
                return m.PeerGone(rank=-1, kind="disagreement", reason=reason)
            bindings += self._consistency.bindings(event.key, event.round)
            self._members.liveness.heard(rank, now, f"round {event.round} of key {name!r}")
        self._members.send([rank], m.TopologyAnswer(bindings=tuple(bindings)))
        return None

    def _waiting(self, rank: int, message: m.CallsWaiting) -> m.PeerGone | None:
        """Compare collective calls that wait at a rank with those of the others."""
        for call in message.calls:
            self.authority.check_call(rank, call)
            conflict = self._calls.record(rank, call)
            if conflict is not None:
                return m.PeerGone(rank=-1, kind="disagreement", reason=str(conflict))
        return None

    def _granted_by(self, event: m.RoundBegun) -> tuple[int, int]:
        """Return a key, and the last of its rounds that a rank is granted by beginning one."""
        return event.key, granted_by(event.round, under_way_of(self.keys.spec(event.key)))

    def _check_members(self, rank: int, spec: m.KeySpec) -> None:
        """Check the members of a key.

        Raises:
            ProtocolViolation: no correct node registers it.
        """
        members, size = spec.members, len(self._members)
        if not members:
            return
        if rank not in members or list(members) != sorted(set(members)):
            raise ProtocolViolation(
                f"rank {rank} registers {spec.name!r} for ranks {list(members)}: expected ascending ranks "
                "with its own among them"
            )
        if members[0] < 0 or members[-1] >= size:
            raise ProtocolViolation(
                f"rank {rank} registers {spec.name!r} for ranks {list(members)}: expected ranks below {size}"
            )

    def moved(self, rank: int, message: m.Moved) -> None:
        """Tell all nodes which chunks their root has moved to a later policy.

        Raises:
            ProtocolViolation: the key or the policy is unknown, or the node is not the chunks' root.
        """
        if message.key not in self.keys or not 0 <= message.version <= self._consistency.version:
            raise ProtocolViolation(
                f"rank {rank} moved chunks of key {message.key} to policy {message.version}: expected "
                f"one of {len(self.keys)} keys, and a version up to {self._consistency.version}"
            )
        moves = self._moves.get((message.key, message.round), [])
        if message not in moves:
            self.authority.check_moved(rank, message, moves, self._policies)
        moves = self._moves.setdefault((message.key, message.round), [])
        if message not in moves:
            moves.append(message)
        self._forget_moves()
        members = self.keys.spec(message.key).members
        if self.silent and not members:  # they begin no round, so nothing else tells them what it is bound to
            bindings = self._consistency.bindings(message.key, message.round)
            self._members.send(self.silent, m.TopologyAnswer(bindings=tuple(bindings)))
        self._members.send(members or range(len(self._members)), message)

    def _forget_moves(self) -> None:
        complete = [key_round for key_round in self._moves if self._consistency.is_complete(*key_round)]
        for key_round in complete:
            del self._moves[key_round]
