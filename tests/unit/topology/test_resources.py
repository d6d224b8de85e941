"""The resource matrix against a count by hand, pair by pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from netstorm.errors import UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.topology import Link, Network, Node, Policy, Rank, Routing, Tree
from netstorm.topology.resources import Resources, fluid_time, pair_loads
from tests.unit.topology.flow_program import capacity, users

RATE = 8e6  # 1 MB takes a second
MB = 1_000_000


def star(nodes: int) -> Tree:
    return Tree.undirected(Rank(0), (-1, *[0] * (nodes - 1)))


@given(networks(2, 6, symmetric=None, capped=True, routing=None))
def test_each_pair_uses_the_links_under_it_and_the_capped_access_lines_of_its_ends(network):
    resources = Resources.of(network)
    shown = {"link": "{}→{}", "egress": "egress of rank {}", "ingress": "ingress of rank {}"}

    assert resources.pairs == network.pairs()
    for pair in resources.pairs:
        wanted = users(network, *pair)
        used = resources.used_by(pair)
        assert sorted(resources.names[one] for one in used) == sorted(
            shown[kind].format(source, target) for kind, source, target in wanted
        )
        capacities = [capacity(network, one) for one in wanted]
        assert sorted(resources.capacities[list(used)]) == pytest.approx(sorted(capacities))
        assert resources.pair_capacities[resources.place(pair)] == pytest.approx(min(capacities))
    assert resources.matrix.nnz == sum(len(users(network, *pair)) for pair in resources.pairs)


@given(networks(2, 6, symmetric=None, capped=True, routing=None))
def test_loads_on_resources_are_the_sums_over_the_pairs_that_use_them(network):
    resources = Resources.of(network)
    volumes = np.arange(1.0, 1 + len(resources.pairs))
    expected = np.zeros(len(resources.capacities))
    for volume, pair in zip(volumes, resources.pairs, strict=True):
        for resource in resources.used_by(pair):
            expected[resource] += volume
    assert resources.loads(volumes) == pytest.approx(expected)


def test_trees_put_their_shares_on_the_pairs_of_both_phases():
    resources = Resources.of(Network.uniform(3))
    apart = Tree(root=Rank(1), reduce_parent=(1, -1, 0), broadcast_parent=(2, -1, 1))
    volumes = pair_loads(resources, [star(3), apart], [3, 1])
    found = {pair: volumes[resources.place(pair)] for pair in resources.pairs}
    assert found == {(0, 1): 1.0, (0, 2): 0.75, (1, 0): 0.75, (1, 2): 0.25, (2, 0): 1.25, (2, 1): 0.0}


def test_the_most_loaded_resource_sets_the_fluid_time():
    network = Network.uniform(4, rate=RATE)
    policy = Policy(version=0, trees=(star(4),), weights=(1,))
    assert fluid_time(Resources.of(network), policy, 5 * MB) == pytest.approx(5)
    capped = replace(network, nodes=(Node(rank=Rank(0), ingress=RATE), *network.nodes[1:]))
    assert fluid_time(Resources.of(capped), policy, 5 * MB) == pytest.approx(15)


def test_a_stop_on_the_way_of_a_routed_pair_costs_nothing_so_a_plan_needs_single_links_only():
    ends = ((0, 1), (1, 0), (1, 2), (2, 1))
    chain = Network(
        nodes=Network.uniform(3).nodes,
        links=tuple(Link(source=Rank(a), target=Rank(b), rate=RATE) for a, b in ends),
        routing=Routing.UNDERLAY,
    )
    resources = Resources.of(chain)
    assert [resources.pairs[one] for one in resources.useful] == list(ends)
    capped = replace(chain, nodes=(*chain.nodes[:2], Node(rank=Rank(2), egress=RATE)))
    assert len(Resources.of(capped).useful) == 6


def test_ranks_that_may_not_talk_are_named():
    chain = replace(Network.uniform(3), links=(Link(source=Rank(0), target=Rank(1), rate=RATE),))
    with pytest.raises(UsageError, match=r"^ranks 1 and 2 may not talk directly in this network$"):
        Resources.of(chain).place((1, 2))
