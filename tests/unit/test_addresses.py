"""HOST:PORT is written and read in one way, and it is known which addresses only this machine can reach."""

from __future__ import annotations

import pytest

from netstorm.addresses import host_port, is_loopback, split_host_port


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost", "::ffff:127.0.0.1"])
def test_addresses_of_this_machine_alone_are_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "*",
        "0.0.0.0",
        "::",
        "10.0.0.1",
        "fe80::1%eth0",
        "node1",
        "127.0.0.1.example.org",
        "::ffff:10.0.0.1",
    ],
)
def test_what_others_may_reach_is_not(host):
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "node-1.example.org", "::1", "2001:db8::7", "fe80::1%eth0"])
def test_what_is_written_is_read_again(host):
    assert split_host_port(host_port(host, 9091)) == (host, 9091)


def test_an_ipv6_address_stands_in_brackets_before_a_port():
    assert host_port("::1", 9091) == "[::1]:9091"
    assert host_port("10.0.0.1", 9091) == "10.0.0.1:9091"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node1", "node1", 9),
        ("node1:7", "node1", 7),
        ("::1", "::1", 9),
        ("[::1]", "::1", 9),
        ("[::1]:7", "::1", 7),
    ],
)
def test_without_a_port_there_is_the_default(text, host, port):
    assert split_host_port(text, 9) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node1",
        ":9091",
        "node1:",
        "node1:0",
        "node1:65536",
        "node1:x",
        "[::1]",
        "a b:1",
        "[node1",
        "x:y:1",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        split_host_port(text)


def test_an_ipv6_address_without_brackets_is_refused_with_the_right_form():
    with pytest.raises(ValueError, match=r"stands in brackets: \[2001:db8::1\]:9091"):
        split_host_port("2001:db8::1:9091")
