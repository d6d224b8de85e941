"""What people and programs see of a job: snapshots, their JSON, and their metrics."""

from __future__ import annotations

import dataclasses
import logging

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol import messages as m
from netstorm.protocol.messages import NodeStatus
from netstorm.scheduler.build_status import build_status, metrics
from netstorm.scheduler.snapshot import MOST_CHARACTERS, Announcements
from netstorm.scheduler.status import JobStatus, tree_traffic
from netstorm.topology.files import parse_network
from tests.unit.scheduler.driving import Driven, key, running, star


def status_of(driven):
    return build_status(driven.machine.snapshot(driven.now), time=0.0, scheduler="h:1", http="h:2")


def report(**changed):
    values = {
        "rounds": 12,
        "round_s": 0.5,
        "waited_s": 3.0,
        "bytes_sent": 1000,
        "clock_offset": 0.05,
        "clock_drift": 5e-5,
        "detoured": 2,
        "last_round": 5,
        "clock_error": 0.001,
    }
    return m.NodeStatus(**{**values, **changed})


def samples(status):
    """Return the samples that Prometheus reads in a status' text, by name and labels."""
    registry = CollectorRegistry()

    class Once:
        def collect(self):
            return metrics(status)

    registry.register(Once())
    text = generate_latest(registry).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_while_nodes_come_those_who_are_here_and_who_is_missing_are_seen():
    driven = Driven(3)
    driven.join("n0", 2, site="denver")
    driven.join("n1")
    status = status_of(driven)
    assert status.phase == "gathering"
    assert [(node.rank, node.host, node.site, node.state) for node in status.nodes] == [
        (2, "n0", "denver", "joining"),
        (None, "n1", "", "joining"),
    ]
    assert "waiting for 1 of 3 nodes" in status.text


def test_a_node_s_last_report_and_its_pace_are_seen():
    driven = running(2)
    driven.say(1, report(waited_s=3.0, bytes_sent=1000))
    driven.now += 2.0
    driven.say(1, report(waited_s=4.0, bytes_sent=251_000, rounds=20, last_round=9))
    node = status_of(driven).nodes[1]
    assert (node.rounds, node.last_round, node.waited_s, node.bytes_sent) == (20, 9, 4.0, 251_000)
    assert (node.waiting, node.sending) == (0.5, 1e6)
    assert (node.clock_offset_s, node.clock_drift, node.clock_error_s, node.detoured) == (
        0.05,
        5e-5,
        0.001,
        2,
    )


def test_what_nobody_has_said_and_a_clock_that_is_not_synchronised_are_not_known():
    driven = running(2)
    node = status_of(driven).nodes[0]
    assert (node.rounds, node.last_round, node.round_s, node.waiting, node.egress) == (None,) * 5
    assert (node.clock_offset_s, node.clock_drift) == (None, None)
    driven.say(0, report(clock_error=-1.0, clock_offset=123.0))
    node = status_of(driven).nodes[0]
    assert (node.clock_offset_s, node.clock_drift) == (None, None)


def test_keys_and_what_a_node_waits_for_and_when_it_was_heard_are_seen():
    driven = running(2)
    driven.say(0, m.RegisterKeys(keys=(key("w", (10, 20)), key("b", (20,)))))
    driven.say(0, m.Heartbeat(busy="barrier 3"))
    driven.now += 1.5
    status = status_of(driven)
    assert (status.keys.count, status.keys.bytes) == (2, 880)
    node = status.nodes[0]
    assert (node.waits_for, node.heard_s, node.state) == ("barrier 3", 1.5, "running")


def test_nodes_that_finish_and_leave_are_seen():
    driven = running(3)
    driven.say(0, m.Finished(last_rounds={}))
    driven.say(1, m.Failed(reason="out of memory"))
    status = status_of(driven)
    assert [node.state for node in status.nodes] == ["finished", "left", "running"]
    assert status.phase == "failed"
    assert "out of memory" in status.text


def test_the_policy_is_seen_with_its_trees_and_the_reasons_of_those_before():
    driven = running(3)
    driven.now += 10.0
    driven.tick()
    driven.install(msgspec.structs.replace(star(3, version=2, hub=1), reason="link 0>2 fell", weights=(4,)))
    driven.now += 5.0
    status = status_of(driven)
    assert (status.policy.version, status.policy.reason, status.policy.since_s) == (2, "link 0>2 fell", 5.0)
    (tree,) = status.policy.trees
    assert (tree.root, tree.share, tree.reduce_parent) == (1, 1.0, (1, -1, 1))
    (former,) = status.former
    assert (former.version, former.ended_s) == (1, 5.0)
    assert former.lasted_s == pytest.approx(10.0)


def test_the_first_keys_are_seen_with_their_shapes_and_bytes():
    driven = running(2)
    driven.say(0, m.RegisterKeys(keys=(key("w", (10, 20)), key("b", (20,)))))
    keys = status_of(driven).keys
    assert [(one.name, one.shape, one.dtype, one.bytes, one.members) for one in keys.first] == [
        ("w", (10, 20), "float32", 800, 0),
        ("b", (20,), "float32", 80, 0),
    ]
    assert keys.count == 2


def test_what_waits_at_a_node_is_seen_and_where_the_network_file_says_that_it_is():
    nodes = "nodes: {0: {site: oslo, lat: 59.9, lon: 10.8}, 1: {site: rome}}"
    network = parse_network(f"{nodes}\nlinks: [{{between: [0, 1], rate: 9Mbit}}]")
    cluster = SimulatedCluster(2, network=network, awareness=True)
    cluster.allreduce("w", [[1.0], [2.0]])
    cluster.run_for(10.0)
    seen: list[JobStatus] = []
    cluster.watch(1.0, seen.append)
    cluster.run_for(2.5)
    assert [round(status.time, 6) for status in seen] == [
        pytest.approx(seen[0].time + second) for second in range(3)
    ]
    last = seen[-1].nodes
    assert [(node.site, node.lat, node.lon) for node in last] == [("oslo", 59.9, 10.8), ("rome", None, None)]
    assert all(node.queued is not None and node.queued >= 0 for node in last)
    assert status_of(running(2)).nodes[0].queued is None


def test_what_traffic_costs_is_a_metric_if_there_are_prices():
    network = parse_network("nodes: {0: {price: 2/GB}, 1: {}}\nlinks: [{between: [0, 1], rate: 9Mbit}]")
    driven = running(2)
    driven.say(0, report(bytes_sent=0))
    driven.now += 1.0
    driven.say(0, report(bytes_sent=10**6))  # 3.6 GB an hour
    snapshot = driven.machine.snapshot(driven.now)
    priced = build_status(dataclasses.replace(snapshot, planned=network), time=0.0)
    assert priced.cost_an_hour == samples(priced)["netstorm_job_cost_per_hour",] == pytest.approx(7.2)
    assert ("netstorm_job_cost_per_hour",) not in samples(status_of(driven))


def test_a_policy_that_a_view_brings_begins_with_the_view():
    cluster = SimulatedCluster(3, seed=1, elastic="1:3", heartbeat_timeout_s=4.0, link_timeout_s=3.0).join()
    cluster.run_for(20.0)
    seen: list[JobStatus] = []
    cluster.watch(1.0, seen.append)
    cluster.faults.crash(2)
    cluster.run_for(10.0)
    last = seen[-1]
    assert last.policy.version > seen[0].policy.version
    assert last.view is not None
    (change,) = last.view.changes
    assert last.policy.since_s == pytest.approx(change.ago_s, abs=1.0)
    for tree in last.policy.trees:
        assert sorted((tree.root, *tree.reduce_parent)) == [-2, -1, tree.root, tree.root]
        assert tree.reduce_parent[2] == tree.broadcast_parent[2] == -2
    assert {rank for link in tree_traffic(last.policy.trees) for rank in link} == {0, 1}


def test_the_last_twenty_reasons_are_kept_the_newest_first():
    driven = running(2)
    for version in range(2, 40):
        driven.install(star(2, version=version))
    assert [one.version for one in status_of(driven).former] == list(range(38, 18, -1))


def test_links_are_seen_as_they_were_measured_if_nobody_makes_more_of_it():
    driven = running(2)
    link = m.LinkMeasure(source=0, rate=5e7, error=0.1, latency=0.02, chunks=9)
    driven.say(1, m.Measured(links=(link, m.LinkMeasure(source=77, rate=1.0, error=0.0))))
    driven.now += 3.0
    status = status_of(driven)
    (seen,) = status.links
    assert (seen.source, seen.target, seen.rate, seen.error, seen.latency_s, seen.age_s) == (
        0,
        1,
        5e7,
        0.1,
        0.02,
        3.0,
    )
    assert seen.measured


def test_caps_are_those_that_are_planned_with():
    driven = running(2, measures=True)
    driven.say(1, m.Measured(links=(m.LinkMeasure(source=0, rate=5e7, error=0.1),), egress=9e7))
    status = status_of(driven)
    assert (status.nodes[1].egress, status.nodes[1].ingress) == (9e7, None)
    assert not status.crowded
    driven.say(1, m.Measured(links=(), egress=float("inf")))
    assert status_of(driven).nodes[1].egress is None


def test_the_json_is_complete_and_reads_back():
    driven = running(3)
    driven.say(1, report())
    status = status_of(driven)
    assert msgspec.json.decode(msgspec.json.encode(status), type=JobStatus) == status


def test_numbers_that_a_node_makes_up_are_no_bad_json():
    driven = running(2)
    for odd in (float("nan"), float("inf"), -1e300):
        driven.say(
            0, report(round_s=odd, waited_s=odd, clock_offset=odd, clock_drift=odd, bytes_sent=-(2**70))
        )
        driven.now += 1.0
        driven.say(
            1, m.Measured(links=(m.LinkMeasure(source=0, rate=odd, error=odd, latency=odd),), egress=odd)
        )
        msgspec.json.decode(msgspec.json.encode(status_of(driven)), type=JobStatus)
        assert samples(status_of(driven))


def test_metrics_say_what_the_status_says():
    driven = running(2)
    driven.say(1, report(waited_s=3.0))
    driven.say(1, m.Measured(links=(m.LinkMeasure(source=0, rate=5e7, error=0.1),)))
    found = samples(status_of(driven))
    assert found["netstorm_node_rounds_total", ("rank", "1")] == 12
    assert found["netstorm_node_waited_seconds_total", ("rank", "1")] == 3.0
    assert ("netstorm_node_rounds_total", ("rank", "0")) not in found
    assert found["netstorm_link_rate_bits_per_second", ("source", "0"), ("target", "1")] == 5e7
    assert found["netstorm_policy_version",] == 1
    assert found["netstorm_job_phase", ("phase", "running")] == 1
    assert found["netstorm_job_phase", ("phase", "failed")] == 0
    assert found["netstorm_tree_share_ratio", ("root", "0"), ("tree", "0")] == 1.0
    who = (
        "netstorm_node_info",
        ("host", "n1"),
        ("port", "4000"),
        ("rank", "1"),
        ("site", "site1"),
        ("state", "running"),
    )
    assert found[who] == 1


def test_the_view_of_an_elastic_job_names_who_left_and_who_fetches_the_state():
    cluster = SimulatedCluster(3, seed=1, elastic="1:4", link_timeout_s=2.0, heartbeat_timeout_s=3.0).join()
    cluster.faults.crash(2)
    cluster.run_for(5.0)
    cluster.start(3)
    cluster.run_for(2.0)
    (snapshot,) = cluster.scheduler.machine.snapshots(cluster.scheduler.now())
    status = build_status(snapshot, time=0.0)
    assert status.view is not None
    assert (status.view.number, status.view.fewest, status.view.most) == (2, 1, 4)
    assert status.view.silent == (3,)
    assert [node.state for node in status.nodes] == ["running", "running", "left", "silent"]
    joined, lost = status.view.changes
    assert "rank 3" in joined.text
    assert "rank 2" in lost.text


# ----------------------------------------------------------------------------- what nodes say of themselves


def says(text: str) -> NodeStatus:
    """Return a report of a node that compresses."""
    return NodeStatus(
        rounds=1, round_s=1.0, waited_s=0.0, bytes_sent=1, clock_offset=0.0, clock_drift=0.0, compression=text
    )


def test_the_log_says_once_how_gradients_travel_though_all_ranks_report_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    announcements = Announcements(2)
    said = [(0, "auto"), (1, "auto"), (0, "auto: int8"), (0, "auto: int8"), (1, "auto"), (1, "auto: int8")]
    with caplog.at_level(logging.INFO, "netstorm"):
        for now, (rank, text) in enumerate(said):
            announcements.record_status(rank, says(text), 5.0 * now)
    assert [one.message for one in caplog.records] == ["compression: auto", "compression: auto: int8"]


def test_a_node_cannot_fill_the_log_or_write_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    announcements = Announcements(1)
    with caplog.at_level(logging.INFO, "netstorm"):
        for number in range(100):
            text = f"{number}\n" + "x" * 1000
            announcements.record_status(0, says(text), 0.01 * number)
    [logged] = caplog.records
    assert "\n" not in logged.message
    assert len(logged.message) <= MOST_CHARACTERS + len("compression: ")
