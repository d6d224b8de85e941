"""Which pairs of nodes have no line of their own, by latencies."""

from __future__ import annotations

import random
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.scheduler.awareness import InferredRoutes, routed_pairs
from netstorm.topology.network import Link, Network, Node, Rank, Routing, generate


def latencies(network, *, seed=0, noise=0.005, least=0.0003):
    """Return what is measured: the ways' latencies, the same both ways, and what queues add."""
    chance, found = random.Random(seed), {}
    for one, other in network.pairs():
        if one < other:
            there, back = network.link(one, other).latency, network.link(other, one).latency
            took = (there + back) / 2 * (1 + abs(chance.gauss(0, noise))) + abs(chance.gauss(0, least))
            found[int(one), int(other)] = found[int(other), int(one)] = took
    return found


def lines(network):
    return {(int(link.source), int(link.target)) for link in network.links}


def joined(pairs, size):
    reached, left = {0}, [0]
    while left:
        here = left.pop()
        for there in range(size):
            if (here, there) in pairs and there not in reached:
                reached.add(there)
                left.append(there)
    return len(reached) == size


@pytest.mark.parametrize("seed", range(1, 13))
def test_on_a_backbone_pairs_that_lead_past_other_nodes_are_found_and_hardly_any_line(seed):
    network = generate("internet2", 9, seed)
    took = latencies(network, seed=seed)
    found = routed_pairs(took, 9)
    real = took.keys() - lines(network)
    assert not real - found  # also where the ways there and back differ, and their mean is no sum of two
    assert len(found - real) <= 4  # a line may take as long as two others by chance
    assert joined(took.keys() - found, 9)


@pytest.mark.parametrize("family", ["mesh", "asymmetric", "cloud"])
def test_where_all_pairs_have_lines_of_their_own_none_is_left_out(family):
    wrong = [
        seed for seed in range(1, 31) if routed_pairs(latencies(generate(family, 9, seed), seed=seed), 9)
    ]
    assert len(wrong) <= 1  # of meshes drawn at random one in 80 looks like a backbone


@given(st.integers(3, 9), st.data())
def test_whatever_latencies_are_the_pairs_that_are_left_join_all_nodes(nodes, data):
    """Latencies of few kinds, so that many are sums of others, and some next to nothing."""
    kinds = st.sampled_from([0.0002, 0.003, 0.005, 0.01, 0.0101, 0.02, 0.03, 0.04, 0.06, 0.3])
    took = {}
    for one, other in combinations(range(nodes), 2):
        took[one, other] = took[other, one] = data.draw(kinds)
    assert joined(took.keys() - routed_pairs(took, nodes), nodes)
    held = frozenset(pair for pair in took if sum(pair) % 2)
    assert joined(took.keys() - routed_pairs(took, nodes, held), nodes)


@pytest.mark.parametrize(("nodes", "least"), [(6, 10), (16, 160), (32, 850)])
def test_other_sizes(nodes, least):
    backbone = latencies(generate("internet2", nodes, 1))
    assert len(routed_pairs(backbone, nodes)) >= least
    assert joined(backbone.keys() - routed_pairs(backbone, nodes), nodes)
    assert not routed_pairs(latencies(generate("mesh", nodes, 1)), nodes)


def chain(size, latency=0.01):
    return Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(size)),
        links=tuple(
            Link(source=Rank(one), target=Rank(other), rate=1e8, latency=latency)
            for one, other in permutations(range(size), 2)
            if abs(one - other) == 1
        ),
        routing=Routing.UNDERLAY,
    )


def test_of_a_chain_its_lines_are_left():
    took = latencies(chain(6), noise=0.0, least=0.0)
    assert took.keys() - routed_pairs(took, 6) == lines(chain(6))


def test_a_line_that_takes_as_long_as_three_others_is_none_only_where_there_are_routes():
    took = latencies(chain(6), noise=0.0, least=0.0)
    took[0, 3] = took[3, 0] = 0.034  # by way of 1 and 2 it is .03
    assert (0, 3) in routed_pairs(took, 6)
    took[0, 3] = took[3, 0] = 0.02
    assert (0, 3) not in routed_pairs(took, 6)
    mesh = latencies(generate("mesh", 9, 1), noise=0.0, least=0.0)
    mesh[0, 3] = mesh[3, 0] = 0.5
    assert not routed_pairs(mesh, 9)


def test_nodes_of_one_site_are_not_on_the_way_of_one_another():
    # Four sites of two nodes each, 20 to 80 ms apart; within a site .2 ms.
    far = {(0, 1): 0.02, (0, 2): 0.035, (0, 3): 0.08, (1, 2): 0.05, (1, 3): 0.063, (2, 3): 0.041}
    took = {
        (one, other): 0.0002 if one // 2 == other // 2 else far[tuple(sorted((one // 2, other // 2)))]  # type: ignore[index]
        for one, other in permutations(range(8), 2)
    }
    assert not routed_pairs(took, 8)


def test_too_few_latencies_say_nothing():
    took = latencies(generate("internet2", 9, 1))
    some = dict(list(took.items())[:50])
    assert routed_pairs(some, 9) == frozenset()
    before = frozenset({(0, 8), (8, 0)})
    assert routed_pairs(some, 9, before) == before
    assert routed_pairs({(0, 1): 0.01, (1, 0): 0.01}, 2) == frozenset()
    assert routed_pairs({}, 1) == frozenset()


def test_latencies_of_zero_are_not_known():
    assert routed_pairs(dict.fromkeys(permutations(range(9), 2), 0.0), 9) == frozenset()


def test_what_was_found_stays_while_measuring_wavers_and_goes_when_it_is_no_more_so():
    network = generate("internet2", 9, 2)
    found = routed_pairs(latencies(network), 9)
    wavering = latencies(network, seed=5, noise=0.012)
    assert len(found - routed_pairs(wavering, 9, found)) <= len(found - routed_pairs(wavering, 9))
    assert routed_pairs(latencies(generate("mesh", 9, 1)), 9, found) == frozenset()


def test_routes_are_new_once_and_looked_at_again_when_latencies_are_others():
    routes = InferredRoutes(9)
    for pair, latency in latencies(generate("internet2", 9, 1)).items():
        routes.record(pair, latency, 1.0)
    assert routes.changed_at == 1.0
    assert routes.update()
    found = routes.found
    assert len(found) == 44
    assert not routes.update()
    routes.record((0, 8), 0.02, 3.0)
    routes.record((8, 0), 0.02, 3.0)
    assert routes.changed_at == 3.0
    assert not routes.update()
    assert routes.found == found - {(0, 8), (8, 0)}


def test_a_latency_that_is_nearly_the_same_is_no_news():
    routes = InferredRoutes(4)
    routes.record((0, 1), 0.02, 1.0)
    routes.record((0, 1), 0.0203, 2.0)
    assert routes.changed_at == 1.0
    routes.record((0, 1), 0.021, 3.0)
    assert routes.changed_at == 3.0


def test_sites_of_several_nodes_in_a_row():
    # Three sites of three nodes: from the first to the third by way of the second.
    apart = {0: 0.0002, 1: 0.02, 2: 0.04}
    took = {(one, other): apart[abs(one // 3 - other // 3)] for one, other in permutations(range(9), 2)}
    found = routed_pairs(took, 9)
    assert found == {pair for pair in took if {pair[0] // 3, pair[1] // 3} == {0, 2}}
