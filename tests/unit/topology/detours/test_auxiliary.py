"""Auxiliary paths: the paper's Algorithm 3, and detours of one hop."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.lab.testing.strategies import networks
from netstorm.topology import SCHEMES, Link, Network, Node, Rank, Routing, fapt, form_policy, star
from netstorm.topology.detours import Path, auxiliary_paths, delivery, detours


def distinct(size: int, chance: float, seed: int) -> Network:
    """Return an overlay in which no two paths take equally long."""
    rng = random.Random(seed)
    order = list(range(size))
    rng.shuffle(order)
    edges = {(order[i - 1], order[i]) for i in range(size)}
    edges |= {(i, j) for i in range(size) for j in range(size) if i != j and rng.random() < chance}
    return Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(size)),
        links=tuple(
            Link(source=Rank(i), target=Rank(j), rate=rng.uniform(20e6, 155e6), latency=rng.uniform(0, 0.05))
            for i, j in edges
        ),
    )


def hops(path: Path) -> set[tuple[int, int]]:
    return set(pairwise(path))


def graph_of(network: Network) -> nx.DiGraph[int]:
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(network.ranks)
    for link in network.links:
        graph.add_edge(link.source, link.target, weight=delivery(network, (link.source, link.target)))
    return graph


@pytest.mark.parametrize("seed", range(8))
def test_the_papers_algorithm_3_step_by_step_finds_the_same_paths(seed: int):
    network = distinct(3 + seed, 0.4, seed)
    graph = graph_of(network)
    expected: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    while graph.edges:
        found = [
            tuple(path)
            for _, paths in nx.all_pairs_dijkstra_path(graph)
            for path in paths.values()
            if len(path) > 1
        ]
        for path in found:
            expected.setdefault((path[0], path[-1]), []).append(path)
            graph.remove_edges_from(pairwise(path))

    paths = auxiliary_paths(network)

    assert {pair: list(found) for pair, found in paths.items() if found} == expected


@given(networks(symmetric=None, capped=True, routing=None))
def test_paths_of_a_pair_share_no_link_and_each_is_slower_than_the_one_before(network: Network):
    graph = graph_of(network)
    links = set(graph.edges)
    for (source, target), paths in auxiliary_paths(network).items():
        took = [delivery(network, path) for path in paths]
        assert took[0] == pytest.approx(nx.dijkstra_path_length(graph, source, target))
        assert all(before <= after * (1 + 1e-6) for before, after in pairwise(took))
        assert sum(len(hops(path)) for path in paths) == len(set().union(*map(hops, paths)))
        for path in paths:
            assert (path[0], path[-1]) == (source, target)
            assert len(set(path)) == len(path)
            assert hops(path) <= links


@settings(max_examples=60)
@given(
    networks(symmetric=None, capped=True, routing=None),
    st.sampled_from(sorted(set(SCHEMES) & {"star", "sharded", "balanced", "mst", "hierarchical", "fapt"})),
    st.integers(0, 3),
)
def test_detours_of_a_hop_avoid_its_route_and_each_other(network: Network, scheme: str, most: int):
    trees = form_policy(network, scheme).trees
    graph = graph_of(network)

    found = detours(network, trees, most=most)

    wanted = {(rank, up) for tree in trees for rank, up in enumerate(tree.reduce_parent) if up >= 0}
    wanted |= {(up, rank) for tree in trees for rank, up in enumerate(tree.broadcast_parent) if up >= 0}
    assert set(found) == wanted
    for (source, target), paths in found.items():
        rest = graph.copy()
        rest.remove_edges_from((link.source, link.target) for link in network.route(source, target))
        assert len(paths) <= most
        for path in paths:
            assert delivery(network, path) == pytest.approx(nx.dijkstra_path_length(rest, source, target))
            assert (path[0], path[-1]) == (source, target)
            rest.remove_edges_from(pairwise(path))
        assert len(paths) == most or not nx.has_path(rest, source, target)


def test_a_mesh_of_equal_links_has_detours_where_algorithm_3_leaves_none():
    network = Network.uniform(4, latency=0.01)

    assert auxiliary_paths(network)[Rank(1), Rank(0)] == ((1, 0),)
    assert set(detours(network, star(network).trees)[Rank(1), Rank(0)]) == {(1, 2, 0), (1, 3, 0)}


def test_of_equally_fast_paths_the_one_with_fewer_hops_comes_first():
    network = Network.uniform(3, rate=100e6)
    half_as_fast = tuple(
        replace(link, rate=50e6) if {link.source, link.target} == {0, 2} else link for link in network.links
    )

    paths = auxiliary_paths(replace(network, links=half_as_fast))

    assert paths[Rank(0), Rank(2)][0] == (0, 2)


def test_routed_pairs_that_share_a_link_are_no_detours_of_each_other():
    line = tuple(
        Link(source=Rank(source), target=Rank(target), rate=100e6)
        for i, j in ((0, 1), (1, 2))
        for source, target in ((i, j), (j, i))
    )
    network = replace(Network.uniform(3), links=line, routing=Routing.UNDERLAY)

    found = detours(network, star(network, Rank(0)).trees)

    assert found[Rank(2), Rank(0)] == ()


def test_a_single_node_has_no_paths():
    network = Network.uniform(1)

    assert auxiliary_paths(network) == {}
    assert detours(network, fapt(network).trees) == {}
