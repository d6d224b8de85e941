"""A network file from what a job has measured."""

from __future__ import annotations

import msgspec
import pytest

from netstorm.errors import UsageError
from netstorm.lab.emulation.recorded import recorded_network
from netstorm.scheduler.build_status import build_status
from netstorm.scheduler.status import LinkStatus
from netstorm.topology.files import dump_network, parse_network
from tests.unit.scheduler.driving import running

BEGIN = 1_700_000_000.0


def link(source, target, rate, latency=0.02, *, measured=True):
    return LinkStatus(
        source=source,
        target=target,
        rate=rate,
        measured=measured,
        error=0.1,
        latency_s=latency,
        age_s=1.0,
        censored=False,
    )


def status(after, *links):
    driven = running(3)
    found = build_status(driven.machine.snapshot(driven.now), time=0.0, scheduler="h:1", http="h:2")
    nodes = tuple(
        msgspec.structs.replace(node, egress=123_456_789.0 if node.rank == 1 else None)
        for node in found.nodes
    )
    return msgspec.structs.replace(found, time=BEGIN + after, links=links, nodes=nodes)


def test_rates_are_those_first_measured_and_later_ones_are_changes_if_they_are_others():
    network = recorded_network(
        [
            status(0.0, link(0, 1, 50_004_321.0), link(1, 0, 100e6, measured=False)),
            status(5.0, link(0, 1, 52e6), link(1, 0, 80e6)),
            status(10.04, link(0, 1, 20e6), link(1, 0, 81e6, latency=0.0205)),
            status(
                15.0, link(0, 1, 20.5e6), link(1, 0, 80e6, latency=0.08), link(1, 2, 10e6), link(2, 0, 9e6)
            ),
        ]
    )
    assert [(one.source, one.target, one.rate) for one in network.links] == [
        (0, 1, 50_000_000.0),
        (1, 0, 80e6),
        (1, 2, 10e6),
        (2, 0, 9e6),
    ]
    assert [(one.at, one.source, one.rate, one.latency) for one in network.changes] == [
        (10.0, 0, 20e6, 0.02),
        (15.0, 1, 80e6, 0.08),
    ]
    assert [node.site for node in network.nodes] == ["site0", "site1", "site2"]
    assert network.nodes[1].egress == 123_500_000.0
    assert parse_network(dump_network(network)) == network


def test_without_measurements_there_is_no_network():
    with pytest.raises(UsageError, match="no status"):
        recorded_network([])
    with pytest.raises(UsageError, match="no link of this job has been measured yet"):
        recorded_network([status(0.0, link(0, 1, 1e6, measured=False))])


def test_a_rank_that_has_links_and_no_node_is_named():
    with pytest.raises(UsageError, match=r"ranks \[3\] have links"):
        recorded_network([status(0.0, link(0, 3, 1e6))])


def test_ranks_that_no_measured_link_connects_are_named():
    with pytest.raises(UsageError, match=r"from ranks \[1\] to ranks \[0\]: record for longer"):
        recorded_network([status(0.0, link(0, 1, 1e6))])
