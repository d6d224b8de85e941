"""Networks, and random ones."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import Unreachable, UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.topology import Change, Link, Network, NetworkMismatch, Node, Rank, Routing
from netstorm.topology.files import dump_network, parse_network
from netstorm.topology.network import FAMILIES, generate

# --------------------------------------------------------------------------------------------------- network
# Networks: what may talk to what, over which links, and when.


def nodes(count: int) -> tuple[Node, ...]:
    return tuple(Node(rank=Rank(rank)) for rank in range(count))


def link(source: int, target: int, rate: float = 1e6, latency: float = 0.0, loss: float = 0.0) -> Link:
    return Link(source=Rank(source), target=Rank(target), rate=rate, latency=latency, loss=loss)


def both_ways(*links: Link) -> tuple[Link, ...]:
    return tuple(way for one in links for way in (one, replace(one, source=one.target, target=one.source)))


LINE = both_ways(link(0, 1, 100e6, 0.01, 0.1), link(1, 2, 20e6, 0.02, 0.5), link(2, 3, 50e6, 0.03))


def test_a_network_is_a_graph_of_networkx_too():
    network = generate("cloud", 4, 1)
    found = network.graph()
    assert list(found.nodes(data="egress")) == [(node.rank, node.egress) for node in network.nodes]
    assert [(a, b, dict(edge)) for a, b, edge in found.edges(data=True)] == [
        (one.source, one.target, {"rate": one.rate, "latency": one.latency, "loss": one.loss})
        for one in network.links
    ]


def graph(network: Network) -> nx.DiGraph[int]:
    found: nx.DiGraph[int] = nx.DiGraph()
    found.add_nodes_from(network.ranks)
    found.add_edges_from((one.source, one.target) for one in network.links)
    return found


def test_a_uniform_network_is_a_mesh_of_equal_links():
    network = Network.uniform(3, rate=5e6, latency=0.25)

    assert network.size == 3
    assert network.ranks == (0, 1, 2)
    assert {(one.source, one.target) for one in network.links} == set(network.pairs())
    assert len(network.pairs()) == 6
    assert {(one.rate, one.latency, one.loss) for one in network.links} == {(5e6, 0.25, 0.0)}


def test_one_node_is_a_network():
    network = Network.uniform(1)

    assert network.size == 1
    assert network.neighbours(Rank(0)) == ()
    assert network.separated() is None


def test_in_an_overlay_only_linked_ranks_talk():
    network = Network(nodes=nodes(4), links=LINE)

    assert network.neighbours(Rank(1)) == (0, 2)
    assert network.link(Rank(0), Rank(1)) is LINE[0]
    assert network.route(Rank(0), Rank(1)) == (LINE[0],)
    with pytest.raises(Unreachable, match=r"^rank 0 has no link to rank 2, only to rank 1$"):
        network.link(Rank(0), Rank(2))


def test_over_an_underlay_all_ranks_talk_and_share_the_links_on_the_way():
    network = Network(nodes=nodes(4), links=LINE, routing=Routing.UNDERLAY)

    assert network.neighbours(Rank(1)) == (0, 2, 3)
    assert network.route(Rank(0), Rank(2)) == (LINE[0], LINE[2])
    seen = network.link(Rank(0), Rank(2))
    assert (seen.source, seen.target, seen.rate) == (0, 2, 20e6)
    assert seen.latency == pytest.approx(0.03)
    assert seen.loss == pytest.approx(1 - 0.9 * 0.5)


def test_an_underlay_route_takes_the_lowest_rank_of_equally_near_ones():
    square = both_ways(link(0, 1), link(0, 2), link(1, 3), link(2, 3))
    network = Network(nodes=nodes(4), links=square, routing=Routing.UNDERLAY)

    assert [one.target for one in network.route(Rank(0), Rank(3))] == [1, 3]


@given(networks(routing=Routing.UNDERLAY))
def test_an_underlay_route_has_as_few_hops_as_there_can_be(network: Network):
    hops = dict(nx.all_pairs_shortest_path_length(graph(network)))

    for source, target in network.pairs():
        route = network.route(source, target)
        assert len(route) == hops[source][target]
        assert route[0].source == source
        assert route[-1].target == target
        assert all(one.target == next_.source for one, next_ in itertools.pairwise(route))


@given(networks(routing=Routing.UNDERLAY))
def test_what_joins_an_underlay_route_stays_on_it(network: Network):
    for source, target in network.pairs():
        route = network.route(source, target)
        assert network.route(route[0].target, target) == route[1:]


def test_throughput_is_limited_by_the_access_caps_of_both_ends():
    ends = (Node(rank=Rank(0), egress=30e6), Node(rank=Rank(1)), Node(rank=Rank(2), ingress=5e6))
    network = Network(nodes=ends, links=both_ways(link(0, 1, 100e6), link(1, 2, 20e6)))

    assert network.throughput(Rank(0), Rank(1)) == 30e6
    assert network.throughput(Rank(1), Rank(0)) == 100e6
    assert network.throughput(Rank(1), Rank(2)) == 5e6
    assert network.throughput(Rank(2), Rank(1)) == 20e6


def test_changes_are_applied_in_time_and_only_to_what_they_name():
    network = Network(
        nodes=nodes(2),
        links=both_ways(link(0, 1, 100e6, 0.01)),
        changes=(
            Change(at=20, source=Rank(0), target=Rank(1), rate=50e6),
            Change(at=10, source=Rank(0), target=Rank(1), rate=40e6, latency=0.5),
            Change(at=30, source=Rank(0), target=Rank(1), latency=0.75, loss=0.25),
        ),
    )

    def there(time: float) -> tuple[float, float, float]:
        seen = network.at(time).link(Rank(0), Rank(1))
        return seen.rate, seen.latency, seen.loss

    assert there(9.999) == (100e6, 0.01, 0.0)
    assert there(10) == (40e6, 0.5, 0.0)
    assert there(20) == (50e6, 0.5, 0.0)
    assert there(30) == (50e6, 0.75, 0.25)
    assert network.at(30).link(Rank(1), Rank(0)) == link(1, 0, 100e6, 0.01)
    assert [change.at for change in network.at(10).changes] == [20, 30]


@given(networks(changing=True), st.lists(st.floats(0, 4000), min_size=1, max_size=4).map(sorted))
def test_going_through_time_in_steps_ends_where_one_step_does(network: Network, times: list[float]):
    stepped = network
    for time in times:
        stepped = stepped.at(time)

    assert stepped == network.at(times[-1])


@given(networks(changing=True), st.randoms(use_true_random=False))
def test_networks_are_equal_whatever_order_links_and_changes_came_in(network: Network, rng: random.Random):
    links, changes = list(network.links), list(network.changes)
    rng.shuffle(links)
    rng.shuffle(changes)

    assert replace(network, links=tuple(links), changes=tuple(changes)) == network


@st.composite
def maybe_disconnected(draw: st.DrawFn) -> Network:
    network = draw(networks(max_nodes=6))
    kept = draw(st.lists(st.sampled_from(network.links), unique=True)) if network.links else []
    return replace(network, links=tuple(kept))


@given(maybe_disconnected())
def test_separated_names_two_sides_with_no_path_exactly_if_there_are_such(network: Network):
    parts = network.separated()

    if parts is None:
        assert nx.is_strongly_connected(graph(network))
    else:
        before, after = parts
        assert sorted(before + after) == list(network.ranks)
        assert before
        assert after
        assert not [one for one in network.links if one.source in before and one.target in after]


@given(maybe_disconnected())
def test_what_has_no_path_is_nobodys_neighbour_in_an_underlay(network: Network):
    network = replace(network, routing=Routing.UNDERLAY)
    descendants = {rank: nx.descendants(graph(network), rank) for rank in network.ranks}

    for source in network.ranks:
        assert set(network.neighbours(source)) == descendants[source]
        for target in set(network.ranks) - descendants[source] - {source}:
            with pytest.raises(Unreachable, match=f"^there is no path from rank {source} to rank {target}$"):
                network.link(source, target)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Network(nodes=(), links=()), "a network without nodes: expected at least one"),
        (lambda: Network.uniform(0), "a network without nodes: expected at least one"),
        (
            lambda: Network(nodes=(Node(rank=Rank(0)), Node(rank=Rank(2))), links=()),
            "rank 2: expected 1, since ranks are 0 to 1 without gaps",
        ),
        (
            lambda: Network(nodes=nodes(2), links=(link(0, 2),)),
            "link 0→2: there is no rank 2; ranks are 0 to 1",
        ),
        (lambda: Network(nodes=nodes(2), links=(link(0, 1), link(0, 1))), "link 0→1 is given twice"),
        (
            lambda: Network(
                nodes=nodes(2), links=(), changes=(Change(at=1, source=Rank(0), target=Rank(1), loss=0),)
            ),
            "a change of link 0→1, which does not exist",
        ),
        (
            lambda: Network(
                nodes=nodes(2),
                links=(link(0, 1),),
                changes=(Change(at=1, source=Rank(0), target=Rank(1), loss=0),) * 2,
            ),
            "link 0→1 is changed twice at 1s",
        ),
        (lambda: link(1, 1), "link 1→1: a link joins two different ranks"),
        (
            lambda: link(0, 1, rate=0),
            "rate of link 0→1 is 0: expected more than 0: from 1bit/s to 1000Tbit/s",
        ),
        (
            lambda: link(0, 1, rate=math.nan),
            "rate of link 0→1 is nan: expected more than 0: from 1bit/s to 1000Tbit/s",
        ),
        (lambda: link(0, 1, latency=-0.5), "latency of link 0→1 is -0.5: expected from 0s to 1h"),
        (lambda: link(0, 1, loss=1.0), "loss of link 0→1 is 1.0: expected at least 0% and less than 100%"),
        (
            lambda: Node(rank=Rank(3), ingress=math.inf),
            "ingress of rank 3 is inf: expected more than 0: from 1bit/s to 1000Tbit/s",
        ),
        (
            lambda: Node(rank=Rank(3), site="a b"),
            "site 'a b': expected a name of at most 64 letters, without spaces, commas, ; and /",
        ),
        (
            lambda: Change(at=-1, source=Rank(0), target=Rank(1)),
            "time of the change of link 0→1 is -1: expected from 0s to 1e9s",
        ),
        (
            lambda: Change(at=1, source=Rank(0), target=Rank(1)),
            "a change of link 0→1 to nothing: expected a new rate, latency or loss",
        ),
        (
            lambda: Change(at=1, source=Rank(0), target=Rank(1), rate=0),
            "new rate of link 0→1 is 0: expected more than 0: from 1bit/s to 1000Tbit/s",
        ),
    ],
)
def test_what_is_no_network_is_refused_by_name(make, message: str):
    with pytest.raises(UsageError) as caught:
        make()

    assert str(caught.value) == message


def test_a_misfit_is_the_very_object_that_was_given():
    second = link(0, 1, rate=7e6)

    with pytest.raises(NetworkMismatch) as caught:
        Network(nodes=nodes(2), links=(link(0, 1), link(1, 0), second))

    assert caught.value.item is second


@pytest.mark.parametrize("routing", Routing)
def test_nobody_has_a_link_to_itself(routing: Routing):
    with pytest.raises(
        UsageError, match=r"^rank 1 (needs no link to itself|has no link to rank 1, only to rank)"
    ):
        replace(Network.uniform(3), routing=routing).link(Rank(1), Rank(1))


# ------------------------------------------------------------------------------------------------ generators
# Random networks: connected, as described, and the same for a seed.


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
