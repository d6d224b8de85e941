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


class Bindings:
    """Policies by version, and each key's table of (first round, version)."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._plans: dict[int, Plan] = {}
        self._tables: dict[int, list[tuple[int, int]]] = {}
        self._granted: dict[int, int] = {}

    def install(self, policy: Policy) -> Plan:
        """Add a policy; the same version twice is the same policy."""
        return self._plans.setdefault(policy.version, Plan(policy, self._rank))

    def plan(self, version: int) -> Plan | None:
        """Return this node's part in a policy, or None if the policy is not known."""
        return self._plans.get(version)

    @property
    def newest(self) -> Policy:
        """The newest policy known; there is one from the start."""
        return self._plans[max(self._plans)].policy

    def bind(self, binding: Binding) -> None:
        """Add one row to a key's table.

        Raises:
            ProtocolViolation: a round that was granted under one version would now run under another.
        """
        table = self._tables.setdefault(binding.key, [])
        known = dict(table).get(binding.from_round)
        if known is not None and known != binding.version:
            raise ProtocolViolation(
                f"the scheduler bound round {binding.from_round} of key {binding.key} to policy "
                f"{known} and now to {binding.version}"
            )
        if known is None:
            table.append((binding.from_round, binding.version))
            table.sort()
        self._granted[binding.key] = max(binding.granted, self._granted.get(binding.key, -1))

    def version_of(self, key: int, round: int) -> int | None:
        """Return the policy version of a round, or None if the scheduler has not granted it yet."""
        if round > self._granted.get(key, -1):
            return None
        found = None
        for from_round, version in self._tables[key]:
            if from_round > round:
                break
            found = version
        return found

    def forget_before(self, key: int, round: int) -> None:
        """Drop rows that no round from `round` on can need, and policies that no key refers to any more."""
        table = self._tables.get(key)
        if table is None or len(table) < 2 or table[1][0] > round:
            return
        while len(table) > 1 and table[1][0] <= round:
            table.pop(0)
        oldest = max(self._plans) - _KEPT
        used = {version for rows in self._tables.values() for _, version in rows}
        for version in [known for known in self._plans if known < oldest and known not in used]:
            del self._plans[version]
