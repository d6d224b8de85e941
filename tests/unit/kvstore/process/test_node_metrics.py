"""The metrics of a node."""

from __future__ import annotations

from collections import Counter

from netstorm.kvstore.process.node_metrics import NodeMetrics, metrics
from netstorm.protocol.messages import NodeStatus


def test_no_two_links_have_the_same_labels_whoever_is_at_the_other_end():
    status = NodeStatus(rounds=1, round_s=0.1, waited_s=0.0, bytes_sent=1, clock_offset=0.0, clock_drift=0.0)
    links = {(peer, "accepted"): Counter(bytes_sent=peer + 9) for peer in (-3, -2, -1, 0, 1)}
    node = NodeMetrics(job="j", rank=0, site="", status=status, links=links, counters={})
    (sent,) = (one for one in metrics(node) if one.name == "netstorm_link_sent_bytes")
    named = {sample.labels["peer"]: sample.value for sample in sent.samples}
    assert named == {
        "recovering scheduler 1": 6,
        "recovering scheduler 0": 7,
        "scheduler": 8,
        "0": 9,
        "1": 10,
    }
