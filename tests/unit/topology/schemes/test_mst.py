"""The tree of the fastest links, against networkx and brute force."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given

from netstorm.errors import Unreachable
from netstorm.lab.testing.strategies import networks
from netstorm.topology import Link, Network, Rank, mst, transfer_delays
from tests.unit.topology.spanning_trees import slowest


def slower_directions(network: Network) -> nx.Graph[int]:
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(network.ranks)
    pairs = set(network.linked_pairs())
    for source, target in pairs:
        if (target, source) in pairs:
            rate = min(network.throughput(source, target), network.throughput(target, source))
            graph.add_edge(source, target, weight=rate)
    return graph


@given(networks(symmetric=None, capped=True, routing=None))
def test_no_spanning_tree_has_faster_links(network: Network):
    graph = slower_directions(network)
    best = nx.maximum_spanning_tree(graph)

    (tree,) = mst(network).trees

    assert tree.reduce_parent == tree.broadcast_parent
    edges = [(rank, parent) for rank, parent in enumerate(tree.reduce_parent) if parent >= 0]
    assert sorted(graph.edges[edge]["weight"] for edge in edges) == sorted(
        best.edges[edge]["weight"] for edge in best.edges
    )


@given(networks(symmetric=None, capped=True))
def test_the_root_is_the_rank_from_which_the_tree_is_fastest(network: Network):
    delays = transfer_delays(network, linked=True)
    backwards = {(target, source): delay for (source, target), delay in delays.items()}
    (tree,) = mst(network).trees
    edges = nx.Graph([(rank, parent) for rank, parent in enumerate(tree.reduce_parent) if parent >= 0])
    edges.add_nodes_from(network.ranks)

    took = {}
    for root in network.ranks:
        above = {child: parent for parent, child in nx.bfs_edges(edges, root)}
        parents = [above.get(rank, -1) for rank in network.ranks]
        took[root] = slowest(parents, delays) + slowest(parents, backwards)

    assert took[tree.root] == pytest.approx(min(took.values()))


def one_way(*links: tuple[int, int, float]) -> Network:
    size = 1 + max(max(source, target) for source, target, _ in links)
    return replace(
        Network.uniform(size),
        links=tuple(
            Link(source=Rank(source), target=Rank(target), rate=rate) for source, target, rate in links
        ),
    )


def test_where_links_lead_one_way_the_slowest_link_of_each_phase_is_as_fast_as_can_be():
    network = one_way((0, 1, 9e6), (1, 2, 9e6), (2, 0, 9e6), (2, 1, 5e6))

    (tree,) = mst(network).trees

    assert tree.root == 0
    assert tree.reduce_parent == (-1, 2, 0)
    assert tree.broadcast_parent == (-1, 0, 1)


def test_ranks_without_a_path_are_named():
    with pytest.raises(Unreachable, match=r"^there is no path to rank 0 for ranks 1, 2$"):
        mst(one_way((0, 1, 1e6), (0, 2, 1e6)))
