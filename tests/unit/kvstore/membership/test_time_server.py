"""From whom a node has the time, along the trees."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from netstorm.kvstore.membership import time_server_address, time_server_rank
from netstorm.protocol.messages import Member
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree
from tests.simulated.jobs import random_policy


def test_roots_ask_the_scheduler_and_others_their_parent_in_the_largest_tree():
    chain = Tree.undirected(Rank(0), (-1, 0, 1, 2))
    star = Tree.undirected(Rank(3), (3, 3, 3, -1))
    policy = Policy(version=0, trees=(star, chain), weights=(1, 2))
    assert [time_server_rank(policy, rank) for rank in range(4)] == [None, 0, 1, None]
    members = [Member(rank, f"h{rank}", 9000 + rank, "", rank) for rank in range(4)]
    assert time_server_address(policy, 2, members) == ("h1", 9001)
    assert time_server_address(policy, 3, members) is None
    assert time_server_address(None, -1, ()) is None


@given(st.integers(2, 9), st.integers(0, 2**32))
def test_everybody_has_the_time_from_the_scheduler_in_the_end(nodes, seed):
    policy = random_policy(random.Random(seed), nodes)
    for rank in range(nodes):
        asked, parent = [rank], time_server_rank(policy, rank)
        while parent is not None:
            assert parent not in asked
            asked.append(parent)
            parent = time_server_rank(policy, parent)
