"""Which address a process advertises, and on which it listens, however names are resolved on its machine."""

from __future__ import annotations

import socket

import pytest

from netstorm.addresses import is_address, is_loopback
from netstorm.errors import SettingsError
from netstorm.pslite import host_addresses as addresses

OWN = ["10.77.0.1", "2001:db8::5"]
NAMES = {
    "nodea": ["127.0.1.1"],
    "nodeb": ["10.77.0.2"],
    "both": ["2001:db8::9", "10.77.0.9"],
    "localhost": ["::1", "127.0.0.1"],
}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A Debian host: its own name means 127.0.1.1. All IPv4 addresses have a route, and none of IPv6."""

    def look_up(host, port, *_, **__):
        if host not in NAMES and not is_address(host):
            raise socket.gaierror(-2, "Name or service not known")
        found = NAMES.get(host, [host])
        families = [socket.AF_INET6 if ":" in one else socket.AF_INET for one in found]
        return [(family, 1, 6, "", (one, port or 0)) for family, one in zip(families, found, strict=True)]

    def route(address):
        if address.startswith("127.") or address == "::1":
            return address if address == "::1" else "127.0.0.1"
        return None if ":" in address else "10.77.0.1"

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(addresses, "source_towards", route)
    monkeypatch.setattr(addresses, "own_addresses", lambda: list(OWN))


def advertised(**values):
    return addresses.advertised_host(
        **{"node_host": "", "interface": "", "scheduler_host": "nodeb", "for_others": True, **values}
    )


@pytest.mark.parametrize(
    ("values", "host"),
    [
        pytest.param({}, "10.77.0.1", id="of its route to the scheduler"),
        pytest.param({"scheduler_host": "nodea"}, "10.77.0.1", id="not its own name's, beside the scheduler"),
        pytest.param({"scheduler_host": "nodea", "for_others": False}, "127.0.0.1", id="only this machine"),
        pytest.param({"bind_host": "10.77.0.3"}, "10.77.0.3", id="what is listened on"),
        pytest.param({"bind_host": "*"}, "10.77.0.1", id="all"),
        pytest.param(
            {"bind_host": "10.77.0.3", "node_host": "203.0.113.7"}, "203.0.113.7", id="what is given"
        ),
    ],
)
def test_a_node_advertises_an_address_at_which_others_reach_it(values, host):
    assert advertised(**values) == host


@pytest.mark.parametrize(
    ("name", "for_others", "host"),
    [
        ("nodea", True, "*"),  # its name is loopback at home
        ("nodea", False, "127.0.1.1"),
        ("both", True, "*"),
        ("both", False, "10.77.0.9"),
        ("10.77.0.1", True, "10.77.0.1"),
        ("nodeb", True, "10.77.0.2"),
        ("127.0.0.1", True, "127.0.0.1"),
        ("::1", True, "::1"),
        ("localhost", True, "127.0.0.1"),
    ],
)
def test_the_scheduler_of_one_address_listens_on_that_alone_and_of_several_on_all(name, for_others, host):
    assert addresses.listening_host("", name, for_others=for_others) == host


@pytest.mark.parametrize(("name", "host"), [("nodea", "10.77.0.1"), ("localhost", "127.0.0.1")])
def test_a_name_that_is_loopback_here_is_this_machine(name, host):
    assert addresses.resolve(name, "DMLC_PS_ROOT_URI", for_others=True) == host


def test_of_a_name_the_first_address_with_a_route_is_used(monkeypatch):
    assert addresses.resolve("both", "DMLC_PS_ROOT_URI") == "10.77.0.9"
    monkeypatch.setattr(addresses, "source_towards", lambda one: "2001:db8::5" if ":" in one else None)
    assert addresses.resolve("both", "DMLC_PS_ROOT_URI") == "2001:db8::9"


def test_a_name_without_an_address_is_an_error_that_says_where_it_is_from():
    with pytest.raises(SettingsError, match="DMLC_PS_ROOT_URI='nowhere': no address for that name"):
        advertised(scheduler_host="nowhere")


def test_an_address_without_a_route_is_an_error_that_says_what_to_set():
    with pytest.raises(SettingsError, match="no route to 2001:db8::7; set DMLC_NODE_HOST"):
        advertised(scheduler_host="2001:db8::7")


def test_own_addresses_are_none_that_mean_another_machine_elsewhere(monkeypatch):
    monkeypatch.undo()
    found = addresses.own_addresses()
    assert not [one for one in found if is_loopback(one) or one.startswith("fe80")]


def test_processes_of_one_machine_and_network_have_one_number():
    assert addresses.machine_number() == addresses.machine_number() > 0
