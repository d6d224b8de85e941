from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.errors import UsageError
from netstorm.lab.emulation.layout import Cable, NetworkLayout, checked_name
from netstorm.topology.network import Link, Network, Node, Rank, Routing


def line(size: int) -> Network:
    """Return ranks in a row, each linked with the next, both ways."""
    pairs = [pair for rank in range(size - 1) for pair in ((rank, rank + 1), (rank + 1, rank))]
    return Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(size)),
        links=tuple(Link(source=Rank(one), target=Rank(other), rate=1e6) for one, other in pairs),
    )


def layout(network: Network) -> NetworkLayout:
    return NetworkLayout(name="test", network=network)


def test_addresses_are_those_of_one_private_network_without_0_and_255_at_the_end():
    of = layout(line(600)).address
    assert [of(Rank(rank)) for rank in (0, 1, 253, 254, 599)] == [
        "10.78.0.1",
        "10.78.0.2",
        "10.78.0.254",
        "10.78.1.1",
        "10.78.2.92",
    ]
    assert len({of(Rank(rank)) for rank in range(600)}) == 600


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_that_is_not_there_has_no_address_and_the_message_says_which_there_are(rank):
    with pytest.raises(UsageError, match="has ranks 0 to 2"):
        layout(line(3)).address(Rank(rank))


def test_two_directions_are_one_cable_whose_devices_say_where_they_lead():
    assert layout(line(3)).cables() == (Cable(Rank(0), Rank(1)), Cable(Rank(1), Rank(2)))
    assert Cable(Rank(0), Rank(1)).device(Rank(0)) == "to-r1"
    assert Cable(Rank(0), Rank(1)).device(Rank(1)) == "to-r0"


@given(st.integers(2, 6), st.data())
def test_routes_follow_the_shortest_hops_whatever_the_networks_own_routing_is(size, data):
    whole = line(size)
    extra = data.draw(st.sets(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=6))
    there = {(link.source, link.target) for link in whole.links}
    links = [
        *whole.links,
        *(
            Link(source=Rank(one), target=Rank(other), rate=1e6)
            for one, other in extra
            if one != other and (one, other) not in there
        ),
    ]
    overlay = Network(nodes=whole.nodes, links=tuple(links))
    underlay = Network(nodes=whole.nodes, links=tuple(links), routing=Routing.UNDERLAY)
    for rank, routes in enumerate(layout(overlay).routes()):
        assert [route.target for route in routes] == [other for other in range(size) if other != rank]
        for route in routes:
            assert underlay.route(Rank(rank), route.target)[0].target == route.via


def test_the_hosts_file_names_every_rank_and_gives_the_machines_own_name_to_its_rank():
    assert layout(line(3)).hosts(Rank(1), "machine") == (
        "127.0.0.1 localhost\n10.78.0.1 r0\nfd4e:5354::1 r0v6\n10.78.0.2 r1 machine\nfd4e:5354::2 r1v6\n"
        "10.78.0.3 r2\nfd4e:5354::3 r2v6\n"
    )


def test_a_machine_called_localhost_keeps_that_name_for_the_loopback_address():
    assert "10.78.0.2 r1\n" in layout(line(3)).hosts(Rank(1), "localhost")


@pytest.mark.parametrize("name", ["", "a/b", "-x", "a" * 33, "a b", "A"])
def test_names_that_cannot_be_those_of_files_and_namespaces_are_refused(name):
    with pytest.raises(UsageError, match="expected at most 32 of a-z"):
        checked_name(name)
