"""The optimum against a program of flows written apart from it, and against what theory gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from netstorm.errors import Unreachable
from netstorm.lab.testing.strategies import networks
from netstorm.topology import Link, Network, Node, Rank, Routing
from netstorm.topology.network import FAMILIES, generate
from netstorm.topology.resources import latency_bound, optimum
from tests.unit.topology.flow_program import flow_rate

RATE = 8e6  # 1 MB takes a second
MB = 1_000_000


@settings(max_examples=60)
@given(networks(2, 5, symmetric=None, capped=True, routing=None))
def test_cutting_planes_find_what_a_program_of_flows_finds(network):
    found = optimum(network, MB)
    assert found.rate == pytest.approx(flow_rate(network, found.rate), rel=3e-4)
    assert found.seconds == pytest.approx(8 * MB / found.rate)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("nodes", [6, 9])
def test_cutting_planes_find_it_in_networks_of_the_studied_kinds(family, nodes):
    network = generate(family, nodes, seed=nodes)
    found = optimum(network, MB).rate
    assert found == pytest.approx(flow_rate(network, found), rel=3e-4)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_in_a_mesh_of_equal_links_all_of_them_are_filled(size):
    # A tree uses 2(N - 1) of the N(N - 1) directed links for each bit of the tensor.
    assert optimum(Network.uniform(size, rate=RATE), MB).rate == pytest.approx(RATE * size / 2, rel=2e-4)


def test_a_node_behind_one_line_must_take_in_the_whole_sum_or_send_its_whole_addend_over_it():
    line = Network.uniform(4, rate=RATE)
    capped = replace(line, nodes=(*line.nodes[:3], Node(rank=Rank(3), egress=RATE / 2)))
    # Out of rank 3 go its addend for the trees of other roots and the results of its own: all of the tensor.
    assert optimum(capped, MB).rate == pytest.approx(RATE / 2, rel=2e-4)


def test_a_bridge_is_crossed_by_the_whole_tensor_each_way():
    ends = ((0, 1), (1, 0), (1, 2), (2, 1))
    links = tuple(Link(source=Rank(a), target=Rank(b), rate=RATE) for a, b in ends)
    chain = replace(Network.uniform(3), links=links)
    assert optimum(chain, MB).rate == pytest.approx(RATE, rel=2e-4)
    assert optimum(replace(chain, routing=Routing.UNDERLAY), MB).rate == pytest.approx(RATE, rel=2e-4)


def test_one_slow_line_among_very_fast_ones_is_not_lost_in_rounding():
    fast = Network.uniform(4, rate=100e9)
    slow = replace(fast, nodes=(*fast.nodes[:3], Node(rank=Rank(3), ingress=50e3)))
    assert optimum(slow, MB).rate == pytest.approx(50e3, rel=2e-4)


def test_the_gap_tells_how_far_above_what_is_achievable_the_result_may_be():
    network = generate("cloud", 9, 0)
    exact, rough = optimum(network, MB, gap=1e-7), optimum(network, MB, gap=0.1)
    assert exact.gap <= 1e-6
    assert exact.rate * (1 - 1e-6) <= rough.rate <= exact.rate * (1 + rough.gap + 1e-6)


def test_one_rank_alone_takes_no_time():
    assert optimum(Network.uniform(1), MB).seconds == 0.0
    assert latency_bound(Network.uniform(1), MB) == 0.0


def test_ranks_without_a_path_are_named():
    cut = Network.uniform(3)
    cut = replace(cut, links=tuple(link for link in cut.links if link.source != 2))
    with pytest.raises(Unreachable, match=r"no path from ranks \(2,\) to ranks \(0, 1\)"):
        optimum(cut, MB)


def test_the_latency_bound_is_the_way_of_the_last_bit_to_the_farthest_rank():
    network = Network.uniform(2, rate=RATE, latency=0.25)
    assert latency_bound(network, MB) == pytest.approx(1 + 0.25)
    far = Network.uniform(3, rate=RATE, latency=0.25)
    links = tuple(
        replace(link, latency=2.0) if {link.source, link.target} == {0, 2} else link for link in far.links
    )
    # Over rank 1 in half a second; two links leave each rank.
    assert latency_bound(replace(far, links=links), MB) == pytest.approx(0.5 + 0.5)
