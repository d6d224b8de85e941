"""What a job's traffic costs an hour, by the network file's prices."""

from __future__ import annotations

import msgspec
import pytest

from netstorm.scheduler.build_status import build_status
from netstorm.scheduler.status import TreeStatus
from netstorm.scheduler.traffic_cost import cost_an_hour
from netstorm.topology.files import parse_network
from tests.unit.scheduler.driving import running

STAR = TreeStatus(root=0, share=1.0, reduce_parent=(-1, 0, 0), broadcast_parent=(-1, 0, 0))
BY_REGION = """
nodes:
  0: {price: 0.02/GB}
  1: {price: 0.098/GB}
  2: {}
links:
  - {between: [0, 1], rate: 1Gbit}
  - {between: [0, 2], rate: 1Gbit}
  - {between: [1, 2], rate: 1Gbit}
"""
BY_LINK = """
nodes: {0: {}, 1: {}, 2: {}}
links:
  - {from: 0, to: 1, rate: 1Gbit, price: 1/GB}
  - {from: 0, to: 2, rate: 1Gbit, price: 10/GB}
  - {from: 1, to: 0, rate: 1Gbit}
  - {from: 2, to: 0, rate: 1Gbit}
"""
A_GIGABYTE_AN_HOUR = 8e9 / 3600


def nodes_that_send(*rates):
    driven = running(len(rates))
    found = build_status(driven.machine.snapshot(driven.now), time=0.0)
    return [
        msgspec.structs.replace(node, sending=None if rate is None else rate * A_GIGABYTE_AN_HOUR)
        for node, rate in zip(found.nodes, rates, strict=True)
    ]


def test_each_region_bills_what_it_sends():
    cost = cost_an_hour(parse_network(BY_REGION, "file"), nodes_that_send(2, 3, 5), [STAR])
    assert cost == pytest.approx(2 * 0.02 + 3 * 0.098)


def test_what_a_node_sends_is_divided_among_its_links_as_the_trees_divide_the_data():
    network = parse_network(BY_LINK, "file")
    assert cost_an_hour(network, nodes_that_send(4, 9, 9), [STAR]) == pytest.approx(2 * 1 + 2 * 10)
    chain = TreeStatus(root=1, share=0.75, reduce_parent=(1, -1, 0), broadcast_parent=(1, -1, 0))
    both = [msgspec.structs.replace(STAR, share=0.25), chain]
    # Rank 0 sends to 1 a quarter down and three quarters up, to 2 a quarter down and three quarters down.
    assert cost_an_hour(network, nodes_that_send(4, None, 0), both) == pytest.approx(2 * 1 + 2 * 10)


def test_a_pair_without_a_link_costs_what_the_links_of_its_route_cost():
    routed = parse_network(BY_LINK + "routing: underlay\n", "file")
    tree = TreeStatus(root=2, share=1.0, reduce_parent=(2, 2, -1), broadcast_parent=(2, 2, -1))
    assert cost_an_hour(routed, nodes_that_send(0, 3, 0), [tree]) == pytest.approx(3 * (0 + 10))


def test_without_prices_or_before_nodes_have_said_what_they_send_nothing_is_known():
    free = parse_network(BY_REGION.replace("price: 0.02/GB", "").replace("price: 0.098/GB", ""), "file")
    assert cost_an_hour(free, nodes_that_send(1, 1, 1), [STAR]) is None
    assert cost_an_hour(parse_network(BY_REGION, "file"), nodes_that_send(None, None, None), [STAR]) is None
