"""Random networks: connected, as described, and the same for a seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.topology import Routing
from netstorm.topology.files import dump_network, parse_network
from netstorm.topology.network import FAMILIES, generate

drawn = given(st.sampled_from(sorted(FAMILIES)), st.integers(2, 24), st.integers(0, 1000))


@drawn
def test_equal_seeds_give_equal_networks_and_others_give_others(family, nodes, seed):
    network = generate(family, nodes, seed)
    assert generate(family, nodes, seed) == network
    assert generate(family, nodes, seed + 1) != network


@drawn
def test_all_ranks_reach_each_other_over_links_of_the_paper_s_rates(family, nodes, seed):
    network = generate(family, nodes, seed)
    assert network.size == nodes
    assert network.separated() is None
    assert len(network.pairs()) == nodes * (nodes - 1)
    assert all(20e6 <= link.rate <= 155e6 for link in network.links)
    assert all(0.015 <= link.latency <= 0.075 and link.loss == 0 for link in network.links)


@drawn
def test_only_the_asymmetric_ones_are_asymmetric_and_only_clouds_have_capped_access(family, nodes, seed):
    network = generate(family, nodes, seed)
    equal = [network.link(link.target, link.source).rate == link.rate for link in network.links]
    assert not any(equal) if family == "asymmetric" else all(equal)
    caps = [node.egress for node in network.nodes]
    assert caps == [node.ingress for node in network.nodes]
    assert all(60e6 <= (cap or 0) <= 250e6 for cap in caps) if family == "cloud" else caps == [None] * nodes


def test_internet2_has_the_paper_s_links_and_as_many_a_node_at_other_sizes():
    nine = generate("internet2", 9, 0)
    assert nine.routing is Routing.UNDERLAY
    assert len(nine.links) == 2 * 14
    assert len(generate("internet2", 36, 0).links) == 2 * 56


@pytest.mark.parametrize("family", FAMILIES)
def test_they_can_be_written_to_files(family):
    network = generate(family, 6, 3)
    assert parse_network(dump_network(network)) == network


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(UsageError, match=r"^family 'torus': expected one of mesh, internet2, cloud, asymm"):
        generate("torus", 9, 0)
    with pytest.raises(UsageError, match=r"^1 nodes: expected at least 2$"):
        generate("mesh", 1, 0)
