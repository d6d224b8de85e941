"""By how much a network has largest_change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from netstorm.scheduler.awareness import NetworkEstimate, largest_change, throughputs
from netstorm.topology.network import Network, Rank

M = 1e6
CHUNK = 131_072


def estimate(*, error=0.03, egress=(), ingress=(), gone=(), **rates):
    """Return a mesh of three, 10 Mbit/s and 20 ms, but for rates named by 'from_to' and caps by rank."""
    network = Network.uniform(3, rate=10 * M, latency=0.02)
    links = tuple(
        replace(link, rate=rates.get(f"l{link.source}_{link.target}", link.rate))
        for link in network.links
        if (link.source, link.target) not in gone
    )
    nodes = tuple(
        replace(node, egress=dict(egress).get(node.rank), ingress=dict(ingress).get(node.rank))
        for node in network.nodes
    )
    pairs = frozenset((link.source, link.target) for link in links)
    return NetworkEstimate(
        network=replace(network, nodes=nodes, links=links),
        errors=(error,) * len(links),
        cap_error=error,
        measured=pairs,
    )


def test_what_is_the_same_has_not_moved():
    assert largest_change(estimate(), estimate(), 0.1, CHUNK) == (0.0, "")


def test_the_link_that_moved_most_is_named():
    change, text = largest_change(estimate(), estimate(l0_1=8 * M, l1_2=2 * M), 0.1, CHUNK)
    assert change == pytest.approx(math.log(5))
    assert text == "link 1→2 from 10Mbit/s and 20ms to 2Mbit/s and 20ms"


def test_what_is_less_than_the_threshold_or_the_errors_is_no_move():
    assert largest_change(estimate(), estimate(l0_1=9.3 * M), 0.1, CHUNK)[0] == 0.0
    assert largest_change(estimate(error=0.2), estimate(error=0.2, l0_1=6 * M), 0.1, CHUNK)[0] == 0.0


def test_links_come_and_go():
    assert largest_change(estimate(), estimate(gone=[(0, 2)]), 0.1, CHUNK) == (
        math.inf,
        "link 0→2 is gone",
    )
    assert largest_change(estimate(gone=[(0, 2)]), estimate(), 0.1, CHUNK)[0] == math.inf


@pytest.mark.parametrize("word", ["egress", "ingress"])
def test_a_cap_moves_by_what_it_takes_from_the_links_behind_it(word):
    free, capped = estimate(), estimate(**{word: [(1, 5 * M)]})
    change, text = largest_change(free, capped, 0.1, CHUNK)
    assert change == pytest.approx(math.log(4))  # two links of 10
    assert text == f"{word} of rank 1 from no limit to 5Mbit/s"
    assert largest_change(capped, free, 0.1, CHUNK) == (change, f"{word} of rank 1 from 5Mbit/s to no limit")
    assert largest_change(capped, estimate(**{word: [(1, 10 * M)]}), 0.1, CHUNK)[0] == pytest.approx(
        math.log(2)
    )


def test_a_cap_that_is_no_less_than_the_links_comes_and_goes_unnoticed():
    assert largest_change(estimate(), estimate(egress=[(1, 19.5 * M)]), 0.1, CHUNK) == (0.0, "")
    assert largest_change(estimate(egress=[(1, 30 * M)]), estimate(), 0.1, CHUNK) == (0.0, "")


def test_a_node_without_links_has_no_line_that_could_move():
    lonely = [(1, 0), (1, 2)]
    assert largest_change(estimate(gone=lonely), estimate(gone=lonely, egress=[(1, 5 * M)]), 0.1, CHUNK) == (
        0.0,
        "",
    )


def test_rates_are_what_a_pair_has_for_itself():
    network = estimate(gone=[(0, 2)], egress=[(1, 3 * M)]).network
    assert throughputs(network, [(0, 1), (1, 0), (0, 2)]) == {(0, 1): 10 * M, (1, 0): 3 * M, (0, 2): 0.0}
    assert network.link(Rank(0), Rank(1)).rate == 10 * M
