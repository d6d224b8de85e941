"""The bound that no all-reduce beats, against hand-made cases, the predictor, and weaker bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netstorm.errors import Unreachable, UsageError
from netstorm.lab.testing.strategies import networks
from netstorm.protocol.frames import encode_body, seal
from netstorm.protocol.messages import Part, Phase
from netstorm.topology.form import SCHEMES, Options
from netstorm.topology.lower_bound import PART_HEADER_BYTES, latency_bound, lower_bound
from netstorm.topology.network import Link, Network, Node, Rank
from netstorm.topology.prediction import predict
from netstorm.topology.resources import optimum

MB = 1_000_000
RATE = 8e6


def bound(network, tensors, **options):
    return lower_bound(network, optimum(network, sum(tensors)), tensors, **options)


def line(*, rate=RATE, latency=0.0):
    """Return three nodes in a row."""
    ends = [(0, 1), (1, 0), (1, 2), (2, 1)]
    return Network(
        nodes=tuple(Node(rank=Rank(rank)) for rank in range(3)),
        links=tuple(Link(source=Rank(a), target=Rank(b), rate=rate, latency=latency) for a, b in ends),
    )


def test_the_certificate_names_time_nodes_links_and_what_more_of_them_is_worth():
    network = Network.uniform(4, rate=RATE)
    network = replace(network, nodes=(*network.nodes[:3], Node(rank=Rank(3), egress=RATE / 2)))
    assert bound(network, [MB]).certificate() == (
        "no round takes less than 2 s: everything must pass between rank 3 and the other nodes, over egress "
        "of rank 3 (4Mbit/s, 100%); a tenth more of egress of rank 3 is worth at most 10.0% of that time"
    )


def test_one_node_needs_no_certificate():
    found = bound(Network.uniform(1), [MB])
    assert (found.seconds, found.certificate()) == (0.0, "")


def test_latency_counts_by_the_shares_of_what_has_it():
    # Of two links out of rank 1 each carries half of what must leave it, and the far one is of use later.
    network = Network.uniform(2, rate=RATE, latency=0.25)
    assert bound(network, [MB]).seconds == pytest.approx(1.25)


def test_a_small_tensor_must_go_the_whole_way():
    found = bound(line(latency=0.5), [8])
    assert found.seconds == pytest.approx(1.0, rel=1e-3)
    assert found.reason == (
        "all that rank 0 contributes must leave it (8Mbit/s)\nand reach rank 2, which is at least 1s away"
    )


def test_a_chunk_is_sent_whole_over_each_hop():
    # Two chunks leave rank 0 in 2 s; the second one is then forwarded in 1 s more.
    assert bound(line(), [2 * MB]).seconds == pytest.approx(2.0)
    assert bound(line(), [2 * MB], chunk_bytes=MB).seconds == pytest.approx(3.0)


def test_a_link_carries_whole_chunks():
    # Three equal chunks over two links take two turns on one of them.
    network = Network.uniform(3, rate=RATE)
    assert bound(network, [3 * MB], chunk_bytes=MB).seconds >= 2.0
    assert bound(network, [3 * MB]).seconds == pytest.approx(optimum(network, 3 * MB).seconds, rel=1e-3)


def test_headers_and_the_transport_s_share_count():
    network = Network.uniform(2, rate=RATE)
    found = bound(network, [MB], chunk_bytes=MB // 2, header_bytes=1000, payload_share=0.5)
    assert found.seconds == pytest.approx(2 * 1.002)


def test_a_part_s_header_is_no_smaller_than_is_counted():
    part = Part(
        key=0, round=0, chunk=0, phase=Phase.REDUCE, version=0, tree=0, contributors=b"", dtype="float32"
    )
    header = seal(encode_body(part), sequence=0, sent_at=0, payload_crc=0)
    assert len(header) == PART_HEADER_BYTES


@settings(max_examples=40)
@given(networks(2, 6, symmetric=None, capped=True, routing=None), st.integers(1, 5 * MB), st.integers(1, MB))
def test_each_refinement_only_raises_it(network, size, chunk):
    plain = bound(network, [size]).seconds
    assert plain >= optimum(network, size).seconds * (1 - 1e-9)
    assert plain >= latency_bound(network, size) * (1 - 1e-9)
    if size // chunk < 1000:
        chunked = bound(network, [size], chunk_bytes=chunk, header_bytes=PART_HEADER_BYTES).seconds
        assert chunked >= plain * (1 - 1e-9)


@pytest.mark.parametrize("scheme", ["star", "mst", "fapt", "packing"])
@settings(max_examples=8)
@given(
    network=networks(2, 5, symmetric=None, capped=True, routing=None),
    tensors=st.lists(st.integers(4, 2 * MB), min_size=1, max_size=3),
)
def test_no_predicted_round_beats_it(scheme, network, tensors):
    chunk = 256 * 1024
    try:
        policy = SCHEMES[scheme](network, Options(tensors=tuple(tensors))).policy(0)
    except (UsageError, Unreachable):  # a star needs links that not every network has
        assert scheme == "star"
        return
    took = predict(network, policy, tensors, chunk_bytes=chunk, header_bytes=PART_HEADER_BYTES).seconds
    least = bound(network, tensors, chunk_bytes=chunk, header_bytes=PART_HEADER_BYTES).seconds
    assert took >= least * (1 - 1e-6)
