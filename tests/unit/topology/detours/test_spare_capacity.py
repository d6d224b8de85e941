"""Which detours policies get."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.lab.testing.strategies import networks
from netstorm.topology import Link, Network, Node, Rank, Routing, form_policy
from netstorm.topology.detours import hops_of
from netstorm.topology.network import generate
from netstorm.topology.policy import MAX_DETOURS
from netstorm.topology.resources import Resources, pair_loads


def used_by(network, policy):
    """Return what trees make of each resource, in parts of the most used one, by name."""
    resources = Resources.of(network)
    used = resources.loads(pair_loads(resources, policy.trees, policy.weights)) / resources.capacities
    return resources, used / used.max()


@given(networks(3, 8, capped=True, routing=None), st.sampled_from(["star", "fapt", "mst", "packing"]))
@settings(max_examples=60)
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
