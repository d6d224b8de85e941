"""Reports in, a network to plan for out."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from itertools import combinations, permutations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netstorm.protocol.messages import LinkMeasure, LinkThroughput, Measured, ThroughputReport
from netstorm.scheduler.awareness import (
    Collector,
    InferredRoutes,
    NetworkEstimate,
    PlannedLinks,
    largest_change,
    routed_pairs,
    throughputs,
)
from netstorm.scheduler.link_columns import NetworkColumns, finish
from netstorm.topology.network import Link, Network, Node, Rank, Routing, generate

M = 1e6


def measure(source, rate, *, error=0.03, latency=0.02, shared=0.0, chunks=10):
    return LinkMeasure(source=source, rate=rate, error=error, latency=latency, chunks=chunks, shared=shared)


def report(*links, egress=0.0, ingress=0.0):
    return Measured(links=tuple(links), egress=egress, ingress=ingress)


def collector(size=4, **options):
    return Collector(Network.uniform(size), **{"known": False, **options})


def rates(found, now=1.0):
    return {(link.source, link.target): link.rate for link in found.estimate(now).network.links}


def line(words):
    return Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(3)),
        links=tuple(
            Link(source=Rank(one), target=Rank(other), rate=rate, latency=0.01, loss=0.001)
            for one, other, rate in words
        ),
    )


def test_a_measured_link_has_the_rate_and_latency_that_its_receiver_reports():
    found = collector()
    found.record(2, report(measure(0, 30 * M, latency=0.04)), 1.0)
    link = found.estimate(1.0).network.link(Rank(0), Rank(2))
    assert (link.rate, link.latency) == (30 * M, 0.04)
    assert found.estimate(1.0).measured == {(0, 2)}


def test_links_never_measured_get_the_25th_percentile_of_the_others():
    found = collector(5)
    for place, rate in enumerate((10, 20, 30, 40)):
        found.record(4, report(measure(place, rate * M)), 1.0)
    assert rates(found)[0, 1] == 10 * M
    found.record(0, report(measure(1, 5 * M)), 1.0)
    assert rates(found)[0, 1] == 10 * M  # 5 10 20 30 40


def test_latency_is_that_of_the_way_back_or_else_among_the_longer_ones():
    found = collector()
    found.record(1, report(measure(0, M, latency=0.01)), 1.0)
    found.record(2, report(measure(0, M, latency=0.03)), 1.0)
    network = found.estimate(1.0).network
    assert network.link(Rank(1), Rank(0)).latency == 0.01
    assert network.link(Rank(3), Rank(1)).latency == 0.01
    found.record(3, report(measure(0, M, latency=0.05)), 1.0)
    assert found.estimate(1.0).network.link(Rank(3), Rank(1)).latency == 0.03


def test_with_a_network_file_links_are_as_it_says_until_they_are_measured():
    prior = line([(0, 1, 10 * M), (1, 0, 10 * M), (1, 2, 20 * M), (2, 1, 20 * M)])
    found = Collector(prior, known=True)
    found.record(1, report(measure(0, 7 * M)), 1.0)
    network = found.estimate(1.0).network
    assert rates(found) == {(0, 1): 7 * M, (1, 0): 10 * M, (1, 2): 20 * M, (2, 1): 20 * M}
    assert network.link(Rank(0), Rank(1)).loss == 0.0  # what was measured is goodput
    assert network.link(Rank(1), Rank(2)).loss == 0.001
    assert network.link(Rank(1), Rank(2)).latency == 0.01


def test_who_may_not_talk_has_no_link_whatever_is_reported():
    found = Collector(line([(0, 1, M), (1, 0, M), (1, 2, M), (2, 1, M)]), known=True)
    found.record(2, report(measure(0, 9 * M)), 1.0)
    assert found.refused == 1
    assert (0, 2) not in rates(found)


@pytest.mark.parametrize(("rates", "cap", "counts"), [((60, 60, 60), 100, True), ((30, 40, 30), 98, False)])
def test_a_cap_counts_if_the_links_behind_it_could_clearly_carry_more(rates, cap, counts):
    found = collector()
    links = [measure(source, rate * M) for source, rate in enumerate(rates, start=1)]
    found.record(0, report(*links, ingress=cap * M), 1.0)
    assert [node.ingress for node in found.estimate(1.0).network.nodes] == [
        cap * M if counts else None,
        *[None] * 3,
    ]


def test_a_cap_does_not_count_once_its_node_has_seen_that_the_links_are_independent():
    found = collector()
    for second in range(3):
        found.record(1, report(measure(0, 60 * M)), float(second))
        found.record(2, report(measure(0, 60 * M)), float(second))
        found.record(0, report(egress=90 * M), float(second))
    assert found.estimate(3.0).network.nodes[0].egress == pytest.approx(90 * M)
    found.record(0, report(), 3.0)
    assert found.estimate(3.0).network.nodes[0].egress == pytest.approx(90 * M)
    found.record(0, report(egress=math.inf), 4.0)
    assert found.estimate(4.0).network.nodes[0].egress is None


def test_egress_caps_are_seen_from_what_different_receivers_report():
    found = collector()
    for target in (1, 2, 3):
        found.record(target, report(measure(0, 80 * M)), 1.0)
    found.record(0, report(egress=90 * M), 1.0)
    network = found.estimate(1.0).network
    assert network.nodes[0].egress == 90 * M
    assert [node.ingress for node in network.nodes] == [None] * 4


def test_what_a_line_carried_at_once_bounds_it_where_some_lines_are_known_to_be_shared():
    found = collector()
    for target in (1, 2, 3):
        found.record(target, report(measure(0, 80 * M)), 1.0)
    found.record(0, report(egress=-90 * M), 1.0)
    assert found.estimate(1.0).network.nodes[0].egress is None  # perhaps its links have not sent more at once
    assert not found.some_shared
    found.record(2, report(ingress=30 * M), 2.0)
    assert found.some_shared
    assert found.estimate(2.0).network.nodes[0].egress == 90 * M
    found.record(0, report(egress=math.inf), 3.0)
    assert found.estimate(3.0).network.nodes[0].egress is None


def test_a_cap_does_not_come_and_go_with_noise():
    found = collector(3)
    found.record(0, report(measure(1, 60 * M), measure(2, 60 * M), ingress=100 * M), 1.0)
    assert found.estimate(1.0).network.nodes[0].ingress is not None  # 100 of 120
    for second in range(2, 30):
        found.record(0, report(measure(1, 56 * M), measure(2, 56 * M), ingress=101 * M), float(second))
    assert found.estimate(30.0).network.nodes[0].ingress is not None  # 101 of 112
    for second in range(30, 60):
        found.record(0, report(measure(1, 50 * M), measure(2, 50 * M), ingress=100 * M), float(second))
    assert found.estimate(60.0).network.nodes[0].ingress is None


def test_a_link_seen_only_under_a_binding_cap_is_planned_as_measured_and_shown_as_censored():
    found = collector()
    found.record(
        0,
        report(
            measure(1, 90 * M), *(measure(source, 48 * M, shared=0.9) for source in (2, 3)), ingress=95 * M
        ),
        1.0,
    )
    assert [rates(found)[source, 0] for source in (1, 2, 3)] == [90 * M, 48 * M, 48 * M]
    into_0 = {link.source: link for link in found.link_estimates(1.0) if link.target == 0}
    assert [into_0[source].censored for source in (1, 2, 3)] == [False, True, True]


def test_without_a_cap_what_a_link_did_in_company_is_its_rate():
    found = collector()
    found.record(0, report(measure(1, 30 * M, shared=0.9), measure(2, 30 * M, shared=0.9)), 1.0)
    assert rates(found)[1, 0] == 30 * M


def test_what_a_link_did_alone_says_more_than_what_it_did_in_company():
    found = collector()
    found.record(0, report(measure(1, 80 * M)), 1.0)
    say(found, 0, 1, 30, range(2, 20), shared=0.9)
    assert rates(found, 20.0)[1, 0] == 80 * M
    say(found, 0, 1, 30, range(20, 40), shared=0.9)
    assert rates(found, 40.0)[1, 0] == pytest.approx(30 * M)


def test_a_link_that_becomes_slow_in_company_is_slow_whatever_it_did_alone_before():
    found = collector()
    for second in range(5):
        alone, company = measure(1, 140 * M), measure(1, 130 * M, shared=0.9)
        found.record(0, report(alone, company), float(second))
        found.record(1, Measured(links=(), outgoing=(measure(0, 140 * M),)), float(second))
    assert rates(found, 5.0)[1, 0] == pytest.approx(140 * M)
    say(found, 0, 1, 20, range(5, 9), shared=0.9)
    assert rates(found, 9.0)[1, 0] == pytest.approx(20 * M)


def test_the_first_reading_alone_after_a_change_in_company_does_not_bring_back_what_was_before():
    found = collector()
    for second in range(6):
        found.record(0, report(measure(1, 35 * M)), float(second))
        found.record(0, report(measure(1, 35 * M, shared=1.0)), float(second))
    say(found, 0, 1, 14, range(8, 12), shared=1.0)
    assert rates(found, 12.0)[1, 0] == pytest.approx(14 * M, rel=0.01)
    for second in range(12, 15):
        found.record(0, report(measure(1, 14 * M)), float(second))
        assert rates(found, float(second))[1, 0] == pytest.approx(14 * M, rel=0.01)


def test_a_link_that_is_to_be_avoided_is_gone_until_it_is_not_whatever_is_said_of_it():
    found = collector()
    found.exclude([(0, 1)])
    found.record(1, report(measure(0, 5 * M)), 1.0)
    assert (0, 1) not in rates(found)
    found.exclude([])
    assert rates(found)[0, 1] == 5 * M


@pytest.mark.parametrize(
    "wrong",
    [
        measure(0, math.nan),
        measure(0, math.inf),
        measure(0, -1.0),
        measure(0, 1e30),
        measure(0, 1e-300),
        measure(0, M, error=math.nan),
        measure(0, M, error=-0.1),
        measure(0, M, error=math.inf),
        measure(0, M, shared=1.5),
        measure(0, M, shared=math.nan),
        measure(0, M, chunks=-1),
        measure(0, 0.0, latency=1e9),
        measure(0, 0.0, latency=math.nan),
        measure(0, 0.0, latency=-0.5),
        measure(-1, M),
        measure(2, M),
        measure(10**9, M),
    ],
)
def test_what_cannot_be_is_refused_counted_and_changes_nothing(wrong):
    found = collector()
    found.record(2, report(wrong), 1.0)
    assert found.refused == 1
    assert found.estimate(1.0).network == Network.uniform(4)


@pytest.mark.parametrize("value", [math.nan, -math.inf, -1.0, 1e-9, 1e40])
def test_absurd_lines_are_refused(value):
    found = collector()
    found.record(2, report(egress=value, ingress=value), 1.0)
    assert found.refused == 2
    assert [node.egress for node in found.estimate(1.0).network.nodes] == [None] * 4


numbers = st.one_of(
    st.floats(), st.sampled_from([0.0, -1.0, 1e-320, 1e6, 2e6, 1e308, math.inf, -math.inf, math.nan])
)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.lists(
                st.builds(
                    LinkMeasure,
                    source=st.integers(-3, 6),
                    rate=numbers,
                    error=numbers,
                    latency=numbers,
                    chunks=st.integers(-5, 5),
                    shared=numbers,
                ),
                max_size=20,
            ),
            numbers,
            numbers,
        ),
        max_size=20,
    )
)
def test_nothing_that_peers_report_spoils_the_network(reports):
    found = collector()
    for second, (rank, links, egress, ingress) in enumerate(reports):
        found.record(rank, report(*links, egress=egress, ingress=ingress), float(second))
    estimate = found.estimate(float(len(reports)))
    assert estimate.network.separated() is None
    assert all(0.0 < error <= 1.0 for error in estimate.errors)
    assert all(0 < link.rate < math.inf for link in estimate.network.links)
    assert len(found.link_estimates(99.0)) == 12


def test_what_is_seen_of_each_link_has_its_age_and_error():
    found = collector()
    found.record(1, report(measure(0, 20 * M, error=0.05)), 10.0)
    by_pair = {(one.source, one.target): one for one in found.link_estimates(13.0)}
    assert by_pair[0, 1].age == 3.0
    assert by_pair[0, 1].error == pytest.approx(0.05, rel=0.05)
    assert by_pair[2, 3].age == math.inf


def test_caps_that_a_network_file_gives_hold_until_they_are_measured():
    prior = Network.uniform(3)
    capped = replace(prior, nodes=(Node(rank=Rank(0), egress=5 * M), *prior.nodes[1:]))
    assert Collector(capped, known=True).estimate(0.0).network.nodes[0].egress == 5 * M


def test_a_latency_is_the_least_of_late_since_the_rest_is_waiting():
    found = collector(3)
    for second, latency in enumerate((0.3, 0.03, 0.2, 0.09)):
        found.record(1, report(measure(0, M, latency=latency)), float(second))
    assert found.estimate(4.0).network.link(Rank(0), Rank(1)).latency == 0.03
    for second in range(4, 30):
        found.record(1, report(measure(0, M, latency=0.08)), float(second))
    assert found.estimate(30.0).network.link(Rank(0), Rank(1)).latency == 0.08


def test_what_a_link_did_alone_is_not_forgotten_for_what_it_does_in_company_now_and_then():
    found = collector()
    found.record(0, report(*(measure(source, 28 * M) for source in (1, 2, 3))), 0.0)
    for second in range(1, 30):
        in_company = (measure(source, 28.5 * M, shared=0.9) for source in (1, 2, 3))
        found.record(0, report(*in_company, ingress=84 * M), float(second))
        assert rates(found, float(second))[1, 0] == 28 * M


def test_the_receiver_of_a_link_is_believed_before_its_sender():
    found = collector()
    found.record(1, Measured(links=(), outgoing=(measure(0, 45 * M),)), 1.0)
    assert rates(found)[1, 0] == 45 * M
    found.record(0, report(measure(1, 30 * M)), 1.0)
    assert rates(found)[1, 0] == 30 * M
    found.record(1, Measured(links=(), outgoing=(measure(0, 45 * M),)), 90.0)
    assert rates(found, 90.0)[1, 0] == pytest.approx(45 * M)
    assert found.refused == 0


def test_the_kernel_of_a_sender_is_believed_before_the_receiver_while_it_says_something():
    found = collector()
    exact = msgspec.structs.replace(measure(0, 6 * M), delivered=True)
    found.record(0, report(measure(1, 30 * M)), 1.0)
    found.record(1, Measured(links=(), outgoing=(exact,)), 1.5)
    found.record(0, report(measure(1, 30 * M)), 2.0)
    assert rates(found, 2.0)[1, 0] == 6 * M
    found.record(0, report(measure(1, 30 * M)), 4.0)  # of which the kernel has not heard for 2.5 s
    assert rates(found, 4.0)[1, 0] == pytest.approx(30 * M)


def test_what_may_be_an_outlier_is_no_word_of_the_kernel():
    found = collector()
    mine, exact = (msgspec.structs.replace(measure(0, rate), delivered=True) for rate in (10 * M, 40 * M))
    for second in range(4):
        found.record(1, Measured(links=(), outgoing=(mine,)), float(second))
        found.record(0, report(measure(1, 25 * M)), float(second) + 2.5)
    found.record(1, Measured(links=(), outgoing=(exact,)), 7.0)
    assert rates(found, 7.0)[1, 0] == pytest.approx(25 * M)
    found.record(1, Measured(links=(), outgoing=(exact,)), 8.0)
    assert rates(found, 8.0)[1, 0] == pytest.approx(40 * M)


def test_what_small_messages_took_there_and_back_is_twice_the_latency_whatever_the_clocks():
    found = collector(3)
    found.record(1, report(msgspec.structs.replace(measure(0, M, latency=0.002), signal=5.03)), 0.0)
    found.record(0, report(msgspec.structs.replace(measure(1, M, latency=0.002), signal=-4.97)), 0.0)
    network = found.estimate(0.0).network
    assert network.link(Rank(0), Rank(1)).latency == pytest.approx(0.03)
    assert network.link(Rank(1), Rank(0)).latency == pytest.approx(0.03)


def out(*links, **more):
    return Measured(links=(), outgoing=links, **more)


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            report(msgspec.structs.replace(measure(2, M), signal=signal))
            for signal in (math.nan, -math.inf, 1e12)
        ),
        *(
            out(LinkMeasure(source=1, rate=0.0, error=0.0, trip=trip))
            for trip in (math.nan, -1.0, math.inf, 1e9)
        ),
        *(out(one) for one in (measure(9, M), measure(0, M), measure(1, -M))),
        *(
            Measured(links=(), throughput=(ThroughputReport(1, (LinkThroughput(target, rate, True),)),))
            for target, rate in ((9, M), (1, -M), (0, M))
        ),
    ],
    ids=range(13),
)
def test_what_cannot_be_is_refused_of_latencies_links_out_and_what_is_carried(wrong):
    found = collector(4, find_routes=True)
    found.record(0, wrong, 1.0)
    assert found.refused == 1
    assert found.latency_changed_at == -math.inf


def say(found, target, source, rate, seconds, **more):
    """Have a rank report what a link into it carries, once a second."""
    for second in seconds:
        found.record(target, report(measure(source, rate * M, **more)), float(second))


def told(found, second, *, there=None, back=None):
    if there is not None:
        found.record(1, report(measure(0, there * M)), second)
    if back is not None:
        found.record(0, report(measure(1, back * M)), second)


def test_a_way_that_was_like_the_way_back_is_expected_to_have_changed_with_it():
    found = collector(3)
    for second in range(5):
        told(found, float(second), there=50, back=48)
    for second in range(5, 8):
        told(found, float(second), back=10)
    assert rates(found, 8.0)[0, 1] == pytest.approx(10 * M)
    told(found, 8.0, there=49)
    assert rates(found, 8.0)[0, 1] == pytest.approx(50 * M, rel=0.05)


def test_a_way_that_was_read_since_the_first_of_a_change_has_not_changed_with_the_way_back():
    found = collector(3)
    for second in range(5):
        told(found, float(second), there=50, back=48)
        found.record(2, report(measure(0, 30 * M)), float(second))
    found.record(2, report(has_jumped(measure(0, 80 * M))), 5.0)
    told(found, 5.25, there=49)
    found.record(0, report(has_jumped(measure(1, 10 * M))), 5.5)
    assert rates(found, 5.5)[0, 1] == pytest.approx(50 * M, rel=0.05)


def test_a_way_that_differed_from_the_way_back_is_not():
    found = collector(3)
    for second in range(5):
        told(found, float(second), there=90, back=48)
    for second in range(5, 8):
        told(found, float(second), back=10)
    assert rates(found, 8.0)[0, 1] > 40 * M


def noisy_reports(nodes, seed, count):
    """Yield (rank, report, time) of nodes that measure a few links each, with noise, changes and caps."""
    chance = random.Random(seed)
    for number in range(count):
        now = 1.0 + number * chance.choice((0.1, 0.5, 8.0))
        rank = chance.randrange(nodes)
        links = [
            measure(
                other,
                M * chance.uniform(9, 11) * chance.choice((1, 1, 1, 3)),
                error=0.05,
                latency=chance.uniform(0.01, 0.02),
                shared=chance.choice((0.0, 0.9)),
            )
            for other in chance.sample([one for one in range(nodes) if one != rank], 2)
        ]
        yield rank, report(*links, ingress=chance.choice((0.0, 0.0, 12 * M))), now


@pytest.mark.parametrize("seed", range(2))
def test_looking_often_changes_nothing_of_what_is_known_of_measured_links(seed):
    often, once, now = collector(6), collector(6), 0.0
    mine = often.estimate(now)
    for rank, said, when in noisy_reports(6, seed, 150):
        now = max(now, when)
        often.record(rank, said, now)
        once.record(rank, said, now)
        mine = often.estimate(now)
    other = once.estimate(now)
    assert mine.measured == other.measured
    assert mine.cap_error == other.cap_error
    for node, its in zip(mine.network.nodes, other.network.nodes, strict=True):
        assert (node.ingress is None) == (its.ingress is None)
    for link, its, error, its_error in zip(
        mine.network.links, other.network.links, mine.errors, other.errors, strict=True
    ):
        if (link.source, link.target) in mine.measured:
            assert link.latency == its.latency
            assert error == its_error
            assert link.rate == pytest.approx(its.rate, rel=0.02)  # what is assumed of others has steps


def test_an_estimate_in_slices_is_the_one_at_once():
    """Of 129 nodes, of which some report between two slices: that counts in the next estimate."""
    sliced, whole = (collector(129, find_routes=True) for _ in range(2))
    draw = random.Random(1)
    now = 1.0
    for _ in range(2):
        for rank in range(129):
            told = report(*(measure(other, draw.uniform(5, 50) * M) for other in draw.sample(range(129), 9)))
            for each in (sliced, whole):
                each.record(rank, told, now)
        calls, late = 1, report(measure(1, 1 * M))
        while (mine := sliced.advance(now)) is None:
            calls += 1
            if calls == 3:
                sliced.record(0, late, now)
        assert calls > 3
        other = whole.estimate(now)
        assert mine.columns.links.rate.tolist() == other.columns.links.rate.tolist()
        assert mine.errors.tolist() == other.errors.tolist()
        assert mine.measured == other.measured
        whole.record(0, late, now)
        now += 5.0
    assert sliced.estimate(now).network.link(Rank(1), Rank(0)).rate < 3 * M


def test_an_estimate_that_is_wanted_at_once_ends_the_one_in_slices():
    found = collector(129)
    found.record(0, report(measure(1, 7 * M)), 1.0)
    assert found.advance(1.0) is None
    found.record(0, report(measure(2, 9 * M)), 1.0)
    links = found.estimate(1.0).network
    assert (links.link(Rank(1), Rank(0)).rate, links.link(Rank(2), Rank(0)).rate) == (7 * M, 9 * M)
    assert found.advance(2.0) is None  # another one


def test_a_look_works_out_only_what_something_was_said_of(monkeypatch):
    found = collector(30)
    for rank in range(30):
        found.record(rank, report(*(measure(other, 10 * M) for other in range(30) if other != rank)), 1.0)
    before = found.estimate(1.0)
    counts = []
    update = PlannedLinks.update

    def counted(self, places, planned):
        counts.append(len(places))
        update(self, places, planned)

    monkeypatch.setattr(PlannedLinks, "update", counted)
    assert found.estimate(2.0).network is before.network
    found.record(3, report(measure(4, 11 * M), measure(5, 10 * M)), 3.0)
    found.estimate(3.0)
    assert counts == [4]  # of 870: two links, and the ways back


def backbone():
    """Six nodes in a chain whose pairs may all talk; links of 10 ms."""
    return {(one, other): 0.01 * abs(one - other) for one, other in itertools.permutations(range(6), 2)}


def told_trips(found, latencies, now=1.0):
    for source in range(6):
        trips = [
            LinkMeasure(source=target, rate=0.0, error=0.0, trip=2 * latencies[source, target])
            for target in range(6)
            if target != source
        ]
        found.record(source, Measured(links=(), outgoing=tuple(trips)), now)


def test_pairs_whose_ways_lead_past_other_nodes_are_planned_as_routes():
    found = collector(6, find_routes=True)
    assert found.latency_changed_at == -math.inf
    told_trips(found, backbone())
    assert found.latency_changed_at == 1.0
    estimate = found.estimate(1.0)
    links = {(link.source, link.target) for link in estimate.network.links}
    assert links == {(one, other) for one, other in backbone() if abs(one - other) == 1}
    assert estimate.routed == backbone().keys() - links
    assert estimate.network.routing is Routing.UNDERLAY
    assert estimate.network.link(Rank(0), Rank(3)).latency == pytest.approx(0.03)
    assert len(estimate.errors) == len(links)
    assert estimate.measured == frozenset()
    assert {(one.source, one.target) for one in found.link_estimates(1.0)} == links


def test_nobody_looks_for_routes_where_links_are_described():
    found = collector(6)
    told_trips(found, backbone())
    assert found.latency_changed_at == -math.inf
    assert found.estimate(1.0).network.routing is Routing.OVERLAY
    assert len(found.estimate(1.0).network.links) == 30


def test_what_links_carried_while_others_shared_their_lines_is_forgotten():
    found = collector(6, find_routes=True)
    for target in range(6):
        others = (source for source in range(6) if source != target)
        found.record(target, report(*(measure(source, 3 * M) for source in others), ingress=9 * M), 1.0)
    assert len(found.estimate(1.0).measured) == 30
    told_trips(found, backbone(), 2.0)
    assert found.estimate(2.0).measured == frozenset()
    found.record(1, report(measure(0, 30 * M)), 3.0)
    estimate = found.estimate(3.0)
    assert estimate.measured == {(0, 1)}
    assert estimate.network.link(Rank(0), Rank(1)).rate == 30 * M
    assert estimate.network.link(Rank(2), Rank(3)).rate == 30 * M  # and not that of pairs in company
    assert all(node.ingress is None for node in estimate.network.nodes)


def test_routes_that_are_none_any_more_are_links_again():
    found = collector(6, find_routes=True)
    told_trips(found, backbone())
    assert len(found.estimate(1.0).network.links) == 10
    chance = random.Random(3)
    told_trips(found, {pair: chance.uniform(0.01, 0.09) for pair in backbone()}, 2.0)
    estimate = found.estimate(2.0)
    assert len(estimate.network.links) == 30
    assert estimate.network.routing is Routing.OVERLAY
    assert estimate.routed == frozenset()


def test_links_that_have_failed_are_left_out_beside_routes():
    found = collector(6, find_routes=True)
    told_trips(found, backbone())
    found.exclude([(2, 3)])
    estimate = found.estimate(1.0)
    assert len(estimate.network.links) == len(estimate.errors) == 9
    assert (2, 3) not in {(link.source, link.target) for link in estimate.network.links}


def test_without_a_kernel_that_says_so_small_messages_tell_latencies():
    found = collector(6, find_routes=True)
    skew = dict(enumerate((0.0, 3.0, -2.0, 11.0, 0.4, 7.0)))
    for target in range(6):
        signals = [
            LinkMeasure(
                source=source,
                rate=0.0,
                error=0.0,
                signal=backbone()[source, target] + skew[target] - skew[source],
            )
            for source in range(6)
            if source != target
        ]
        found.record(target, report(*signals), 1.0)
    assert len(found.estimate(1.0).network.links) == 10


# ------------------------------------------------------------------------------- what all carried at one time


class Carrying:
    """A collector that is told what all links carry, and what their rates seem to be."""

    def __init__(self, size=4):
        self.found = collector(size)
        self.now = 100.0
        self.number = 0

    def carry(self, seconds, rates, *, tell=(), **verdicts):
        """Let links carry rates by (source, target), or what `rates()` says for each half second.

        `tell`: whose rates are told, too.
        """
        for _ in range(round(2 * seconds)):
            now = rates() if callable(rates) else rates
            for source in sorted({pair[0] for pair in now}):
                mine = {pair[1]: rate for pair, rate in now.items() if pair[0] == source}
                self.found.record(
                    source,
                    Measured(
                        links=(),
                        outgoing=tuple(
                            LinkMeasure(source=target, rate=rate, error=0.03, delivered=True)
                            for target, rate in mine.items()
                            if (source, target) in tell
                        ),
                        throughput=(
                            ThroughputReport(
                                self.number, tuple(LinkThroughput(*one, True) for one in mine.items())
                            ),
                        ),
                        **verdicts,
                    ),
                    self.now,
                )
            self.now += 0.5
            self.number += 1

    def rate(self, source, target):
        return self.found.estimate(self.now).network.throughput(Rank(source), Rank(target))


def into_0(chance, cap=40 * M, size=4):
    """Others send to rank 0 and share its line, now these of them and now those."""
    parts, left = {}, 0

    def rates():
        nonlocal parts, left
        if left == 0:
            some = chance.sample(range(1, size), chance.randint(2, size - 1))
            weights = {source: chance.uniform(0.4, 1.6) for source in some}
            parts = {(source, 0): cap * one / sum(weights.values()) for source, one in weights.items()}
        left = (left + 1) % 4
        return parts

    return rates


def test_a_line_that_links_were_seen_to_share_is_a_cap_whatever_its_node_says():
    job = Carrying()
    shared = {(source, 0) for source in (1, 2, 3)}
    job.carry(40, into_0(random.Random(1)), tell=shared, ingress=math.inf)
    job.found.record(0, report(ingress=math.inf), job.now)
    assert job.found.estimate(job.now).network.nodes[0].ingress == pytest.approx(40 * M, rel=0.03)


def test_behind_a_full_line_what_is_less_than_what_is_known_says_nothing():
    job = Carrying()
    job.carry(40, into_0(random.Random(1)), tell={(source, 0) for source in (1, 2, 3)})
    before = job.rate(1, 0)
    job.carry(5, {(1, 0): 3 * M, (2, 0): 36 * M}, tell={(1, 0)})
    assert job.rate(1, 0) == pytest.approx(before, rel=0.05)
    assert not job.found.changes or job.found.changes[-1] < job.now - 5


def test_a_link_that_is_slow_without_company_is_slow():
    job = Carrying()
    job.carry(40, into_0(random.Random(1)), tell={(source, 0) for source in (1, 2, 3)})
    job.carry(12, {(1, 0): 3 * M}, tell={(1, 0)})
    assert job.rate(1, 0) == pytest.approx(3 * M)


def test_a_cap_goes_when_more_is_carried():
    job = Carrying()
    shared = {(source, 0) for source in (1, 2, 3)}
    job.carry(40, into_0(random.Random(1)), tell=shared)
    job.carry(8, dict.fromkeys(shared, 25 * M), tell=shared)
    assert job.found.estimate(job.now).network.nodes[0].ingress is None


def test_in_a_contended_network_no_link_carries_more_than_its_lines_did():
    job = Carrying()
    job.carry(40, into_0(random.Random(1)), tell={(source, 0) for source in (1, 2, 3)})
    job.found.record(1, Measured(links=(), outgoing=(measure(0, 900 * M),)), job.now)
    assert job.rate(1, 0) <= 42 * M


def test_where_links_do_the_same_in_any_company_nothing_is_held_back():
    chance = random.Random(3)
    pairs = {(1, 0): 10 * M, (2, 0): 20 * M, (3, 0): 30 * M}
    job = Carrying()
    for _ in range(15):
        some = chance.sample(sorted(pairs), chance.randint(1, 3))
        job.carry(2, {pair: pairs[pair] for pair in some}, tell=set(pairs))
    assert job.found.estimate(job.now).network.nodes[0].ingress is None
    job.carry(2, {**pairs, (1, 0): 4 * M}, tell={(1, 0)})
    assert job.rate(1, 0) == pytest.approx(4 * M)


# ------------------------------------------ rates of links that were not measured since others have changed


def test_a_fast_link_not_seen_since_the_others_have_changed_is_not_believed_to_be_fast():
    found = collector(4)
    for second in range(4):
        measures = (measure(0, 100 * M), measure(1, 20 * M), measure(2, 30 * M))
        found.record(3, report(*measures), float(second))
    assert rates(found, 4.0)[0, 3] == pytest.approx(100 * M)
    for second in range(20, 24):  # nothing has changed, as far as can be seen
        found.record(3, report(measure(1, 20 * M), measure(2, 30 * M)), float(second))
    assert rates(found, 24.0)[0, 3] == pytest.approx(100 * M)
    for second in range(24, 28):
        found.record(3, report(measure(1, 60 * M), measure(2, 30 * M)), float(second))
    half = rates(found, 28.0)[0, 3]
    assert half == pytest.approx(100 * M - 0.5 * (100 - 30) * M)
    for second in range(28, 32):
        found.record(3, report(measure(1, 60 * M), measure(2, 10 * M)), float(second))
    assert rates(found, 32.0)[0, 3] == pytest.approx(10 * M)
    found.record(3, report(measure(0, 90 * M)), 33.0)
    assert rates(found, 33.0)[0, 3] == pytest.approx(100 * M, rel=0.15)


def test_a_slow_link_not_seen_since_the_others_have_changed_may_be_as_fast_as_they_are():
    found = collector(4)
    for second in range(4):
        found.record(3, report(measure(0, 5 * M), measure(1, 40 * M), measure(2, 30 * M)), float(second))
    assert rates(found, 4.0)[0, 3] == pytest.approx(5 * M)
    for second in range(20, 24):
        found.record(3, report(measure(1, 20 * M), measure(2, 30 * M)), float(second))
    assert rates(found, 24.0)[0, 3] == pytest.approx(5 * M)  # the 25th percentile, as before
    for second in range(24, 28):
        found.record(2, report(measure(0, 50 * M), measure(1, 60 * M), measure(3, 70 * M)), float(second))
    changed, measured = 1, 5
    assert rates(found, 28.0)[0, 3] == pytest.approx((5 + (20 - 5) * changed / measured) * M)


@pytest.mark.parametrize(("later_s", "believed"), [(1.0, 90 * M), (5.0, 90 * M - (90 - 30) * M / 3)])
def test_a_link_that_has_changed_is_not_outdated_by_what_changes_together_with_it(later_s, believed):
    found = collector(4)
    for second in range(4):
        found.record(3, report(measure(0, 10 * M), measure(1, 20 * M), measure(2, 30 * M)), float(second))
    seen = has_jumped(measure(0, 90 * M)), measure(1, 20 * M)
    found.record(3, report(*seen), 4.0)
    found.record(3, report(has_jumped(measure(1, 50 * M))), 4.0 + later_s)
    assert rates(found, 4.0 + later_s)[0, 3] == pytest.approx(believed)


def test_a_link_read_since_the_first_of_a_change_is_not_outdated_by_those_that_are_noticed_next():
    found = collector(4)
    for second in range(4):
        found.record(3, report(measure(0, 90 * M), measure(1, 20 * M), measure(2, 30 * M)), float(second))
    found.record(3, report(has_jumped(measure(1, 50 * M))), 4.0)
    found.record(3, report(measure(0, 90 * M)), 4.5)
    found.record(3, report(has_jumped(measure(2, 60 * M))), 5.0)
    assert rates(found, 5.0)[0, 3] == pytest.approx(90 * M)


def test_a_link_that_carries_the_same_in_company_as_alone_before_others_changed_is_not_outdated():
    found = collector(4)
    for second in range(4):
        found.record(3, report(measure(0, 90 * M), measure(1, 20 * M), measure(2, 30 * M)), float(second))
    say(found, 3, 0, 90, (4, 5), shared=0.9)
    found.record(3, report(has_jumped(measure(1, 50 * M))), 8.0)
    say(found, 3, 0, 90, (9, 10), shared=0.9)
    assert rates(found, 10.0)[0, 3] == pytest.approx(90 * M)


def test_what_a_link_does_alone_is_no_news_if_it_was_seen_to_do_so_in_company():
    found = collector(4)
    for second in range(4):
        found.record(3, report(measure(0, 20 * M), measure(0, 20 * M, shared=0.9)), float(second))
    say(found, 3, 0, 60, (4, 5), shared=0.9)
    changes = len(found.changes)
    say(found, 3, 0, 60, (6, 7))
    assert rates(found, 7.0)[0, 3] == pytest.approx(60 * M)
    assert len(found.changes) == changes


def test_a_change_that_the_sender_saw_is_believed_until_the_receiver_reports_again():
    found = collector(4)
    for second in range(4):
        told_by_both(found, float(second), 40 * M)
    found.record(1, out(has_jumped(measure(0, 60 * M))), 4.0)
    assert rates(found, 4.0)[1, 0] == pytest.approx(60 * M)
    say(found, 0, 1, 40, (5, 6))
    assert rates(found, 6.0)[1, 0] == pytest.approx(40 * M)


def told_by_both(found: Collector, second: float, rate: float) -> None:
    """Have both ends of the link from 1 to 0 report the same."""
    found.record(0, report(measure(1, rate)), second)
    found.record(1, out(measure(0, rate)), second)


def has_jumped(one: LinkMeasure) -> LinkMeasure:
    """Return the same reading of a link that its reporter has seen change."""
    return msgspec.structs.replace(one, jumped=True)


# ----------------------------------------------------------------------- links that are too good to be true


def both_ends(said: float, seen: float, *, shared: float = 0.0, **more) -> Collector:
    """Rank 0 says what its link to rank 1 carries, and rank 1 what it sees of it."""
    known = Collector(Network.uniform(3), known=False)
    for second in range(5):
        link = LinkMeasure(source=1, rate=said, error=0.02, delivered=True, **more)
        known.record(0, Measured(links=(), outgoing=(link,)), float(second))
        sight = LinkMeasure(source=0, rate=seen, error=0.02, shared=shared)
        known.record(1, Measured(links=(sight,)), second + 0.5)
    return known


@pytest.mark.parametrize(
    ("said", "seen", "believed", "now", "shared"),
    [
        pytest.param(1e13, 1e7, 5e7, 5.0, 0.0, id="at most five times"),
        pytest.param(3e7, 1e7, 3e7, 5.0, 0.0, id="a kernel is right at once"),
        pytest.param(1e6, 1e7, 1e6, 5.0, 0.0, id="less"),
        pytest.param(1e13, 1e7, 2.5e8, 304.5, 0.0, id="what was seen long ago bounds less"),
        pytest.param(1e8, 1e7, 1e8, 5.0, 1.0, id="it may be one of ten into that rank"),
    ],
)
def test_a_member_that_says_its_links_are_fast_is_believed_five_times_what_receivers_see(
    said, seen, believed, now, shared
):
    assert rate_of(both_ends(said, seen, shared=shared), 0, 1, now) == pytest.approx(believed)


def test_a_member_that_says_it_receives_fast_is_believed_five_times_what_senders_see():
    known = both_ends(1e7, 1e7)
    for second in range(5, 20):
        known.record(1, Measured(links=(LinkMeasure(source=0, rate=1e13, error=0.02),)), float(second))
    assert rate_of(known, 0, 1, 20.0) == pytest.approx(5e7)


def test_what_the_other_end_has_seen_once_and_uncertainly_bounds_no_rate():
    known = collector()
    for second, rate, error in ((0.0, 1.5 * M, 0.02), (0.5, 1.5 * M, 0.02), (4.0, 21 * M, 0.5)):
        known.record(0, Measured(links=(), outgoing=(LinkMeasure(source=1, rate=rate, error=error),)), second)
    for second in range(5, 20):
        known.record(1, report(measure(0, 34 * M)), float(second))
    assert rates(known, 20.0)[0, 1] == pytest.approx(34 * M)


def rate_of(known: Collector, source: int, target: int, now: float = 5.0) -> float:
    return known.estimate(now).network.link(Rank(source), Rank(target)).rate


def test_a_member_that_says_it_is_near_is_believed_a_quarter_of_the_others_round_trip():
    known = both_ends(1e7, 1e7, trip=1e-6)
    out = LinkMeasure(source=0, rate=1e7, error=0.02, delivered=True, trip=0.2)
    known.record(1, Measured(links=(), outgoing=(out,)), 5.0)
    link = known.estimate(6.0).network.link(Rank(0), Rank(1))
    assert link.latency == pytest.approx(0.2 / 4 / 2)


# ----------------------------------------------------------- which pairs of nodes have no line of their own


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


@pytest.mark.parametrize("seed", range(1, 7))
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
        seed for seed in range(1, 16) if routed_pairs(latencies(generate(family, 9, seed), seed=seed), 9)
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


def test_of_a_chain_its_lines_are_left_and_nodes_of_one_site_are_not_on_the_way_of_one_another():
    took = latencies(chain(6), noise=0.0, least=0.0)
    assert took.keys() - routed_pairs(took, 6) == lines(chain(6))
    # Four sites of two nodes each, 20 to 80 ms apart; within a site .2 ms.
    far = {(0, 1): 0.02, (0, 2): 0.035, (0, 3): 0.08, (1, 2): 0.05, (1, 3): 0.063, (2, 3): 0.041}
    took = {
        (one, other): 0.0002 if one // 2 == other // 2 else far[tuple(sorted((one // 2, other // 2)))]  # type: ignore[index]
        for one, other in permutations(range(8), 2)
    }
    assert not routed_pairs(took, 8)
    # Three sites of three nodes: from the first to the third by way of the second.
    apart = {0: 0.0002, 1: 0.02, 2: 0.04}
    took = {(one, other): apart[abs(one // 3 - other // 3)] for one, other in permutations(range(9), 2)}
    assert routed_pairs(took, 9) == {pair for pair in took if {pair[0] // 3, pair[1] // 3} == {0, 2}}


def test_a_line_that_takes_as_long_as_three_others_is_none_only_where_there_are_routes():
    took = latencies(chain(6), noise=0.0, least=0.0)
    took[0, 3] = took[3, 0] = 0.034  # by way of 1 and 2 it is .03
    assert (0, 3) in routed_pairs(took, 6)
    took[0, 3] = took[3, 0] = 0.02
    assert (0, 3) not in routed_pairs(took, 6)
    mesh = latencies(generate("mesh", 9, 1), noise=0.0, least=0.0)
    mesh[0, 3] = mesh[3, 0] = 0.5
    assert not routed_pairs(mesh, 9)


def test_a_line_that_takes_nearly_as_long_as_two_others_is_none_only_if_routes_are_no_more_exact():
    took = latencies(chain(8), noise=0.0, least=0.0)
    took[0, 2] = took[2, 0] = 0.0205  # by way of 1 it is .02
    assert (0, 2) not in routed_pairs(took, 8)
    assert (0, 2) not in routed_pairs(took, 8, frozenset({(0, 2), (2, 0)}))
    rough = latencies(chain(8), seed=1, noise=0.01, least=0.0005)
    rough[0, 2] = rough[2, 0] = rough[0, 1] + rough[1, 2] + 0.0005
    assert (0, 2) in routed_pairs(rough, 8)


def test_too_few_latencies_and_those_of_zero_say_nothing():
    some = dict(list(latencies(generate("internet2", 9, 1)).items())[:50])
    assert routed_pairs(some, 9) == frozenset()
    before = frozenset({(0, 8), (8, 0)})
    assert routed_pairs(some, 9, before) == before
    for took, size in (
        ({(0, 1): 0.01, (1, 0): 0.01}, 2),
        ({}, 1),
        (dict.fromkeys(permutations(range(9), 2), 0.0), 9),
    ):
        assert routed_pairs(took, size) == frozenset()


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
    assert finish(routes.update(1.0))
    found = routes.found
    assert len(found) == 44
    assert not finish(routes.update(2.0))
    routes.record((0, 8), 0.02, 3.0)
    routes.record((8, 0), 0.02, 3.0)
    assert routes.changed_at == 3.0
    assert not finish(routes.update(2.0))
    assert routes.found == found - {(0, 8), (8, 0)}


def test_a_latency_that_is_nearly_the_same_is_no_news():
    routes = InferredRoutes(4)
    routes.record((0, 1), 0.02, 1.0)
    routes.record((0, 1), 0.0203, 2.0)
    assert routes.changed_at == 1.0
    routes.record((0, 1), 0.021, 3.0)
    assert routes.changed_at == 3.0


# ----------------------------------------------------------------- by how much a network has largest_change


CHUNK = 131_072


def estimate(*, error=0.03, egress=(), ingress=(), gone=(), **rates):
    """Return a mesh of three, 10 Mbit/s and 20 ms, but for rates named by 'from_to' and caps by rank."""
    network = Network.uniform(3, rate=10 * M, latency=0.02)
    links = tuple(
        replace(link, rate=rates.get(f"l{link.source}_{link.target}", link.rate))
        for link in network.links
        if (link.source, link.target) not in gone
    )
    nodes = tuple(
        replace(node, egress=dict(egress).get(node.rank), ingress=dict(ingress).get(node.rank))
        for node in network.nodes
    )
    pairs = frozenset((link.source, link.target) for link in links)
    return NetworkEstimate.of(
        replace(network, nodes=nodes, links=links),
        errors=(error,) * len(links),
        cap_error=error,
        measured=pairs,
    )


LONELY = [(1, 0), (1, 2)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({}, {}, id="the same"),
        pytest.param({}, {"l0_1": 9.3 * M}, id="less than the threshold"),
        pytest.param({"error": 0.2}, {"error": 0.2, "l0_1": 6 * M}, id="less than the errors"),
        pytest.param({}, {"egress": [(1, 19.5 * M)]}, id="a cap that is no less than the links"),
        pytest.param({"egress": [(1, 30 * M)]}, {}, id="goes"),
        pytest.param({"gone": LONELY}, {"gone": LONELY, "egress": [(1, 5 * M)]}, id="a node without links"),
    ],
)
def test_what_is_no_move(before, after):
    assert largest_change(estimate(**before), estimate(**after), 0.1, CHUNK) == (0.0, "")


def test_a_reading_that_was_taken_for_outdated_does_not_hide_a_better_one():
    doubted = replace(estimate(error=0.3), reading_errors=estimate(error=0.03).reading_errors)
    change, _ = largest_change(doubted, estimate(l0_1=14 * M), 0.1, CHUNK)
    assert change == pytest.approx(math.log(1.4))


def test_what_was_uncertain_is_news_once_it_is_certain():
    faster = estimate(l0_1=15 * M)
    assert largest_change(estimate(error=0.3), faster, 0.1, CHUNK)[0] == pytest.approx(math.log(1.5))
    assert largest_change(faster, estimate(error=0.3), 0.1, CHUNK) == (0.0, "")


def test_the_link_that_moved_most_is_named():
    change, text = largest_change(estimate(), estimate(l0_1=8 * M, l1_2=2 * M), 0.1, CHUNK)
    assert change == pytest.approx(math.log(5))
    assert text == "link 1→2 from 10Mbit/s and 20ms to 2Mbit/s and 20ms"


def test_links_come_and_go():
    assert largest_change(estimate(), estimate(gone=[(0, 2)]), 0.1, CHUNK) == (
        math.inf,
        "link 0→2 is gone",
    )
    assert largest_change(estimate(gone=[(0, 2)]), estimate(), 0.1, CHUNK)[0] == math.inf


@pytest.mark.parametrize("word", ["egress", "ingress"])
def test_a_cap_moves_by_what_it_takes_from_the_links_behind_it(word):
    free, capped = estimate(), estimate(**{word: [(1, 5 * M)]})
    change, text = largest_change(free, capped, 0.1, CHUNK)
    assert change == pytest.approx(math.log(4))  # two links of 10
    assert text == f"{word} of rank 1 from no limit to 5Mbit/s"
    assert largest_change(capped, free, 0.1, CHUNK) == (change, f"{word} of rank 1 from 5Mbit/s to no limit")
    assert largest_change(capped, estimate(**{word: [(1, 10 * M)]}), 0.1, CHUNK)[0] == pytest.approx(
        math.log(2)
    )


def test_rates_are_what_a_pair_has_for_itself():
    network = estimate(gone=[(0, 2)], egress=[(1, 3 * M)]).network
    pairs = np.zeros((network.size, network.size), bool)
    for pair in [(0, 1), (1, 0), (0, 2)]:
        pairs[pair] = True
    rates = throughputs(NetworkColumns.of(network), pairs)
    assert (rates[0, 1], rates[1, 0], rates[0, 2]) == (10 * M, 3 * M, 0.0)
    assert np.count_nonzero(rates) == 2
    assert network.link(Rank(0), Rank(1)).rate == 10 * M
