from __future__ import annotations

import pytest

from netstorm.cli.launch.hosts import place, read_hostfile
from netstorm.errors import UsageError


def placed(text: str) -> list[tuple[int, str]]:
    return [(each.rank, each.host) for each in place(text, "hosts")]


def test_ranks_are_given_in_the_order_of_the_file():
    assert placed("tokyo\n\n# a comment\nalice@paris  # another\n") == [(0, "tokyo"), (1, "alice@paris")]


def test_a_host_with_slots_gets_as_many_nodes():
    assert placed("tokyo slots=2\nparis") == [(0, "tokyo"), (1, "tokyo"), (2, "paris")]


def test_ranks_that_are_asked_for_are_given_and_the_others_get_what_is_left():
    assert placed("tokyo\nparis rank=0\ndenver slots=2 rank=2") == [
        (1, "tokyo"),
        (0, "paris"),
        (2, "denver"),
        (3, "denver"),
    ]


def test_site_and_address_are_those_of_the_line():
    here, there = place("tokyo site=east address=203.0.113.7\nparis site=west", "hosts")
    assert (here.site, here.address) == ("east", "203.0.113.7")
    assert (there.site, there.address) == ("west", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hosts: no hosts in it"),
        ("tokyo\nparis slots=0", "hosts, line 2: 'slots=0': expected a whole number, at least 1"),
        ("tokyo slots=two", "hosts, line 1: 'slots=two': expected a whole number"),
        ("tokyo rank=1", "hosts, line 1: rank=1: expected a rank from 0 to 0, since the file has 1 nodes"),
        ("tokyo rank=1\nparis rank=1", "hosts, line 2: rank 1 is taken by line 1 (tokyo)"),
        ("tokyo slots=2 rank=0\nparis rank=1", "hosts, line 2: rank 1 is taken by line 1 (tokyo)"),
        ("tokyo paris", "hosts, line 1: 'paris': expected one of slots=, rank=, site=, address="),
        ("tokyo port=22", "hosts, line 1: 'port=22': expected one of slots=, rank=, site=, address="),
        ("tokyo rank=0 rank=0", "hosts, line 1: rank= is there twice"),
        ("tokyo site=", "hosts, line 1: 'site=': expected a name"),
        ("-oProxyCommand=boom", "hosts, line 1: '-oProxyCommand=boom' is no host"),
        ("alice@-oProxyCommand", "hosts, line 1: 'alice@-oProxyCommand' is no host"),
    ],
)
def test_a_wrong_line_is_an_error_that_names_it_and_says_what_is_allowed(text, message):
    with pytest.raises(UsageError) as caught:
        place(text, "hosts")
    assert str(caught.value).startswith(message)


def test_an_ipv6_address_may_have_brackets_and_ssh_gets_it_without():
    first, second = place("alice@[2001:db8::5] address=[2001:db8::6]\n2001:db8::7\n", "hosts")
    assert (first.host, first.address) == ("alice@2001:db8::5", "2001:db8::6")
    assert second.host == "2001:db8::7"


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere: cannot read the host file: .*No such file"):
        read_hostfile(tmp_path / "nowhere")


def test_a_host_file_for_millions_of_nodes_is_an_error_and_takes_no_memory():
    with pytest.raises(UsageError, match="1999998 nodes: expected at most 4096; check slots="):
        placed("tokyo slots=999999\nparis slots=999999")
