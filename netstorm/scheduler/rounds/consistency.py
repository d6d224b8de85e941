"""Bindings: which policy each round of each key runs under, the same at every rank (design, §7).

Keys advance at different paces, so bindings are per key: a table of (first round, version). What has been
granted never changes; a new version starts, for each key, one round after the highest that any rank has been
granted. A rank asks about round t + 1 when it begins round t, so that a topology request (TRP,
arXiv 2404.11352 §VII-A) costs no waiting.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.protocol.ids import bits_of
from netstorm.protocol.messages import ANY_RULE, Binding, RoundBegun
from netstorm.topology.policy import Policy

__all__ = ["ROUNDS_AHEAD", "Consistency", "RuleConflict", "policies_needed"]

ROUNDS_AHEAD: Final = 1024
"""How far a rank may be ahead of the slowest in one key. A general node is never more than a few ahead: it
contributes to two rounds beyond its last complete one. This only bounds what a faulty rank can make the
scheduler remember."""

_COMPLETE_BEFORE: Final = 2
"""A general node begins round t only if it has completed round t minus this."""

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

    def __str__(self) -> str:
        return (
            f"rank {self.first_rank} updates with {self.first_rule or 'no rule'!r}, rank {self.rank} with "
            f"{self.rule or 'no rule'!r}: every rank must use the same optimiser and hyper-parameters, and "
            "push the same kind of arrays"
        )


@dataclass(slots=True)
class _Begun:
    """A round that some ranks have begun and some have not."""

    first_rank: int = -1
    """The first rank that names a rule; -1: none yet."""
    rule: str = ANY_RULE
    ranks: int = 0
    """Bit set of the ranks that have begun it."""


@dataclass(slots=True)
class _Table:
    """The bindings of one key."""

    rows: list[tuple[int, int]]
    """(first round, version), by round; the first row covers the slowest rank's next round."""
    granted: int = 0
    """Highest round whose version some rank knows; round 0's comes with the registration."""
    complete: int = -1
    """Up to here, every rank has begun every round."""
    restored: bool = False
    """From a replay log, which does not say which ranks have begun which rounds. A rank that begins round t
    shows that all have begun round t - 2.
    """
    open: dict[int, _Begun] = field(default_factory=dict)
    """By round: rounds beyond `complete` that some rank has begun."""


class Consistency:
    """Bindings of all keys."""

    def __init__(self, ranks: int, version: int) -> None:
        """Begin with `ranks` nodes and the policy version in force."""
        self._everybody: Final = bits_of(range(ranks))
        self._version = version
        self._tables: dict[int, _Table] = {}

    @property
    def version(self) -> int:
        """The version that the next unbound round of every key will run under."""
        return self._version

    def add_key(self, key: int) -> None:
        """Add a key: its round 0 runs under the present version. Adding it twice does no harm."""
        if key not in self._tables:
            self._tables[key] = _Table(rows=[(0, self._version)])

    def restore(self, key: int, rows: Iterable[tuple[int, int]], granted: int) -> None:
        """Go on where another process stopped.

        Args:
            key: the key.
            rows: its (first round, version), by round.
            granted: no round beyond this one was granted.
        """
        self._tables[key] = _Table(rows=list(rows), granted=granted, restored=True)

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

    def begun(self, rank: int, event: RoundBegun) -> RuleConflict | None:
        """Record that a rank has begun a round. That grants it the next one.

        Raises:
            ProtocolViolation: a round that no correct node can have begun.
        """
        table = self._tables[event.key]
        round = event.round
        if table.restored and round - _COMPLETE_BEFORE > table.complete:
            table.complete = round - _COMPLETE_BEFORE
            table.open = {other: begun for other, begun in table.open.items() if other > table.complete}
        if not 0 <= round <= table.complete + ROUNDS_AHEAD:
            raise ProtocolViolation(
                f"rank {rank} says that it has begun round {round} of key {event.key}, of which every rank "
                f"has begun round {table.complete}: more than {ROUNDS_AHEAD} rounds ahead"
            )
        table.granted = max(table.granted, round + 1)
        if round <= table.complete:  # reported before
            return None
        found = table.open.setdefault(round, _Begun())
        if found.rule == ANY_RULE:
            found.first_rank, found.rule = rank, event.rule
        found.ranks |= 1 << rank
        while table.complete + 1 in table.open and table.open[table.complete + 1].ranks == self._everybody:
            table.complete += 1
            del table.open[table.complete]
        while len(table.rows) > 1 and table.rows[1][0] <= table.complete:
            table.rows.pop(0)
        if event.rule not in (found.rule, ANY_RULE):
            return RuleConflict(found.first_rank, found.rule, rank, event.rule)
        return None

    def is_complete(self, key: int, round: int) -> bool:
        """Return whether every rank is known to have completed a round."""
        return round <= self._tables[key].complete - _COMPLETE_BEFORE

    def bindings(self, key: int, round: int) -> list[Binding]:
        """Return the bindings of a key from `round` on. Later answers only add to them."""
        table = self._tables[key]
        after = [index for index, (start, _) in enumerate(table.rows) if start > round]
        first = max(0, (after[0] if after else len(table.rows)) - 1)
        return [
            Binding(key=key, from_round=start, version=version, granted=table.granted)
            for start, version in table.rows[first:]
            if start <= table.granted
        ]

    def versions_in_use(self) -> set[int]:
        """Return the versions that some rank may still have to be told, and the present one."""
        return {self._version}.union(version for table in self._tables.values() for _, version in table.rows)


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
