"""Which addresses only this machine can reach."""

from __future__ import annotations

import pytest

from netstorm.addresses import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_addresses_of_this_machine_alone_are_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "*", "0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "node1", "127.0.0.1.example.org"]
)
def test_what_others_may_reach_is_not(host):
    assert not is_loopback(host)
