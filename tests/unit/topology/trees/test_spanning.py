"""Trees grown under prices, against networkx and brute force."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.topology import Rank, Tree
from netstorm.topology import packing as spanning
from netstorm.topology.packing import arborescence, centred, grow, path_delays

INF = float("inf")


def drawn(size, seed, *, symmetric, missing=0.0, most=12):
    """Return (N, N) whole prices with many ties; inf where there is no edge, but rank 0 to 1 to 2 ... is."""
    draw = random.Random(seed)
    prices = np.full((size, size), INF)
    for one, other in itertools.permutations(range(size), 2):
        if abs(one - other) == 1 or draw.random() >= missing:
            prices[one, other] = draw.randint(0, most)
    return np.minimum(prices, prices.T) if symmetric else prices


def cost(parents, prices):
    return sum(prices[above, node] for node, above in enumerate(parents) if above >= 0)


def spans(parents, root):
    """Return whether it is a tree with this root; `Tree` checks that, or raises."""
    return Tree.undirected(Rank(root), tuple(map(int, parents))).root == root


def edges(parents):
    return {frozenset((node, int(above))) for node, above in enumerate(parents) if above >= 0}


cases = given(st.integers(1, 9), st.integers(0, 10_000), st.sampled_from([0.0, 0.4, 0.8]))


@cases
def test_grown_without_regard_to_delays_it_is_a_minimum_spanning_tree(size, seed, missing):
    prices = drawn(size, seed, symmetric=True, missing=missing)
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(size))
    graph.add_weighted_edges_from(
        (one, other, prices[one, other])
        for one, other in itertools.combinations(range(size), 2)
        if prices[one, other] < INF
    )
    root = seed % size
    parents = grow(prices, np.ones((size, size)), root, 0.0)
    assert spans(parents, root)
    assert cost(parents, prices) == nx.minimum_spanning_tree(graph).size("weight")


@cases
def test_grown_without_regard_to_prices_all_its_paths_are_shortest_ones(size, seed, missing):
    delays = drawn(size, seed, symmetric=False, missing=missing)
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_weighted_edges_from(
        (one, other, delays[one, other])
        for one, other in itertools.permutations(range(size), 2)
        if delays[one, other] < INF
    )
    root = seed % size
    prices = np.where(np.isfinite(delays), 0.0, INF)
    parents = grow(prices, np.where(np.isfinite(delays), delays, 0.0), root, 1.0)
    assert spans(parents, root)
    shortest = nx.single_source_dijkstra_path_length(graph, root)
    assert list(path_delays(parents, delays)) == [shortest[node] for node in range(size)]


@cases
def test_few_nodes_get_the_tree_that_many_would(size, seed, missing):
    prices = drawn(size, seed, symmetric=False, missing=missing)
    delays = np.random.default_rng(seed).random((size, size))
    few = grow(prices, delays, seed % size, 0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spanning, "_FEW", 0)
        many = grow(prices, delays, seed % size, 0.5)
    assert few.tolist() == many.tolist()


@given(st.integers(2, 12), st.integers(0, 10_000))
def test_the_more_a_delay_costs_the_shallower_the_tree_between_the_two(size, seed):
    draw = np.random.default_rng(seed)
    prices, delays = draw.random((2, size, size))
    cheap, shallow = grow(prices, delays, 0, 0.0), grow(prices, delays, 0, 1e6)
    assert max(path_delays(shallow, delays)) <= max(path_delays(cheap, delays)) + 1e-9


@given(st.integers(1, 12), st.integers(0, 10_000))
def test_the_centre_is_the_rank_from_which_the_farthest_is_nearest(size, seed):
    draw = random.Random(seed)
    parents = np.array([-1, *(draw.randrange(node) for node in range(1, size))])
    delays = drawn(size, seed, symmetric=True)
    tree: nx.Graph[int] = nx.Graph()
    tree.add_nodes_from(range(size))
    tree.add_weighted_edges_from((*edge, delays[tuple(edge)]) for edge in map(tuple, edges(parents)))
    away = dict(nx.all_pairs_dijkstra_path_length(tree))

    root, turned = centred(parents, delays)

    assert spans(turned, root)
    assert edges(turned) == edges(parents)
    assert max(away[root].values()) == min(max(found.values()) for found in away.values())
    assert list(path_delays(turned, delays)) == [away[root][node] for node in range(size)]


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(0, 10_000), st.sampled_from([0.0, 0.5]))
def test_no_tree_of_directed_edges_is_cheaper_by_brute_force(size, seed, missing):
    prices = drawn(size, seed, symmetric=False, missing=missing)
    root = seed % size
    others = [node for node in range(size) if node != root]
    least = INF
    for above in itertools.product(range(size), repeat=size - 1):
        parents = dict(zip(others, above, strict=True))
        if all(_reaches(parents, node, root) for node in others):
            least = min(least, sum(prices[parents[node], node] for node in others))
    found = arborescence(prices, root)
    assert spans(found, root)
    assert cost(found, prices) == least


def _reaches(parents, node, root):
    for _ in range(len(parents) + 1):
        if node == root:
            return True
        node = parents[node]
    return False


@pytest.mark.parametrize(("size", "most"), [(8, 3), (12, 30), (30, 5), (30, 1000)])
@pytest.mark.parametrize("missing", [0.0, 0.7])
@pytest.mark.parametrize("seed", range(3))
def test_no_tree_of_directed_edges_is_cheaper_by_networkx(size, most, missing, seed):
    prices = drawn(size, seed, symmetric=False, missing=missing, most=most)
    graph: nx.DiGraph[int] = nx.DiGraph()
    for one, other in itertools.permutations(range(size), 2):
        if other != seed and prices[one, other] < INF:
            graph.add_edge(one, other, weight=prices[one, other])
    found = arborescence(prices, seed)
    assert spans(found, seed)
    assert cost(found, prices) == nx.minimum_spanning_arborescence(graph).size("weight")


def test_the_prices_that_are_given_stay_as_they_are():
    prices = drawn(9, 1, symmetric=False)
    before = prices.copy()
    arborescence(prices, 0)
    grow(prices, np.ones((9, 9)), 0, 1.0)
    assert np.array_equal(prices, before)
