"""A rank that joins later demands of its pulls what any rank does, counted from where it began."""

from __future__ import annotations

import numpy as np
import pytest

from netstorm.kvstore.asynchronous.blocks import AsynchronousOutbox, Owners
from netstorm.kvstore.asynchronous.client import Requests
from netstorm.kvstore.operations import Outbox, PullOperation
from netstorm.observe.log import Counters
from netstorm.protocol.messages import Pull, Value
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.unit.kvstore.asynchronous.test_owners import key

STAR = Policy(version=1, trees=(Tree.undirected(Rank(0), (-1, 0, 0)),), weights=(1,))
SLOWEST = 7
"""Pushes of the slowest other rank when the newcomer pulls first."""


@pytest.mark.parametrize(
    ("least", "demanded"), [(None, 0), (-1, SLOWEST - 1), (0, SLOWEST), (2, SLOWEST + 2)]
)
def test_a_bound_counts_from_where_the_rank_began(least, demanded):
    routed = AsynchronousOutbox(0, STAR, Outbox())
    requests = Requests(Owners((1, 0, 0)), Counters(), routed, later=True)

    def pull(number, least):
        requests.begin(
            PullOperation(
                key=key(),
                number=number,
                done=lambda _: None,
                pushed=0,
                destination=np.zeros(10, np.float32),
                least=least,
            )
        )

    pull(0, None)
    for chunk in range(3):
        answer = Value(
            path=(), hop=0, key=0, chunk=chunk, number=0, others=0, dtype="float32", slowest=SLOWEST
        )
        requests.value(0, answer, np.zeros(4 if chunk < 2 else 2, np.float32))
    pull(1, least)
    (message,) = [one for one, _ in routed.local if isinstance(one, Pull) and one.number == 1]
    assert message.least == demanded
