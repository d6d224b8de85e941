"""How far ahead is far enough: the rule on networks whose delays can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from netstorm.topology.form import form_policy
from netstorm.topology.network import FAMILIES, Network, Node, Rank, generate
from netstorm.topology.policy import Forest
from netstorm.topology.prediction import predict
from netstorm.topology.resources import with_look_ahead
from netstorm.topology.tree import Tree

MB = 1_000_000
RATE = 8e6  # 1 MB takes a second
STARS = Forest(
    trees=(Tree.undirected(Rank(0), (-1, 0, 0)), Tree.undirected(Rank(1), (1, -1, 1))),
    shares=(3.0, 3.0),
    reason="by hand",
)


def test_it_is_two_and_a_half_times_what_is_under_way_in_the_slowest_trees_time():
    network = Network.uniform(3, rate=RATE, latency=9.0)
    forest = with_look_ahead(network, STARS, MB)
    # Rank 0's links to rank 1 carry both trees' halves, up and down: 1 MB/s. A chunk takes 2 x 10 s.
    assert forest.look_ahead == 2.5 * 20 * MB
    assert forest.look_ahead_s == pytest.approx(50)


def test_behind_access_caps_it_is_four_times_that_and_never_less_than_four_chunks_of_each_tree():
    def capped(network):
        return replace(network, nodes=tuple(Node(rank=node.rank, egress=RATE) for node in network.nodes))

    # Rank 0 sends both broadcasts of its tree and a contribution of the other: 1 / 1.5 MB/s, for 2 s.
    near = with_look_ahead(capped(Network.uniform(3, rate=RATE)), STARS, MB)
    assert near.look_ahead == 4 * 2 * MB
    far = with_look_ahead(capped(Network.uniform(3, rate=RATE, latency=9.0)), STARS, MB)
    assert far.look_ahead == pytest.approx(4 * 20 * MB / 1.5)


def test_one_tree_needs_none():
    forest = Forest(trees=STARS.trees[:1], shares=(1.0,), reason="by hand")
    assert with_look_ahead(Network.uniform(3), forest, MB) == forest


def test_shares_count_in_proportion():
    network = generate("cloud", 3, 1)
    tenfold = replace(STARS, shares=(30.0, 30.0))
    assert with_look_ahead(network, tenfold, MB).look_ahead == with_look_ahead(network, STARS, MB).look_ahead


@pytest.mark.parametrize("scheme", ["packing", "auto"])
def test_packings_have_one_where_the_network_is_known_and_only_there(scheme):
    network = generate("cloud", 6, 2)
    known = form_policy(network, scheme)
    made_up = form_policy(network, scheme, known=False)
    assert known.look_ahead > 0
    assert known.look_ahead_s > 0
    assert (made_up.look_ahead, made_up.look_ahead_s) == (0, 0.0)
    assert known.trees == form_policy(network, "packing", known=False).trees


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rounds_take_no_longer_than_without(family):
    network = generate(family, 9, 3)
    tensors = (10 * MB, 60 * MB, 30 * MB)
    options: dict[str, Any] = {"tensors": tensors, "chunk_bytes": MB // 4}
    ahead = form_policy(network, "packing", **options)
    without = form_policy(network, "packing", known=False, **options)
    seconds = [predict(network, one, tensors, chunk_bytes=MB // 4).seconds for one in (ahead, without)]
    assert seconds[0] <= 1.03 * seconds[1]


def test_behind_access_caps_rounds_are_faster():
    tensors = (120 * MB,)
    options: dict[str, Any] = {"tensors": tensors, "chunk_bytes": MB // 4}
    gains = []
    for seed in range(3):
        network = generate("cloud", 9, seed)
        ahead = form_policy(network, "packing", **options)
        without = form_policy(network, "packing", known=False, **options)
        seconds = [predict(network, one, tensors, chunk_bytes=MB // 4).seconds for one in (ahead, without)]
        gains.append(seconds[1] / seconds[0])
    assert sum(gains) / len(gains) > 1.03
