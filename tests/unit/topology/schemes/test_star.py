"""Stars: the best hub, and what happens where not everybody has a link to it."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.topology import Network, Rank, Routing, star


def spokes(network: Network, hub: Rank) -> tuple[float, float]:
    """Return the slowest spoke's 1/rate up and down, and the longest spoke's latency up and down."""
    others = [rank for rank in network.ranks if rank != hub]
    there = [(1 / network.throughput(rank, hub), network.link(rank, hub).latency) for rank in others]
    back = [(1 / network.throughput(hub, rank), network.link(hub, rank).latency) for rank in others]
    return (
        max((rate for rate, _ in there), default=0) + max((rate for rate, _ in back), default=0),
        max((latency for _, latency in there), default=0) + max((latency for _, latency in back), default=0),
    )


@given(networks(symmetric=None, capped=True, routing=Routing.UNDERLAY))
def test_no_hub_has_a_faster_slowest_spoke_than_the_best_one(network: Network):
    (tree,) = star(network).trees

    mine = spokes(network, tree.root)
    for hub in network.ranks:
        rate, latency = spokes(network, hub)
        assert mine[0] <= rate * (1 + 1e-9)
        if rate == pytest.approx(mine[0], rel=1e-13):
            assert mine[1] <= latency * (1 + 1e-9)
    assert set(tree.reduce_parent) == set(tree.broadcast_parent) == {-1, tree.root} or network.size == 1


def test_of_equal_hubs_the_one_with_less_latency_then_the_lowest_rank_is_taken():
    network = Network.uniform(4, latency=0.02)
    assert star(network).trees[0].root == 0

    nearer = replace(
        network,
        links=tuple(
            replace(link, latency=0.01) if 2 in (link.source, link.target) else link for link in network.links
        ),
    )
    assert star(nearer).trees[0].root == 2


def test_a_hub_that_is_asked_for_is_taken():
    forest = star(Network.uniform(4), Rank(3))

    assert forest.trees[0].root == 3
    assert forest.trees[0].reduce_parent == (3, 3, 3, -1)
    assert forest.shares == (1.0,)


@given(networks(symmetric=None), st.data())
def test_in_an_overlay_everybody_is_as_few_hops_from_the_hub_as_can_be(network: Network, data: st.DataObject):
    hub = data.draw(st.none() | st.sampled_from(network.ranks))
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(network.ranks)
    graph.add_edges_from((link.source, link.target) for link in network.links)

    (tree,) = star(network, hub).trees

    assert hub in (None, tree.root)
    for parents, hops in (
        (tree.reduce_parent, nx.shortest_path_length(graph, target=tree.root)),
        (tree.broadcast_parent, nx.shortest_path_length(graph, source=tree.root)),
    ):
        for rank, parent in enumerate(parents):
            assert parent < 0 or hops[rank] == hops[parent] + 1


def test_a_hub_with_links_to_all_is_preferred_to_a_faster_one_without():
    network = Network.uniform(4, rate=100e6)
    slow_hub = tuple(
        replace(link, rate=1e6) if {link.source, link.target} == {0, 1} else link
        for link in network.links
        if {link.source, link.target} not in ({1, 2}, {2, 3})
    )

    (tree,) = star(replace(network, links=slow_hub)).trees

    assert tree.root == 0
    assert tree.reduce_parent == (-1, 0, 0, 0)


def test_of_relays_equally_near_the_hub_the_fastest_is_taken():
    network = Network.uniform(4, rate=20e6)
    without_spoke = tuple(
        replace(link, rate=100e6) if {link.source, link.target} == {2, 3} else link
        for link in network.links
        if {link.source, link.target} != {0, 3}
    )

    (tree,) = star(replace(network, links=without_spoke), Rank(0)).trees

    assert tree.reduce_parent == tree.broadcast_parent == (-1, 0, 0, 2)


@pytest.mark.parametrize("hub", [-2, 3])
def test_a_hub_that_is_no_rank_is_refused(hub: int):
    with pytest.raises(UsageError, match=f"^hub {hub}: expected a rank from 0 to 2$"):
        star(Network.uniform(3), Rank(hub))
