"""Which policy a round of a key runs under, as the scheduler has bound it (TRP; arXiv 2404.11352 §VII-A).
Pure.
"""

from __future__ import annotations

from typing import Final

from netstorm.errors import ProtocolViolation
from netstorm.protocol.messages import Binding
from netstorm.topology.policy import Plan, Policy

__all__ = ["Bindings"]

_KEPT: Final = 64
"""Newest policies that are kept though no round here refers to them. Another rank's request may have bound a
round to one of them, and the message to this rank may be in flight.
"""

_MOST: Final = 1024
"""Newest policies of which all are kept that a key's next rounds may still be bound to: a rank that lags
behind hears late of a round that others have bound long ago.
"""


class Bindings:
    """Policies by version, and each key's table of (first round, version).

    Attributes:
        plans: this node's part in each policy that is known, by version.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.plans: Final[dict[int, Plan]] = {}
        self._group_plans: dict[tuple[int, tuple[int, ...]], Plan] = {}
        """By version and members: those of groups that have used the version."""
        self._tables: dict[int, list[tuple[int, int]]] = {}
        self._granted: dict[int, int] = {}
        self._view_version = -1
        """Version of the policy of the present view; -1: no view has replaced the first one."""

    def install(self, policy: Policy) -> Plan:
        """Add a policy; the same version twice is the same policy."""
        return self.plans.setdefault(policy.version, Plan(policy, self._rank))

    def plan(self, version: int, members: tuple[int, ...] = ()) -> Plan | None:
        """Return this node's part in a policy, or None if the policy is not known.

        Args:
            version: the policy's.
            members: the ranks that take part; empty: all.
        """
        plan = self.plans.get(version)
        if not members or plan is None:
            return plan
        found = self._group_plans.get((version, members))
        if found is None:
            found = self._group_plans[version, members] = Plan(plan.policy, self._rank, members)
        return found

    @property
    def newest(self) -> Policy:
        """The newest policy known; there is one from the start."""
        return self.plans[max(self.plans)].policy

    def bind(self, binding: Binding) -> None:
        """Add one row to a key's table.

        Raises:
            ProtocolViolation: a round that was granted under one version would now run under another.
        """
        table = self._tables.setdefault(binding.key, [])
        known, view = dict(table).get(binding.from_round), self._view_version
        if known is not None and max(known, view) != max(binding.version, view):  # as `version_of` has them
            raise ProtocolViolation(
                f"the scheduler bound round {binding.from_round} of key {binding.key} to policy "
                f"{known} and now to {binding.version}"
            )
        if known is None:
            table.append((binding.from_round, binding.version))
            table.sort()
        self._granted[binding.key] = max(binding.granted, self._granted.get(binding.key, -1))

    def begin_view(self, version: int) -> None:
        """Let everything that was bound to an earlier policy run under that of a new view."""
        self._view_version = version

    def version_of(self, key: int, round: int) -> int | None:
        """Return the policy version of a round, or None if the scheduler has not granted it yet."""
        if round > self.granted_of(key):
            return None
        found = None
        for from_round, version in self._tables[key]:
            if from_round > round:
                break
            found = version
        return None if found is None else max(found, self._view_version)

    def granted_of(self, key: int) -> int:
        """Return the last round of a key that this rank has been granted; -1: none."""
        return self._granted.get(key, -1)

    def granted(self) -> dict[int, int]:
        """Return the last round of each key that this rank has been granted."""
        return dict(self._granted)

    def rows(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return each key's (first round, version), as far as this rank knows and needs them."""
        return {key: tuple(table) for key, table in self._tables.items()}

    def forget_before(self, key: int, round: int) -> None:
        """Drop rows that no round from `round` on can need, and policies that no key refers to any more."""
        table = self._tables.get(key)
        if table is None or len(table) < 2 or table[1][0] > round:
            return
        while len(table) > 1 and table[1][0] <= round:
            table.pop(0)
        newest = max(self.plans)
        lagging = min(rows[-1][1] for rows in self._tables.values())  # of a key, versions only grow
        oldest = max(newest - _MOST, min(newest - _KEPT, lagging))
        used = {self._view_version} | {version for rows in self._tables.values() for _, version in rows}
        for version in [known for known in self.plans if known < oldest and known not in used]:
            del self.plans[version]
        for version, members in [known for known in self._group_plans if known[0] not in self.plans]:
            del self._group_plans[version, members]
