"""Groups, their leaders, and the trees of two tiers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from netstorm.lab.testing.strategies import networks
from netstorm.topology import Link, Network, Node, Rank, Routing, hierarchical
from netstorm.topology.schemes import groups_of


def with_sites(network: Network, *sites: str) -> Network:
    return replace(network, nodes=tuple(Node(rank=Rank(rank), site=site) for rank, site in enumerate(sites)))


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


@settings(max_examples=30)
@given(networks(2, 25, symmetric=True))
def test_groups_by_throughput_are_about_as_many_as_the_root_of_the_ranks(network: Network):
    blank = replace(network, nodes=tuple(Node(rank=rank) for rank in network.ranks))

    groups = groups_of(blank)

    wanted = max(2, round(math.sqrt(network.size)))
    assert wanted <= len(groups) <= 2 * wanted
    assert max(map(len, groups)) <= math.ceil(network.size / wanted) + 1


def test_a_hop_that_has_no_link_is_relayed_with_as_few_hops_outside_the_tiers_as_can_be():
    network = with_sites(Network.uniform(4), "a", "a", "b", "b")
    lines = tuple(
        Link(source=Rank(source), target=Rank(target), rate=100e6)
        for i, j in ((0, 1), (1, 2), (2, 3))
        for source, target in ((i, j), (j, i))
    )

    forest = hierarchical(replace(network, links=lines))

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
