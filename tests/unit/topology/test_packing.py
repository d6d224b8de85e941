"""Packings, the trees that are grown for them under prices, and their shares of whole chunks."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.errors import Unreachable
from netstorm.lab.testing.strategies import networks
from netstorm.topology import Network, Rank, Tree
from netstorm.topology import packing as spanning
from netstorm.topology.lower_bound import latency_bound
from netstorm.topology.network import generate
from netstorm.topology.packing import (
    ResourcePrices,
    arborescence,
    best_packing,
    centred,
    grow,
    packing,
    packings,
    path_delays,
    whole_chunks,
)
from netstorm.topology.policy import Options
from netstorm.topology.prediction import predict
from netstorm.topology.resources import Resources, fluid_time, optimum, with_look_ahead
from netstorm.topology.tree import transfer_delays, tree_delay

# --------------------------------------------------------------------------------------------------- packing
# Packings against the optimum, and what the study behind them reached.


MB = 1_000_000
LARGE = 244 * MB


def of_optimum(network, nbytes=LARGE, chunk_bytes=MB):
    policy = packing(network, tensor_bytes=nbytes, chunk_bytes=chunk_bytes).policy(0)
    return optimum(network, nbytes).seconds / fluid_time(Resources.of(network), policy, nbytes)


@given(
    networks(2, 7, symmetric=None, capped=True, routing=None),
    st.sampled_from([1000, 4 * MB, LARGE]),
    st.sampled_from([64 * 1024, MB]),
)
def test_no_packing_is_faster_than_the_optimum(network, nbytes, chunk_bytes):
    assert of_optimum(network, nbytes, chunk_bytes) <= 1 + 1e-6


# The issue asks for 0.96, 0.99, 0.99 and 0.90 as means over 30 seeds (benchmarks/topologies.py).
@pytest.mark.parametrize(
    ("family", "least"), [("mesh", 0.96), ("internet2", 0.98), ("cloud", 0.99), ("asymmetric", 0.9)]
)
def test_a_packing_comes_near_the_optimum(family, least):
    assert statistics.fmean(of_optimum(generate(family, 9, seed)) for seed in range(3)) >= least


def test_in_a_mesh_of_32_nodes_too_if_delays_are_nothing_beside_the_tensor():
    assert of_optimum(generate("mesh", 32, 0), 100 * LARGE) >= 0.94


def test_with_chunks_of_which_a_link_carries_few_it_is_nearly_as_good():
    # 244 MB among 32 nodes: a link carries 60 chunks, and the shares give up some width for shallow trees.
    assert of_optimum(generate("mesh", 32, 0), chunk_bytes=256 * 1024) >= 0.9


@pytest.mark.parametrize(("family", "least"), [("mesh", 0.82), ("internet2", 0.88), ("cloud", 0.75)])
def test_chunks_that_wait_for_each_other_and_for_latency_cost_little(family, least):
    reached = []
    for seed in range(3):
        network = generate(family, 9, seed)
        policy = packing(network, tensor_bytes=LARGE, chunk_bytes=MB).policy(0)
        took = predict(network, policy, [LARGE], chunk_bytes=MB).seconds
        reached.append(optimum(network, LARGE).seconds / took)
    assert statistics.fmean(reached) >= least


@settings(max_examples=10)
@given(networks(2, 6, symmetric=None, capped=True, routing=None))
def test_the_same_question_has_the_same_answer(network):
    one, other = (packing(network, tensor_bytes=LARGE, chunk_bytes=MB) for _ in range(2))
    assert one == other


@pytest.mark.parametrize("family", ["mesh", "asymmetric"])
def test_a_small_tensor_gets_fast_trees_and_a_large_one_wide_ones(family):
    network = generate(family, 9, 1)
    small = packing(network, tensor_bytes=50_000, chunk_bytes=MB)
    large = packing(network, tensor_bytes=LARGE, chunk_bytes=MB)
    assert len(small.trees) < 4
    assert len(large.trees) > 9
    delays = transfer_delays(network, 50_000)
    mean = [statistics.fmean(tree_delay(tree, delays) for tree in one.trees) for one in (small, large)]
    assert mean[0] < mean[1]


def test_where_links_are_equal_both_ways_one_tree_serves_both_phases():
    for tree in packing(generate("mesh", 7, 0), tensor_bytes=LARGE).trees:
        assert tree.reduce_parent == tree.broadcast_parent
    apart = packing(generate("asymmetric", 7, 0), tensor_bytes=LARGE).trees
    assert any(tree.reduce_parent != tree.broadcast_parent for tree in apart)


@pytest.mark.parametrize("family", ["mesh", "asymmetric", "cloud"])
def test_of_several_packings_the_one_is_taken_that_is_predicted_to_be_the_fastest(family):
    def seconds(forest):
        policy = with_look_ahead(network, forest, MB).policy(0)
        return predict(network, policy, options.tensors, chunk_bytes=MB).seconds

    options = Options(tensors=(30 * MB,), chunk_bytes=MB)
    gained = []
    for seed in range(3):
        network = generate(family, 7, seed)
        found = best_packing(network, options)
        assert found.seconds == pytest.approx(seconds(found.forest))
        two = packings(network, tensor_bytes=30 * MB, chunk_bytes=MB)
        assert len(two) == 2
        assert found.seconds <= min(map(seconds, two))
        gained.append(seconds(two[0]) / found.seconds)
    assert max(gained) > 1.01


def test_the_best_packing_is_the_same_each_time_and_follows_the_seed():
    network = generate("mesh", 6, 1)
    one, again, other = (
        best_packing(network, Options(tensors=(30 * MB,), chunk_bytes=MB, seed=seed)).forest
        for seed in (0, 0, 1)
    )
    assert one == again
    assert one != other


def test_one_packing_is_formed_where_predictions_would_take_long():
    options = Options(tensors=(30 * MB,), chunk_bytes=MB)
    assert best_packing(generate("mesh", 13, 0), options).seconds is None
    assert best_packing(generate("mesh", 5, 0), Options(tensors=(300 * MB,), chunk_bytes=MB)).seconds is None
    assert best_packing(generate("mesh", 5, 0), replace(options, known=False)).seconds is None


@pytest.mark.parametrize("family", ["mesh", "internet2", "cloud"])
def test_no_resource_is_loaded_more_by_trees_both_ways_than_those_that_are_looked_at(family):
    ground = ResourcePrices(generate(family, 7, 3), LARGE, MB)
    assert len(ground.limits) <= len(ground.seconds) / 2
    prices = ground.edge_prices(ground.seconds)
    for root in range(7):
        parents = grow(prices, ground.both_delays, root, 0.1)
        nodes = [node for node in range(7) if parents[node] >= 0]
        above = parents[nodes]
        load = ground.loads(np.append(nodes, above), np.append(above, nodes))
        assert load[ground.limits].max() == pytest.approx(load.max())


def test_shares_of_a_few_chunks_are_whole_ones():
    forest = packing(generate("mesh", 9, 0), tensor_bytes=30 * MB, chunk_bytes=MB)
    assert forest.whole
    assert sum(forest.policy(0).weights) == 30


def test_one_rank_alone_is_its_own_tree():
    assert packing(Network.uniform(1), tensor_bytes=MB).trees[0].size == 1


def test_ranks_without_a_path_are_named():
    cut = Network.uniform(3)
    cut = replace(cut, links=tuple(link for link in cut.links if link.source != 2))
    with pytest.raises(Unreachable, match=r"ranks \(2,\)"):
        packing(cut, tensor_bytes=MB)


# ---------------------------------------------------------------------------------------------- whole chunks
# Whole chunks against plain rounding, and where the best answer is known.


def drawn(seed, *, equal=False):
    """Return loads, delays, shares and a number of chunks."""
    draw = np.random.default_rng(seed)
    trees, resources = int(draw.integers(1, 20)), int(draw.integers(1, 40))
    loads = draw.random((trees, resources)) * (draw.random((trees, resources)) < 0.5) + 1e-3
    shares = np.full(trees, 1.0) if equal else draw.random(trees) + 1e-3
    return loads, draw.random(trees) * 0.1, shares / shares.sum(), int(draw.integers(1, 200))


def rounded(shares, chunks):
    """Round by largest remainders: what one does without thinking of links."""
    counts = np.floor(shares * chunks).astype(int)
    order = np.argsort(counts - shares * chunks)
    counts[order[: chunks - counts.sum()]] += 1
    return counts


def seconds(counts, loads, delays):
    total = counts.sum()
    return (counts @ loads / total).max() + counts @ delays / total


@given(st.integers(0, 100_000), st.booleans())
def test_every_chunk_gets_one_tree(seed, equal):
    loads, delays, shares, chunks = drawn(seed, equal=equal)
    counts = whole_chunks(loads, delays, shares, chunks)
    assert counts.sum() == chunks
    assert counts.min() >= 0


@given(st.integers(0, 100_000), st.booleans())
def test_it_is_no_slower_than_plain_rounding(seed, equal):
    loads, delays, shares, chunks = drawn(seed, equal=equal)
    found = whole_chunks(loads, delays, shares, chunks)
    # What is minimised is a soft maximum, above the real one by up to this part; one case in 1000 uses it.
    slack = np.log(loads.shape[1]) / 40
    plain = seconds(rounded(shares, chunks), loads, delays)
    assert seconds(found, loads, delays) <= (1 + slack) * plain + 1e-12


def test_a_chunk_too_many_goes_where_there_is_room_for_it():
    # Two trees of equal share, one over a link half as fast: 3 chunks are 2 and 1, and 9 are 6 and 3.
    loads = np.array([[1.0, 0.0], [0.0, 2.0]])
    assert list(whole_chunks(loads, np.zeros(2), np.array([0.5, 0.5]), 3)) == [2, 1]
    assert list(whole_chunks(loads, np.zeros(2), np.array([2 / 3, 1 / 3]), 9)) == [6, 3]


def test_of_equally_wide_trees_the_fast_one_gets_the_single_chunk():
    loads = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert list(whole_chunks(loads, np.array([0.5, 0.1]), np.array([0.5, 0.5]), 1)) == [0, 1]


@pytest.mark.parametrize("seed", range(3))
def test_the_same_question_has_the_same_whole_chunks(seed):
    assert np.array_equal(whole_chunks(*drawn(seed)), whole_chunks(*drawn(seed)))


# -------------------------------------------------------------------------------------------------- spanning
# Trees grown under prices, against networkx and brute force.


INF = float("inf")


def drawn_spanning(size, seed, *, symmetric, missing=0.0, most=12):
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
    prices = drawn_spanning(size, seed, symmetric=True, missing=missing)
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
    delays = drawn_spanning(size, seed, symmetric=False, missing=missing)
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
    prices = drawn_spanning(size, seed, symmetric=False, missing=missing)
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
    delays = drawn_spanning(size, seed, symmetric=True)
    tree: nx.Graph[int] = nx.Graph()
    tree.add_nodes_from(range(size))
    tree.add_weighted_edges_from((*edge, delays[tuple(edge)]) for edge in map(tuple, edges(parents)))
    away = dict(nx.all_pairs_dijkstra_path_length(tree))

    root, turned = centred(parents, delays)

    assert spans(turned, root)
    assert edges(turned) == edges(parents)
    assert max(away[root].values()) == min(max(found.values()) for found in away.values())
    assert list(path_delays(turned, delays)) == [away[root][node] for node in range(size)]


@given(st.integers(1, 5), st.integers(0, 10_000), st.sampled_from([0.0, 0.5]))
def test_no_tree_of_directed_edges_is_cheaper_by_brute_force(size, seed, missing):
    prices = drawn_spanning(size, seed, symmetric=False, missing=missing)
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
    prices = drawn_spanning(size, seed, symmetric=False, missing=missing, most=most)
    graph: nx.DiGraph[int] = nx.DiGraph()
    for one, other in itertools.permutations(range(size), 2):
        if other != seed and prices[one, other] < INF:
            graph.add_edge(one, other, weight=prices[one, other])
    found = arborescence(prices, seed)
    assert spans(found, seed)
    assert cost(found, prices) == nx.minimum_spanning_arborescence(graph).size("weight")


def test_the_prices_that_are_given_stay_as_they_are():
    prices = drawn_spanning(9, 1, symmetric=False)
    before = prices.copy()
    arborescence(prices, 0)
    grow(prices, np.ones((9, 9)), 0, 1.0)
    assert np.array_equal(prices, before)


@pytest.mark.parametrize(("family", "least"), [("mesh", 0.8), ("cloud", 0.55)])
def test_with_very_many_nodes_fewer_sweeps_or_trees_are_as_good(family, least):
    network = generate(family, 140, 1)
    resources, tensor = Resources.of(network), 1e15  # latencies are no part of it
    together = sum(node.egress or 0.0 for node in network.nodes) or resources.pair_capacities.sum()
    cuts = max(latency_bound(network, tensor), 2 * 139 * 8 * tensor / together)
    policy = packing(network, tensor_bytes=100 * MB).policy(0)
    assert cuts / fluid_time(resources, policy, tensor) >= least
