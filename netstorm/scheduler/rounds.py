"""Bindings: which policy each round of each key runs under, the same at every rank (design, §7).

Keys advance at different paces, so bindings are per key: a table of (first round, version). What has been
granted never changes; a new version starts, for each key, one round after the highest that any rank has been
granted. A rank asks about round t + 1 when it begins round t, so that a topology request (TRP,
arXiv 2404.11352 §VII-A) costs no waiting.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.protocol.codecs import COLLECTIVE, granted_at_first, granted_by, rounds_under_way
from netstorm.protocol.frames import bits_of
from netstorm.protocol.messages import ANY_RULE, Binding, KeySpec, RoundBegun
from netstorm.topology.policy import Policy

__all__ = ["ROUNDS_AHEAD", "Consistency", "RuleConflict", "policies_needed", "under_way_of"]

ROUNDS_AHEAD: Final = 1024
"""How far a rank may be ahead of the slowest in one key. A general node is never more than a few ahead: it
contributes to two rounds beyond its last complete one. This only bounds what a faulty rank can make the
scheduler remember."""

_TAKEOVERS: Final = 8
"""Of this many newest versions, those that took chunks over are kept even if no round is bound to them:
chunks of rounds in progress may have moved there."""


@dataclass(frozen=True, slots=True)
class RuleConflict:
    """Two ranks would apply different update rules to the sum of one round."""

    first_rank: int
    first_rule: str
    rank: int
    rule: str
    collective: bool = False
    """The rules are collective calls."""

    def __str__(self) -> str:
        if self.collective:
            return (
                f"{self.first_rule} at rank {self.first_rank} and {self.rule} at rank {self.rank} meet: "
                "every member of a group must make the same calls, of the same types and shapes, in the same "
                "order"
            )
        return (
            f"rank {self.first_rank} updates with {self.first_rule or 'no rule'!r}, rank {self.rank} with "
            f"{self.rule or 'no rule'!r}: every rank must use the same optimizer and hyper-parameters, and "
            "push the same kind of arrays"
        )


@dataclass(slots=True)
class _Begun:
    """A round that some ranks have begun and some have not."""

    rule: str = ANY_RULE
    """What all ranks name that name any."""
    named_by: list[int] = field(default_factory=list)
    """They, the first one first."""
    ranks: int = 0
    """Bit set of the ranks that have begun it."""

    def without(self, rank: int) -> None:
        """Forget what a rank names that has left: the others may go on otherwise, as their results tell."""
        if rank in self.named_by:
            self.named_by.remove(rank)
            if not self.named_by:
                self.rule = ANY_RULE


@dataclass(slots=True)
class _Table:
    """The bindings of one key."""

    rows: list[tuple[int, int]]
    """(first round, version), by round; the first row covers the slowest rank's next round."""
    everybody: int
    """Bit set of the ranks that push the key."""
    under_way: int
    """A general node begins round t only if it has completed round t minus this."""
    collective: bool
    of_some: bool
    """Of a group of some ranks: nobody takes the place of a rank that leaves."""
    granted: int
    """Highest round whose version some rank knows; those of the first ones come with the registration."""
    complete: int = -1
    """Up to here, every rank has begun every round."""
    restored: bool = False
    """From a replay log, which does not say which ranks have begun which rounds. A rank that begins round t
    shows that all have begun round t - `under_way`.
    """
    late: dict[int, int] = field(default_factory=dict)
    """By rank that joined later: the first round that it begins."""
    open: dict[int, _Begun] = field(default_factory=dict)
    """By round: rounds beyond `complete` that some rank has begun."""


class Consistency:
    """Bindings of all keys."""

    def __init__(self, ranks: int, version: int) -> None:
        """Begin with `ranks` nodes and the policy version in force."""
        self._ranks: Final = ranks
        self._version = version
        self._tables: dict[int, _Table] = {}
        self._absent = 0
        """Bit set of the ranks that begin no rounds: they are not in the job, or silent."""
        self._left = 0
        """Bit set of the ranks that have ever left, or joined later."""
        self._silent = 0
        """Bit set of the members that begin no rounds yet, but get their results: they must know which policy
        those run under."""
        self._view_version = -1

    @property
    def version(self) -> int:
        """The version that the next unbound round of every key will run under."""
        return self._version

    def add_key(self, key: int, spec: KeySpec) -> None:
        """Add a key: its first rounds run under the present version. Adding it twice does no harm."""
        if key not in self._tables:
            self._tables[key] = self._new_table(spec, [(0, self._version)])

    def restore(self, key: int, spec: KeySpec, rows: Iterable[tuple[int, int]], granted: int) -> None:
        """Go on where another process stopped.

        Args:
            key: the key.
            spec: its description.
            rows: its (first round, version), by round.
            granted: no round beyond this one was granted.
        """
        self._tables[key] = table = self._new_table(spec, list(rows))
        table.granted, table.restored = granted, True

    def _new_table(self, spec: KeySpec, rows: list[tuple[int, int]]) -> _Table:
        under_way = under_way_of(spec)
        return _Table(
            rows=rows,
            everybody=bits_of(spec.members) & ~self._left if spec.members else (1 << self._ranks) - 1,
            under_way=under_way,
            collective=spec.form == COLLECTIVE,
            of_some=bool(spec.members),
            granted=granted_at_first(under_way),
        )

    def install(self, version: int) -> dict[int, int]:
        """Let `version` apply, in each key, from the first round that no rank has been granted. Returns these
        rounds.
        """
        self._version = version
        for table in self._tables.values():
            start = table.granted + 1
            while table.rows and table.rows[-1][0] >= start:  # no rank knows of that row
                table.rows.pop()
            table.rows.append((start, version))
        return {key: table.granted + 1 for key, table in self._tables.items()}

    def without(self, rank: int) -> None:
        """Wait no more for a rank to begin rounds."""
        self._absent |= 1 << rank
        self._left |= 1 << rank
        for table in self._tables.values():
            table.late.pop(rank, None)
            for begun in table.open.values():
                begun.without(rank)
            if table.of_some:
                table.everybody &= ~(1 << rank)
            self._advance(table)

    def with_rank(self, rank: int, starts: Mapping[int, int]) -> None:
        """Wait for a rank, too: by key, from these rounds on."""
        self._absent &= ~(1 << rank)
        self._silent &= ~(1 << rank)
        for key, start in starts.items():
            if not self._tables[key].of_some:
                self._tables[key].late[rank] = start

    def begin_view(self, version: int, silent: Iterable[int] = ()) -> None:
        """Let everything that was bound to an earlier policy run under that of a new view.

        Args:
            version: of the view's policy.
            silent: members that begin no rounds yet.
        """
        self._view_version = version
        self._silent = bits_of(silent)

    def check(self, rank: int, event: RoundBegun) -> None:
        """Check that a rank can have begun a round.

        Raises:
            ProtocolViolation: a round that no correct node can have begun.
        """
        table, round = self._tables[event.key], event.round
        if not table.everybody >> rank & 1:
            raise ProtocolViolation(
                f"rank {rank} says that it has begun a round of key {event.key}, of others"
            )
        complete = max(table.complete, round - table.under_way) if table.restored else table.complete
        if not 0 <= round <= complete + ROUNDS_AHEAD:
            raise ProtocolViolation(
                f"rank {rank} says that it has begun round {round} of key {event.key}, of which every rank "
                f"has begun round {complete}: more than {ROUNDS_AHEAD} rounds ahead"
            )
        if round > table.granted:
            raise ProtocolViolation(
                f"rank {rank} says that it has begun round {round} of key {event.key}, which no rank was "
                f"granted: the last one is {table.granted}"
            )

    def begun(self, rank: int, event: RoundBegun) -> RuleConflict | None:
        """Record that a rank has begun a round. That grants it those that it may begin before it is complete.

        Raises:
            ProtocolViolation: a round that no correct node can have begun.
        """
        self.check(rank, event)
        table, round = self._tables[event.key], event.round
        if table.restored and round - table.under_way > table.complete:
            table.complete = round - table.under_way
            table.open = {other: begun for other, begun in table.open.items() if other > table.complete}
        table.granted = max(table.granted, granted_by(round, table.under_way))
        if round <= table.complete:  # reported before
            return None
        found = table.open.setdefault(round, _Begun())
        found.ranks |= 1 << rank
        conflict = None
        if event.rule != ANY_RULE:
            if not found.named_by:
                found.rule = event.rule
            elif event.rule != found.rule:
                first = found.named_by[0]
                conflict = RuleConflict(first, found.rule, rank, event.rule, collective=table.collective)
            if rank not in found.named_by:
                found.named_by.append(rank)
        self._advance(table)
        return conflict

    def granted(self, key: int) -> int:
        """Return the last round of a key that some rank has been granted."""
        return self._tables[key].granted

    def version_of(self, key: int, round: int) -> int | None:
        """Return the version that a round is bound to; None: all ranks have begun later ones, and it is not
        remembered, or none has been granted it.
        """
        table = self._tables[key]
        if round > table.granted:
            return None
        versions = [version for start, version in table.rows if start <= round]
        return max(versions[-1], self._view_version) if versions else None

    def is_complete(self, key: int, round: int) -> bool:
        """Return whether every rank is known to have completed a round."""
        return round <= self._tables[key].complete - self._tables[key].under_way

    def bindings(self, key: int, round: int) -> list[Binding]:
        """Return the bindings of a key from `round` on. Later answers only add to them."""
        table = self._tables[key]
        after = [index for index, (start, _) in enumerate(table.rows) if start > round]
        first = max(0, (after[0] if after else len(table.rows)) - 1)
        # What is forgotten was bound before this view, and runs under its policy, unless all ranks have it.
        forgotten = self._view_version >= 0 and bool(table.rows) and table.rows[0][0] > round
        earlier = [Binding(key=key, from_round=round, version=0, granted=table.granted)] if forgotten else []
        return earlier + [
            Binding(key=key, from_round=start, version=version, granted=table.granted)
            for start, version in table.rows[first:]
            if start <= table.granted
        ]

    def _advance(self, table: _Table) -> None:
        """Go on to the last round that every rank has begun."""
        while table.complete + 1 in table.open:
            following = table.complete + 1
            late = bits_of(rank for rank, start in table.late.items() if start > following)
            if table.everybody & ~self._absent & ~late & ~table.open[following].ranks:
                break
            table.complete = following
            del table.open[following]
            for rank in [rank for rank, start in table.late.items() if start <= following]:
                del table.late[rank]
        while not self._silent and len(table.rows) > 1 and table.rows[1][0] <= table.complete:
            table.rows.pop(0)

    def versions_in_use(self) -> set[int]:
        """Return the versions that some rank may still have to be told, and the present one."""
        used = {self._version} if self._view_version < 0 else {self._version, self._view_version}
        return used.union(version for table in self._tables.values() for _, version in table.rows)


def under_way_of(spec: KeySpec) -> int:
    """Return how many rounds of a key a rank may have begun and not completed."""
    return rounds_under_way(math.prod(spec.shape), spec.form)


def policies_needed(policies: Mapping[int, Policy], in_use: Container[int]) -> dict[int, Policy]:
    """Return the policies, by version, that some node may still have to be told.

    Args:
        in_use: versions that rounds are bound to.
    """
    newest = max(policies)
    return {
        version: policy
        for version, policy in policies.items()
        if version in in_use or (policy.takes_over and version > newest - _TAKEOVERS)
    }
