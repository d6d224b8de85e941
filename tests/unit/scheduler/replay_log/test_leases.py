"""Grants are logged ahead, in blocks."""

from __future__ import annotations

from netstorm.scheduler import replay_log as r
from netstorm.scheduler.replay_log import LEASE, Leases


def test_grants_are_written_down_ahead_and_only_once():
    leases = Leases()
    assert leases.extend([(0, 1), (1, 1)]) == r.Leased(rounds=((0, 1 + LEASE), (1, 1 + LEASE)))
    for round in range(2, 2 + LEASE):
        assert leases.extend([(0, round)]) is None
    assert leases.extend([(0, 2 + LEASE)]) == r.Leased(rounds=((0, 2 + 2 * LEASE),))
