"""A member that sends owners, replicas and ranks what no correct one would, in asynchronous training."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import numpy as np
import pytest

from netstorm.errors import NetStormError
from netstorm.lab.testing.decoders import message_classes
from netstorm.lab.testing.hostile_member import HostileMember
from netstorm.protocol import messages as m
from tests.simulated.elastic.test_asynchronous_holders import NODES, Job

KINDS = get_args(m.AsynchronousMessage)
OTHERS = tuple(kind for kind in message_classes() if not issubclass(kind, KINDS))
STEPS = 12


class HostileOwner(HostileMember):
    """Sends messages of asynchronous training, most of them to a rank directly, about a key that it has."""

    def _turn(self):
        if self._others():
            super()._turn()

    def _send(self, message, payload):
        target = self._chance.choice(self._others())
        if isinstance(message, KINDS):
            changes = {"path": (self._rank, int(target)), "hop": 1}
            joined = self._node.machine.joined
            if joined is not None and self._chance.random() < 0.9:
                changes["view"] = joined.asynchronous._routed.view
            if hasattr(message, "key") and self._chance.random() < 0.8:
                changes["key"] = 0
            message = msgspec.structs.replace(message, **changes)
        self._send_to(target, message, payload)


def run(seed):
    """Let a member lie while another one dies; what fails names the liar. Return whether that happened."""
    job, hostile, dies = Job(seed=seed), seed % NODES, (seed + 2) % NODES
    job.push(range(NODES))
    spares: tuple[type[m.Message], ...] = OTHERS
    if seed % 8 < 4:
        spares = (*OTHERS, m.Push)  # a push under another rule ends the job at once
    member = HostileOwner(
        job.cluster, hostile, seed=seed, forges_parts=True, most=4000, every_s=0.002, spares=spares
    )
    correct = [rank for rank in range(NODES) if rank not in (hostile, dies)]
    for step in range(STEPS):
        if step == STEPS // 2:
            job.cluster.faults.crash(dies)
        pending = [job.stores[rank].push("w", np.full(NODES * 16, -1)) for rank in correct]
        pending += [job.stores[rank].pull("w") for rank in correct]
        job.cluster.run_until_ended(pending, 100.0)
        errors = [one.error for one in pending if isinstance(one.error, NetStormError)]
        if errors:  # who is owner next may end, too, with what was lost with the first one
            assert any(re.search(rf"\brank {hostile}\b", str(error)) for error in errors), errors
            return True
        assert all(one.error is None for one in pending)
        job.cluster.run_for(0.1)
    assert member.sent
    return False


def test_a_job_goes_on_or_names_the_member_that_lies():
    ends = {run(seed) for seed in range(8)}
    assert True in ends


@pytest.mark.slow
@pytest.mark.parametrize("first", range(8, 108, 25))
def test_many_members_lie(first):
    for seed in range(first, first + 25):
        run(seed)
