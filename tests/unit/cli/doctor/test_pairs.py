"""What is wrong between hosts, by measurements that are handed over."""

from __future__ import annotations

import pytest

from netstorm.cli.doctor.findings import Severity, firewall_hint
from netstorm.cli.doctor.pairs import judge_hosts, network_of, targets_of
from netstorm.topology.files import dump_network, parse_network
from tests.unit.cli.doctor.facts import door, hosts, result

BETWEEN = [
    ({"problem": "silent", "text": "no answer within 5 s"}, {}, "error", "TCP port", "is closed: no answer"),
    ({"problem": "refused", "text": "refused"}, {}, "error", "TCP port", "10.0.0.1:9100 is closed: refused"),
    ({"problem": "unreachable", "text": "no route"}, {}, "error", "address", "no way to 10.0.0.1:9100"),
    ({"problem": "stranger", "text": "it says SSH"}, {}, "error", "address", "it says SSH"),
    ({"problem": "key", "text": "it has another key"}, {}, "error", "key", "another key"),
    (
        {"problem": "refused", "text": "refused", "place": "10.0.0.1:50001"},
        {"doors": [door(1, advertised_port=50001)]}, "error", "NAT", "10.0.0.1:50001, which host1 advertises",
    ),
    (
        {"problem": "stranger", "text": "another", "place": "127.0.0.1:9100"},
        {"doors": [door(1, advertised="127.0.0.1")]}, "error", "address", "which means host0 itself",
    ),
    ({"stalls": True, "path_mtu": 1400}, {}, "error", "MTU", "more than 1400 bytes are lost, and host0"),
    ({"stalls": True, "path_mtu": None}, {}, "error", "MTU", "small messages do"),
    ({"stalls": True}, {}, "warning", "rate", "very slow, or loses much"),
    ({"udp": False}, {"doors": [door(1, scheduler=True)]}, "warning", "UDP port", "the time cannot"),
    ({"udp": False}, {"udp_needed": True}, "warning", "UDP port", "late sums"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "target", "severity", "check", "says"), BETWEEN)
def test_what_is_wrong_on_the_way_is_named_with_what_to_do(changes, target, severity, check, says):
    pair = hosts({}, target)
    pair[0].results = [result(1, **changes)]
    pair[1].results = [result(0)]
    wrong = [one for one in judge_hosts(pair) if one.severity != Severity.OK]
    assert [(one.severity.value, one.check, one.where) for one in wrong] == [
        (severity, check, "host0 -> host1")
    ]
    assert says in wrong[0].what
    assert wrong[0].do


DIFFERENT = [
    ({"protocol": 4, "release": "0.3.0"}, {"protocol", "release"}),
    ({"release": "0.2.1"}, {"release"}),
    ({"python": "3.12.1"}, {"python"}),
    ({"versions": {"torch": "2.14"}}, {"torch"}),
    ({"versions": {"mxnet": "1.9.0"}}, {"mxnet"}),
    ({"job_wide": {"CHUNK_SIZE": "4096"}}, {"settings"}),
    ({"secured": False}, {"key"}),
]


@pytest.mark.parametrize(("changes", "checks"), DIFFERENT)
def test_hosts_that_differ_are_named(changes, checks):
    findings = judge_hosts(hosts({}, changes))
    assert {one.check for one in findings if one.where == "host1"} == checks
    assert len(findings) == len(checks)


def test_datagrams_that_nobody_needs_may_be_lost():
    pair = hosts({}, {})
    pair[0].results = [result(1, udp=False)]
    assert {one.severity for one in judge_hosts(pair)} == {Severity.OK}


def test_clocks_are_compared_with_the_first_host_s_whoever_has_measured():
    three = hosts({}, {}, {})
    three[0].results = [result(1, clock_offset=-10.0)]
    three[2].results = [result(0, clock_offset=5.0), result(1, clock_offset=-5.0)]
    clocks = {one.where: one.what for one in judge_hosts(three) if one.check == "clock"}
    assert clocks == {
        "host1": "its clock is 10 s behind that of host0",
        "host2": "its clock is 5 s behind that of host0",
    }


def test_an_offset_within_half_a_round_trip_says_nothing():
    pair = hosts({}, {})
    pair[0].results = [result(1, clock_offset=1.5, rtt=2.0)]
    assert {one.severity for one in judge_hosts(pair)} == {Severity.OK}


def test_two_hosts_that_each_take_the_scheduler_s_address_for_their_own_are_named():
    own = {"doors": [door(0, scheduler=True)], "scheduler": "127.0.0.1"}
    (finding,) = judge_hosts(hosts(own, own, {}))
    assert (finding.check, finding.where) == ("two schedulers", "host0 and host1")


def test_a_host_that_has_said_nothing_is_named_and_all_others_are_judged():
    pair = hosts({}, {"release": "0.1"})
    pair[0].facts, pair[0].problem = None, "ssh: no route to host"
    (finding,) = judge_hosts(pair)
    assert (finding.check, finding.where, finding.what) == ("host", "host0", "ssh: no route to host")


def test_a_host_that_is_well_but_has_not_said_what_it_finds_is_named():
    pair = hosts({}, {})
    pair[1].problem = "it has not said what it finds: no answer in time"
    (finding,) = judge_hosts(pair)
    assert (finding.severity, finding.check, finding.where) == (Severity.ERROR, "host", "host1")


def test_each_port_of_each_other_host_is_a_target_and_one_of_each_is_measured():
    three = hosts({}, {"doors": [door(1, scheduler=True, port=9091, advertised_port=9091), door(1)]}, {})
    three[2].facts, three[2].given = None, ("10.0.0.2", 9100)
    targets = targets_of(three, 0)
    assert [(one.rank, one.host, one.port, one.main) for one in targets] == [
        (1, "10.0.0.1", 9100, True), (1, "10.0.0.1", 9091, False), (2, "10.0.0.2", 9100, True),
    ]  # fmt: skip


def test_the_network_file_has_each_rank_and_what_was_measured_in_each_direction():
    pair = hosts({}, {})
    pair[0].nodes = 2
    pair[0].results = [result(0, rtt=0.0002, rate=1e10), result(1, rate=94.1234e6)]
    pair[1].results = [result(0, rtt=0.05, rate=20e6)]
    network = parse_network(dump_network(network_of(pair)))
    assert {(link.source, link.target): (link.rate, link.latency) for link in network.links} == {
        (0, 1): (1e10, 0.0001), (1, 0): (1e10, 0.0001),
        (0, 2): (94.1e6, 0.015), (1, 2): (94.1e6, 0.015),
        (2, 0): (20e6, 0.025), (2, 1): (20e6, 0.025),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("firewalls", "command"),
    [
        (["ufw", "nft"], "sudo ufw allow from 10.0.0.1 to any port 9100 proto tcp"),
        (["firewall-cmd"], "sudo firewall-cmd --add-port=9100/tcp"),
        (
            ["nft", "iptables"],
            "sudo nft insert rule inet filter input ip saddr 10.0.0.1 tcp dport 9100 accept",
        ),
        (["iptables"], "sudo iptables -I INPUT -p tcp -s 10.0.0.1 --dport 9100 -j ACCEPT"),
        ([], "open TCP 9100 from 10.0.0.1, in the cloud's security group"),
    ],
)
def test_the_command_that_opens_a_port_is_that_of_the_firewall_there(firewalls, command):
    assert firewall_hint(firewalls, "tcp", 9100, "10.0.0.1").startswith(command)


def test_a_port_is_opened_for_an_ipv6_address_with_the_programs_of_ipv6():
    assert "ip6 saddr fd00::1 udp dport 9091" in firewall_hint(["nft"], "udp", 9091, "fd00::1")
    assert firewall_hint(["iptables"], "udp", 9091, "fd00::1").startswith("sudo ip6tables -I INPUT -p udp")
