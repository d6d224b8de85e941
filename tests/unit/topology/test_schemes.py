"""The schemes that need no search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.errors import Unreachable, UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.topology import (
    Forest,
    Link,
    Network,
    Node,
    Rank,
    Routing,
    Tree,
    balanced,
    cheapest,
    fapt,
    fastest_paths,
    form_policy,
    hierarchical,
    k_ary,
    load_network,
    mst,
    ring,
    sharded,
    star,
    transfer_delays,
)
from netstorm.topology.network import generate
from netstorm.topology.resources import Resources, fluid_time, pair_loads
from netstorm.topology.schemes import groups_of, ring_trees
from netstorm.topology.searched_schemes import ring_best
from tests.unit.topology.spanning_trees import all_trees, slowest


def one_way(size: int, *links: tuple[int, int], rate: float = 100e6) -> Network:
    """Return a network with these links alone."""
    return replace(
        Network.uniform(size),
        links=tuple(Link(source=Rank(source), target=Rank(target), rate=rate) for source, target in links),
    )


def overlay(size: int, *edges: tuple[int, int]) -> Network:
    """Return a network with links both ways between these pairs alone."""
    return one_way(size, *(pair for i, j in edges for pair in ((i, j), (j, i))))


def with_rates(network: Network, rates: dict[tuple[int, int], float]) -> Network:
    """Return the network with other rates on some links, both ways."""
    return replace(
        network,
        links=tuple(
            replace(
                link,
                rate=rates.get((min(link.source, link.target), max(link.source, link.target)), link.rate),
            )
            for link in network.links
        ),
    )


def hops(network: Network, root: Rank, *, up: bool) -> dict[int, int]:
    """Return how many links each rank is away from the root, on the way up or down."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(network.ranks)
    graph.add_edges_from((link.source, link.target) for link in network.links)
    away: dict[int, int] = nx.single_source_shortest_path_length(graph.reverse() if up else graph, root)
    return away


def assert_as_shallow_as_links_allow(network: Network, tree: Tree) -> None:
    for parents, away in (
        (tree.reduce_parent, hops(network, tree.root, up=True)),
        (tree.broadcast_parent, hops(network, tree.root, up=False)),
    ):
        for rank, parent in enumerate(parents):
            assert parent < 0 or away[rank] == away[parent] + 1


@pytest.mark.parametrize(
    ("form", "message"),
    [
        *(
            (lambda hub=hub: star(Network.uniform(3), Rank(hub)), f"hub {hub}: expected a rank from 0 to 2$")
            for hub in (-2, 3)
        ),
        *(
            (
                lambda roots=roots: fapt(Network.uniform(3), roots),
                f"{roots} roots: expected 1 to 3, as many as",
            )
            for roots in (-1, 4)
        ),
        *(
            (lambda root=root: fastest_paths(Network.uniform(3), Rank(root)), f"root {root}: expected a rank")
            for root in (-1, 3)
        ),
        *(
            (
                lambda degree=degree: balanced(Network.uniform(3), degree),
                f"degree {degree}: expected at least 1",
            )
            for degree in (0, -2)
        ),
    ],
)
def test_what_no_tree_can_have_is_refused(form: Callable[[], Forest], message: str):
    with pytest.raises(UsageError, match=f"^{message}"):
        form()


# ------------------------------------------------------------------------------------------------------ star
# Stars: the best hub, and what happens where not everybody has a link to it.


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
    nearer = [
        replace(link, latency=0.01) if 2 in (link.source, link.target) else link for link in network.links
    ]
    assert star(replace(network, links=tuple(nearer))).trees[0].root == 2


def test_a_hub_that_is_asked_for_is_taken():
    forest = star(Network.uniform(4), Rank(3))

    assert forest.trees[0].root == 3
    assert forest.trees[0].reduce_parent == (3, 3, 3, -1)
    assert forest.shares == (1.0,)


@given(networks(symmetric=None), st.data())
def test_in_an_overlay_everybody_is_as_few_hops_from_the_hub_as_can_be(network: Network, data: st.DataObject):
    hub = data.draw(st.none() | st.sampled_from(network.ranks))
    (tree,) = star(network, hub).trees
    assert hub in (None, tree.root)
    assert_as_shallow_as_links_allow(network, tree)


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
    network = with_rates(
        overlay(4, (0, 1), (0, 2), (1, 2), (1, 3), (2, 3)),
        {(0, 1): 20e6, (0, 2): 20e6, (1, 2): 20e6, (1, 3): 20e6},
    )
    (tree,) = star(network, Rank(0)).trees
    assert tree.reduce_parent == tree.broadcast_parent == (-1, 0, 0, 2)


# ------------------------------------------------------------------------------------------------------ ring
# Rings: what their trees put on links, and where there is none.


def loads(network: Network, forest: Forest) -> dict[tuple[int, int], float]:
    resources = Resources.of(network)
    volumes = pair_loads(resources, forest.trees, forest.shares)
    return {pair: load for pair, load in zip(resources.pairs, volumes, strict=True) if load}


@given(st.permutations(range(9)), st.integers(2, 9))
def test_every_hop_of_a_ring_carries_the_same_and_nothing_else_is_sent(order: list[int], size: int):
    around = [Rank(rank) for rank in order if rank < size]
    forest = Forest(trees=ring_trees(around), shares=(1.0,) * size, reason="")

    assert loads(Network.uniform(size), forest) == pytest.approx(
        {(around[i - 1], around[i]): 2 * (size - 1) / size for i in range(size)}
    )


def test_a_plain_ring_is_in_order_of_rank():
    forest = ring(Network.uniform(4))

    assert set(loads(Network.uniform(4), forest)) == {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert [tree.root for tree in forest.trees] == [0, 1, 2, 3]
    assert forest.trees[1].reduce_parent == (1, -1, 3, 0)
    assert forest.trees[1].broadcast_parent == (3, -1, 1, 2)


def test_a_ring_in_order_of_rank_names_the_links_that_it_lacks():
    network = overlay(4, (0, 1), (1, 2), (1, 3), (0, 2), (2, 3))

    with pytest.raises(Unreachable, match=r"^a ring in order of rank needs .*: 3→0; expected .*ring-best"):
        ring(network)

    assert {tree.root for tree in ring_best(network).trees} == set(network.ranks)


@given(networks(2, 6, symmetric=None, capped=True, routing=Routing.UNDERLAY))
def test_no_order_of_few_ranks_is_faster_than_the_best_one(network: Network):
    resources = Resources.of(network)
    nbytes = 1e12  # so that latency counts for nothing

    def seconds(forest: Forest) -> float:
        return fluid_time(resources, forest.policy(0), nbytes)

    orders = [(Rank(0), *rest) for rest in itertools.permutations(network.ranks[1:])]
    best = min(
        seconds(Forest(trees=ring_trees(order), shares=(1.0,) * network.size, reason="")) for order in orders
    )
    assert seconds(ring_best(network, tensor_bytes=nbytes)) == pytest.approx(best, rel=1e-2)


@pytest.mark.parametrize("family", ["mesh", "internet2", "cloud", "asymmetric"])
def test_annealing_comes_within_a_tenth_of_the_best_order(monkeypatch: pytest.MonkeyPatch, family: str):
    for seed in range(3):
        network = generate(family, 8, seed)
        resources = Resources.of(network)
        exact = ring_best(network)
        with monkeypatch.context() as patch:
            patch.setattr("netstorm.topology.searched_schemes.EXACT_NODES", 1)
            annealed = ring_best(network, seed=seed)
        best = fluid_time(resources, exact.policy(0), 1e8)
        assert fluid_time(resources, annealed.policy(0), 1e8) <= 1.1 * best


def test_the_same_seed_gives_the_same_order():
    network = generate("mesh", 12, 5)

    assert ring_best(network, seed=3) == ring_best(network, seed=3)


@settings(max_examples=12)
@given(st.permutations(range(14)), st.sets(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=6))
def test_a_ring_hidden_in_an_overlay_is_found(order: list[int], more: set[tuple[int, int]]):
    edges = {tuple(sorted((order[i - 1], order[i]))) for i in range(14)}
    edges |= {(min(pair), max(pair)) for pair in more if pair[0] != pair[1]}
    network = overlay(14, *((i, j) for i, j in edges))

    used = loads(network, ring_best(network))

    assert len(used) == 14
    assert set(used) <= set(network.pairs())


def test_a_rank_at_the_end_of_one_link_is_in_no_ring():
    network = overlay(5, (0, 1), (1, 2), (2, 0), (2, 3), (3, 1), (3, 4))

    with pytest.raises(Unreachable, match=r"^there is no ring through all ranks: rank 4 with links to one "):
        ring_best(network)


@pytest.mark.parametrize(("leaves", "certainty"), [(4, "there is no ring"), (8, "no ring was found")])
def test_an_overlay_without_a_ring_is_refused_with_what_is_missing(leaves: int, certainty: str):
    hubs = [(hub, leaf) for hub in (0, 1) for leaf in range(2, leaves + 2)]

    with pytest.raises(Unreachable, match=rf"^{certainty} through all ranks .* lacks the links \d+→\d+"):
        ring_best(overlay(leaves + 2, *hubs))


# ------------------------------------------------------------------------------------------------------- mst
# The tree of the fastest links, against networkx and brute force.


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


def test_where_links_lead_one_way_the_slowest_link_of_each_phase_is_as_fast_as_can_be():
    network = one_way(3, (0, 1), (1, 2), (2, 0))
    slow_back = Link(source=Rank(2), target=Rank(1), rate=50e6)
    (tree,) = mst(replace(network, links=(*network.links, slow_back))).trees
    assert tree.root == 0
    assert tree.reduce_parent == (-1, 2, 0)
    assert tree.broadcast_parent == (-1, 0, 1)


def test_ranks_without_a_path_are_named():
    with pytest.raises(Unreachable, match=r"^there is no path to rank 0 for ranks 1, 2$"):
        mst(one_way(3, (0, 1), (0, 2)))
    with pytest.raises(Unreachable, match=r"^there is no path to rank 0 for ranks 2, 3$"):
        balanced(overlay(4, (0, 1), (2, 3)))
    # Nothing leads back from the east.
    east = one_way(4, *((i, j) for i in range(4) for j in range(4) if i != j and (i < 2 or j >= 2)))
    with pytest.raises(Unreachable, match=r"^there is no path from ranks 2, 3 to rank 0$"):
        fastest_paths(east, Rank(0))
    with pytest.raises(Unreachable, match=r"^there is no path from rank 3 to ranks 0, 1$"):
        fastest_paths(east, Rank(3))


# ------------------------------------------------------------------------------------------------------ fapt
# Fastest aggregation path trees against brute force over all trees.


NINE_NODES = "examples/networks/internet2.yaml"


def backwards(delays: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    return {(target, source): delay for (source, target), delay in delays.items()}


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
    assert [tree.root for tree in fapt(Network.uniform(4)).trees] == [0, 1, 2, 3]  # all, unless told how many


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
    tree = fastest_paths(with_rates(Network.uniform(3, rate=100e6), {(0, 2): 50e6}), Rank(0))
    assert tree.reduce_parent == tree.broadcast_parent == (-1, 0, 0)


def test_the_example_network_gets_the_shares_that_its_delays_imply():
    network = load_network(NINE_NODES)
    delays = transfer_delays(network, linked=True)
    forest = fapt(network)

    took = [2 * Fraction(slowest(tree.reduce_parent, delays)) for tree in forest.trees]
    total = sum(1 / delay for delay in took)
    for weight, delay in zip(forest.policy(0).weights, took, strict=True):
        assert abs(weight - 1000 / delay / total) < 1


# -------------------------------------------------------------------------------------------------- balanced
# Balanced trees, and what becomes of them where links are missing.


@given(networks(symmetric=None, routing=Routing.UNDERLAY), st.integers(1, 10))
def test_where_all_may_talk_parents_are_as_in_a_heap(network: Network, degree: int):
    (tree,) = balanced(network, degree).trees

    expected = tuple((rank - 1) // degree if rank else -1 for rank in network.ranks)
    assert tree.root == 0
    assert tree.reduce_parent == tree.broadcast_parent == expected


@given(st.integers(2, 12), st.integers(1, 3))
def test_a_line_of_ranks_is_a_tree_of_any_degree(size: int, degree: int):
    network = overlay(size, *((rank, rank + 1) for rank in range(size - 1)))

    (tree,) = balanced(network, degree).trees

    assert tree.reduce_parent == tuple(range(-1, size - 1))


def test_where_links_are_missing_each_rank_takes_those_it_is_linked_with():
    network = overlay(7, (0, 3), (0, 5), (0, 1), (3, 2), (5, 4), (1, 3), (1, 6), (6, 5))

    forest = balanced(network)

    assert forest.trees[0].reduce_parent == (-1, 0, 3, 0, 5, 6, 1)
    assert forest.reason == "balanced: a tree of degree 2 in order of rank"


def test_leaves_of_a_crowded_hub_go_below_it_all_the_same():
    network = overlay(6, (0, 1), *((1, leaf) for leaf in range(2, 6)))

    forest = balanced(network, 2)

    assert forest.trees[0].reduce_parent == (-1, 0, 1, 1, 1, 1)
    assert (
        forest.reason
        == "balanced: a tree of degree 2 in order of rank; for want of links a rank has 4 children"
    )


@given(networks(symmetric=True), st.integers(1, 4))
def test_on_links_that_lead_both_ways_both_phases_take_the_same_edges(network: Network, degree: int):
    (tree,) = balanced(network, degree).trees

    assert tree.reduce_parent == tree.broadcast_parent


def test_a_ring_of_links_that_lead_one_way_is_gone_around_once_up_and_once_down():
    (tree,) = balanced(one_way(3, (0, 1), (1, 2), (2, 0))).trees
    assert tree.reduce_parent == (-1, 2, 0)
    assert tree.broadcast_parent == (-1, 0, 1)


@given(networks(symmetric=None, routing=Routing.UNDERLAY), st.integers(1, 7))
def test_k_ary_trees_are_the_balanced_tree_in_order_from_each_root(network: Network, degree: int):
    forest = k_ary(network, degree)

    assert forest.shares == (1.0,) * network.size
    for root, tree in enumerate(forest.trees):
        order = [(root + place) % network.size for place in range(network.size)]
        above = {rank: order[(place - 1) // degree] for place, rank in enumerate(order) if place}
        assert tree.reduce_parent == tree.broadcast_parent
        assert tree.reduce_parent == tuple(above.get(rank, -1) for rank in range(network.size))


def test_fewer_k_ary_trees_than_ranks_have_roots_that_are_spread():
    assert [tree.root for tree in form_policy(Network.uniform(9), "k-ary", num_roots=3, degree=7).trees] == [
        0,
        3,
        6,
    ]


# ---------------------------------------------------------------------------------------------- hierarchical
# Groups, their leaders, and the trees of two tiers.


def with_sites(network: Network, *sites: str) -> Network:
    return replace(network, nodes=tuple(Node(rank=Rank(rank), site=site) for rank, site in enumerate(sites)))


def test_members_are_below_their_sites_leader_and_leaders_below_the_root():
    network = with_sites(Network.uniform(5), "tokyo", "denver", "tokyo", "denver", "oslo")

    forest = hierarchical(network)

    assert [tree.root for tree in forest.trees] == [0, 1, 4]
    assert [tree.reduce_parent for tree in forest.trees] == [
        (-1, 0, 0, 1, 0),
        (1, -1, 0, 1, 1),
        (4, 4, 0, 1, -1),
    ]
    assert all(tree.broadcast_parent == tree.reduce_parent for tree in forest.trees)
    assert forest.policy(0).weights == (334, 333, 333)
    assert forest.reason == "hierarchical: 3 groups by site, led by 0, 1, 4"


def test_the_leader_is_the_member_whose_slowest_link_in_the_group_is_fastest():
    network = with_sites(Network.uniform(5), "a", "a", "a", "b", "b")
    slow = with_rates(network, {(0, 1): 10e6})

    assert [tree.root for tree in hierarchical(slow).trees] == [2, 3]


def test_of_equal_members_the_one_with_the_most_throughput_leads():
    network = with_sites(Network.uniform(4), "a", "a", "b", "b")
    fast_way_out = with_rates(network, {(1, 3): 200e6})

    assert [tree.root for tree in hierarchical(fast_way_out).trees] == [1, 3]


def test_ranks_without_sites_are_grouped_by_throughput():
    sites = [0, 1, 2, 0, 1, 2, 0, 1, 2]
    network = Network.uniform(9, rate=20e6)
    fast = {(i, j): 500e6 for i in range(9) for j in range(i + 1, 9) if sites[i] == sites[j]}

    assert groups_of(with_rates(network, fast)) == ((0, 3, 6), (1, 4, 7), (2, 5, 8))


@pytest.mark.parametrize("sites", ["aaaa", "abcd"])
def test_sites_that_say_nothing_are_not_used(sites: str):
    network = with_sites(with_rates(Network.uniform(4, rate=20e6), {(0, 2): 99e6, (1, 3): 98e6}), *sites)

    assert groups_of(network) == ((0, 2), (1, 3))
    assert "by throughput" in hierarchical(network).reason


def test_a_rank_without_a_site_is_a_group_of_its_own():
    assert groups_of(with_sites(Network.uniform(4), "a", "", "a", "")) == ((0, 2), (1,), (3,))


@given(networks(symmetric=None, capped=True, routing=None))
def test_groups_are_of_all_ranks_and_there_is_a_tree_for_each(network: Network):
    groups = groups_of(network)

    assert sorted(rank for group in groups for rank in group) == list(network.ranks)
    roots = [tree.root for tree in hierarchical(network).trees]
    assert roots == sorted(roots)
    assert all(len(set(group) & set(roots)) == 1 for group in groups)


@given(networks(2, 25, symmetric=True))
def test_groups_by_throughput_are_about_as_many_as_the_root_of_the_ranks(network: Network):
    blank = replace(network, nodes=tuple(Node(rank=rank) for rank in network.ranks))

    groups = groups_of(blank)

    wanted = max(2, round(math.sqrt(network.size)))
    assert wanted <= len(groups) <= 2 * wanted
    assert max(map(len, groups)) <= math.ceil(network.size / wanted) + 1


def test_a_hop_that_has_no_link_is_relayed_with_as_few_hops_outside_the_tiers_as_can_be():
    forest = hierarchical(with_sites(overlay(4, (0, 1), (1, 2), (2, 3)), "a", "a", "b", "b"))
    assert [tree.root for tree in forest.trees] == [1, 2]
    assert forest.trees[0].reduce_parent == (1, -1, 1, 2)


@given(networks(3, 9, symmetric=None, routing=Routing.UNDERLAY))
def test_where_all_may_talk_trees_have_the_two_tiers_and_nothing_else(network: Network):
    groups = groups_of(network)
    forest = hierarchical(network)
    leaders = {tree.root for tree in forest.trees}

    for tree in forest.trees:
        for group in groups:
            (leader,) = leaders & set(group)
            above = tree.root if leader != tree.root else -1
            expected = {**dict.fromkeys(group, leader), leader: above}
            assert {rank: tree.reduce_parent[rank] for rank in group} == expected
            assert {rank: tree.broadcast_parent[rank] for rank in group} == expected


# --------------------------------------------------------------------------------------------------- sharded
# A parameter server on every rank.


@pytest.mark.parametrize("size", [2, 3, 9])
def test_every_pair_carries_two_nths_of_the_tensor_each_way(size: int):
    network = Network.uniform(size)
    forest = sharded(network)

    loads = pair_loads(Resources.of(network), forest.trees, forest.shares)

    np.testing.assert_allclose(loads, 2 / size)
    weights = forest.policy(0).weights
    assert max(weights) - min(weights) <= 1


@given(networks(symmetric=None))
def test_every_rank_is_the_root_of_a_tree_as_shallow_as_links_allow(network: Network):
    forest = sharded(network)
    assert [tree.root for tree in forest.trees] == list(network.ranks)
    assert len(set(forest.shares)) == 1
    for tree in forest.trees:
        assert_as_shallow_as_links_allow(network, tree)


@given(networks(symmetric=None), st.data())
def test_the_reason_says_how_many_hubs_are_not_linked_to_all(network: Network, data: st.DataObject):
    linked = {(link.source, link.target) for link in network.links}
    lacking = sum(
        any({(hub, rank), (rank, hub)} - linked for rank in network.ranks if rank != hub)
        for hub in network.ranks
    )

    reason = sharded(network).reason

    assert (f"; {lacking} of {network.size} hubs" in reason) == bool(lacking)


@settings(max_examples=25)
@given(networks(2, 5), st.randoms(use_true_random=False))
def test_no_tree_is_cheaper_than_the_cheapest(network: Network, random):
    priced = replace(
        network, links=tuple(replace(one, price=random.choice([0.0, 0.02, 0.09])) for one in network.links)
    )
    prices: dict[tuple[int, int], float] = {(one.source, one.target): one.price for one in priced.links}

    def cost(tree: Tree) -> float:
        hops = [(rank, parent) for rank, parent in enumerate(tree.reduce_parent) if parent >= 0]
        return sum(prices.get(hop, math.inf) + prices.get(hop[::-1], math.inf) for hop in hops)

    try:
        found = cheapest(priced).trees[0]
    except Unreachable:
        assert all(math.isinf(cost(tree)) for tree in all_trees(priced.size, Rank(0)))
        return
    least = min(cost(tree) for tree in all_trees(priced.size, Rank(0)))
    assert cost(found) == pytest.approx(least)
