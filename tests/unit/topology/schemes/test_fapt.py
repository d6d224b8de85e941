"""Fastest aggregation path trees against brute force over all trees."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.errors import Unreachable, UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.topology import Network, Rank, Routing, fapt, fastest_paths, load_network, transfer_delays
from tests.unit.topology.spanning_trees import all_trees, slowest

NINE_NODES = "examples/networks/internet2.yaml"


def backwards(delays: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    return {(target, source): delay for (source, target), delay in delays.items()}


@settings(max_examples=60)
@given(networks(max_nodes=5, symmetric=None, capped=True, routing=None), st.data())
def test_no_tree_beats_the_fapt_on_its_slowest_path(network: Network, data: st.DataObject):
    root = data.draw(st.sampled_from(network.ranks))
    delays = transfer_delays(network, linked=True)

    tree = fastest_paths(network, root)

    up = min(slowest(other.reduce_parent, delays) for other in all_trees(network.size, root))
    down = min(slowest(other.broadcast_parent, backwards(delays)) for other in all_trees(network.size, root))
    assert tree.root == root
    assert slowest(tree.reduce_parent, delays) == pytest.approx(up)
    assert slowest(tree.broadcast_parent, backwards(delays)) == pytest.approx(down)


@settings(max_examples=5)
@given(networks(6, 6, symmetric=False))
def test_no_tree_of_six_ranks_beats_the_fapt_either(network: Network):
    delays = transfer_delays(network, linked=True)

    tree = fastest_paths(network, Rank(0))

    assert slowest(tree.reduce_parent, delays) == pytest.approx(
        min(slowest(other.reduce_parent, delays) for other in all_trees(6, Rank(0)))
    )


@given(networks(symmetric=None, routing=None), st.sampled_from([1, 4096, 1 << 18, 1 << 26]), st.data())
def test_every_rank_has_its_shortest_way_to_the_root_and_back(
    network: Network, chunk_bytes: int, data: st.DataObject
):
    root = data.draw(st.sampled_from(network.ranks))
    delays = transfer_delays(network, chunk_bytes, linked=True)
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(network.ranks)
    graph.add_weighted_edges_from((source, target, delay) for (source, target), delay in delays.items())

    tree = fastest_paths(network, root, chunk_bytes=chunk_bytes)

    for parents, ways, towards in (
        (tree.reduce_parent, delays, nx.shortest_path_length(graph, target=root, weight="weight")),
        (
            tree.broadcast_parent,
            backwards(delays),
            nx.shortest_path_length(graph, source=root, weight="weight"),
        ),
    ):
        for start in network.ranks:
            here, way = int(start), 0.0
            while here != root:
                way += ways[here, parents[here]]
                here = parents[here]
            assert way == pytest.approx(towards[start])


@given(networks(symmetric=True, routing=Routing.OVERLAY))
def test_on_symmetric_links_both_directions_take_the_same_edges(network: Network):
    for tree in fapt(network).trees:
        assert tree.reduce_parent == tree.broadcast_parent


@given(networks(2, 9, symmetric=None), st.data())
def test_the_best_roots_are_taken_with_shares_in_proportion_to_quality(network: Network, data: st.DataObject):
    roots = data.draw(st.integers(1, network.size))
    delays = transfer_delays(network, linked=True)
    took = {}
    for root in network.ranks:
        tree = fastest_paths(network, root)
        took[root] = slowest(tree.reduce_parent, delays) + slowest(tree.broadcast_parent, backwards(delays))

    forest = fapt(network, roots)

    chosen = [tree.root for tree in forest.trees]
    assert len(chosen) == roots
    assert chosen == sorted(set(chosen))
    left = set(network.ranks) - set(chosen)
    assert max(took[root] for root in chosen) <= min((took[root] for root in left), default=float("inf")) * (
        1 + 1e-9
    )
    for root, share in zip(chosen, forest.shares, strict=True):
        assert share * took[root] == pytest.approx(forest.shares[0] * took[chosen[0]])


def test_equal_roots_are_taken_in_order_of_rank_and_share_alike():
    forest = fapt(Network.uniform(5), 3)

    assert [tree.root for tree in forest.trees] == [0, 1, 2]
    assert forest.policy(0).weights == (334, 333, 333)


def test_no_number_of_roots_means_all_of_them():
    assert [tree.root for tree in fapt(Network.uniform(4)).trees] == [0, 1, 2, 3]


def test_with_tiny_chunks_latency_decides_and_with_huge_ones_the_rate():
    network = Network.uniform(3, rate=100e6, latency=0.001)
    slow_but_near = replace(
        network,
        links=tuple(
            replace(link, rate=20e6, latency=0.0005) if {link.source, link.target} == {0, 2} else link
            for link in network.links
        ),
    )

    assert fastest_paths(slow_but_near, Rank(0), chunk_bytes=1).reduce_parent == (-1, 0, 0)
    assert fastest_paths(slow_but_near, Rank(0), chunk_bytes=1 << 20).reduce_parent == (-1, 0, 1)


def test_of_equally_fast_ways_the_one_with_fewer_hops_is_taken():
    network = Network.uniform(3, rate=100e6)
    half_as_fast = tuple(
        replace(link, rate=50e6) if {link.source, link.target} == {0, 2} else link for link in network.links
    )

    tree = fastest_paths(replace(network, links=half_as_fast), Rank(0))

    assert tree.reduce_parent == tree.broadcast_parent == (-1, 0, 0)


def test_the_example_network_gets_the_shares_that_its_delays_imply():
    network = load_network(NINE_NODES)
    delays = transfer_delays(network, linked=True)
    forest = fapt(network)

    took = [2 * Fraction(slowest(tree.reduce_parent, delays)) for tree in forest.trees]
    total = sum(1 / delay for delay in took)
    for weight, delay in zip(forest.policy(0).weights, took, strict=True):
        assert abs(weight - 1000 / delay / total) < 1


def test_ranks_without_a_path_are_named():
    network = Network.uniform(4)
    west_to_east = tuple(
        link for link in network.links if link.source < 2 or link.target >= 2
    )  # nothing leads back

    with pytest.raises(Unreachable, match=r"^there is no path from ranks 2, 3 to rank 0$"):
        fastest_paths(replace(network, links=west_to_east), Rank(0))
    with pytest.raises(Unreachable, match=r"^there is no path from rank 3 to ranks 0, 1$"):
        fastest_paths(replace(network, links=west_to_east), Rank(3))


@pytest.mark.parametrize("roots", [-1, 4])
def test_an_impossible_number_of_roots_is_refused(roots: int):
    with pytest.raises(
        UsageError, match=f"^{roots} roots: expected 1 to 3, as many as there are ranks, or 0"
    ):
        fapt(Network.uniform(3), roots)


@pytest.mark.parametrize("root", [-1, 3])
def test_a_root_that_is_no_rank_is_refused(root: int):
    with pytest.raises(UsageError, match=f"^root {root}: expected a rank from 0 to 2$"):
        fastest_paths(Network.uniform(3), Rank(root))
