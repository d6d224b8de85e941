"""Detours: auxiliary paths, spare capacity, and the links over which owners are reached."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.lab.testing.strategies import networks
from netstorm.topology import SCHEMES, Link, Network, Node, Routing, fapt, form_policy, star
from netstorm.topology.detours import Path, auxiliary_paths, delivery, detours, hops_of
from netstorm.topology.network import Rank, generate
from netstorm.topology.policy import MAX_DETOURS, Policy, owner_weights, paths_from
from netstorm.topology.resources import Resources, pair_loads
from netstorm.topology.tree import Tree
from tests.simulated.jobs import random_policy

# ------------------------------------------------------------------------------------------------- auxiliary
# Auxiliary paths: the paper's Algorithm 3, and detours of one hop.


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


def test_a_policy_may_have_the_paths_of_algorithm_3_around_each_of_its_hops():
    network = generate("mesh", 6, 2)
    policy = form_policy(network, "fapt", auxiliary=True, aux_search="paper")
    paths = auxiliary_paths(network, chunk_bytes=10**12)
    expected = {path for hop in hops_of(policy.trees) for path in paths[hop] if len(path) > 2}
    assert expected
    assert {detour.path for detour in policy.detours} == expected
    assert not any(detour.explore for detour in policy.detours)


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


# -------------------------------------------------------------------------------------------- spare capacity
# Which detours policies get.


def used_by(network, policy):
    """Return what trees make of each resource, in parts of the most used one, by name."""
    resources = Resources.of(network)
    used = resources.loads(pair_loads(resources, policy.trees, policy.weights)) / resources.capacities
    return resources, used / used.max()


@given(networks(3, 8, capped=True, routing=None), st.sampled_from(["star", "fapt", "mst", "packing"]))
def test_detours_lead_around_busy_hops_over_links_that_have_room(network, topology):
    if topology == "star":  # which needs links to one hub
        network = replace(network, routing=Routing.UNDERLAY)
    policy = form_policy(network, topology, auxiliary=True)
    resources, used = used_by(network, policy)
    for detour in policy.detours:
        assert not detour.explore
        hop = (detour.path[0], detour.path[-1])
        assert hop in hops_of(policy.trees)
        busy = max(used[list(resources.used_by(hop))])
        later = []
        for place, ends in enumerate(pairwise(detour.path)):
            numbers = list(resources.used_by(ends))
            assert max(used[numbers]) <= 0.8 + 1e-9
            spare = min(resources.capacities[numbers] * (1 - used[numbers]))
            rate, latency = detour.links[place]
            assert 0 < rate <= 1.001 * spare  # which several detours share
            assert latency == network.link(Rank(ends[0]), Rank(ends[1])).latency
            later += [max(used[numbers])] if place else []
        assert busy >= 0.5
        assert detour.load == pytest.approx(max(later) / busy, abs=1e-3)
        assert detour.load < 0.7 + 1e-3


def test_a_hop_has_at_most_two_detours_and_they_share_no_link():
    policy = form_policy(generate("mesh", 9, 1), "star", auxiliary=True)
    assert policy.detours
    by_hop: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for detour in policy.detours:
        by_hop.setdefault((detour.path[0], detour.path[-1]), []).extend(pairwise(detour.path))
    for links in by_hop.values():
        assert len(set(links)) == len(links)
        assert len([link for link in links if link[0] == links[0][0]]) <= MAX_DETOURS


def test_nobody_gets_detours_who_did_not_ask_or_where_rates_are_made_up():
    network = generate("mesh", 9, 1)
    assert not form_policy(network, "star").detours
    assert not form_policy(network, "star", auxiliary=True, known=False).detours


def test_behind_access_lines_that_are_the_limit_there_are_no_detours():
    network = generate("cloud", 9, 1)
    assert not form_policy(network, "star", auxiliary=True).detours


@pytest.mark.parametrize("topology", ["star", "fapt", "mst"])
def test_every_link_that_was_not_measured_gets_a_detour_over_it_unless_trees_use_it(topology):
    network = generate("asymmetric", 9, 2)
    unmeasured = tuple(network.linked_pairs())
    policy = form_policy(network, topology, auxiliary=True, known=False, unmeasured=unmeasured)
    seen = set(hops_of(policy.trees))
    for detour in policy.detours:
        assert detour.explore
        seen |= set(pairwise(map(Rank, detour.path)))
    assert seen == set(unmeasured)


def test_two_nodes_have_no_way_around():
    assert not form_policy(Network.uniform(2), "star", auxiliary=True).detours


@pytest.mark.parametrize("seed", range(4))
def test_in_sparse_networks_links_are_looked_at_by_longer_ways(seed):
    network = replace(generate("internet2", 9, seed), routing=Routing.OVERLAY)
    unmeasured = tuple(network.linked_pairs())
    policy = form_policy(network, "fapt", num_roots=1, auxiliary=True, known=False, unmeasured=unmeasured)
    seen = set(hops_of(policy.trees))
    for detour in policy.detours:
        assert network.route(Rank(detour.path[0]), Rank(detour.path[-1]))
        seen |= set(pairwise(map(Rank, detour.path)))
    assert seen == set(unmeasured)


def test_where_a_link_is_the_only_way_nobody_looks_at_it_by_another():
    line = Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(4)),
        links=tuple(
            Link(source=Rank(one), target=Rank(other), rate=1e7, latency=0.01)
            for one, other in ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2))
        ),
    )
    policy = form_policy(line, "fapt", num_roots=1, auxiliary=True, unmeasured=line.linked_pairs())
    assert not policy.detours


# ---------------------------------------------------------------------------------------------------- owners
# Who owns how much, and over which links owners are reached.


def chain(*ranks: int) -> Tree:
    parents = [-1] * len(ranks)
    for parent, child in itertools.pairwise(ranks):
        parents[child] = parent
    return Tree.undirected(Rank(ranks[0]), tuple(parents))


def test_roots_own_what_their_trees_carry_in_lowest_terms():
    policy = Policy(version=0, trees=(chain(0, 1, 2), chain(2, 1, 0), chain(0, 2, 1)), weights=(20, 20, 40))
    assert owner_weights(policy) == (3, 0, 1)


def test_the_hub_of_a_star_owns_everything():
    star = Tree.undirected(Rank(1), (1, -1, 1))
    assert owner_weights(Policy(version=0, trees=(star,), weights=(7,))) == (0, 1, 0)


def test_a_path_has_the_fewest_hops():
    policy = Policy(version=0, trees=(chain(0, 1, 2, 3), chain(3, 1, 2, 0)), weights=(1, 1))
    assert paths_from(policy, 0) == ((0,), (0, 1), (0, 2), (0, 1, 3))


@given(st.integers(1, 9), st.integers(0, 2**32))
def test_a_path_leads_from_every_rank_to_every_other_over_pairs_that_trees_use(size, seed):
    policy = random_policy(random.Random(seed), size)
    pairs = set(hops_of(policy.trees))
    for rank in range(size):
        for target, path in enumerate(paths_from(policy, rank)):
            assert (path[0], path[-1]) == (rank, target)
            assert len(set(path)) == len(path)
            assert set(itertools.pairwise(path)) <= pairs
