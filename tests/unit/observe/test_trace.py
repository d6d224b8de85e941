"""The timeline of each chunk on each link."""

from __future__ import annotations

import msgspec
import pytest

from netstorm.errors import UsageError
from netstorm.observe.trace import Delivery, Trace, join_traces, trace_path
from netstorm.protocol.frames import Peer, encode_body
from netstorm.protocol.messages import Heartbeat, Part, Phase


def part(chunk, *, round=0):
    message = Part(
        key=3,
        round=round,
        chunk=chunk,
        phase=Phase.REDUCE,
        version=1,
        tree=0,
        contributors=b"\1",
        dtype="float32",
    )
    return encode_body(message)


def delivery(chunk, *, sent, acknowledged, queued=0.0, peer=2, body=None):
    return Delivery(
        peer=Peer(peer),
        body=part(chunk) if body is None else body,
        size=1000,
        queued_at=queued,
        sent_at=sent,
        acknowledged_at=acknowledged,
        transmissions=1,
        in_flight=2000,
        window=5000,
        waiting=4,
    )


def traced(*deliveries, most=100):
    trace = Trace(lambda: 0.0, most=most)
    for one in deliveries:
        trace.add_delivery(one)
    return trace


def written(trace, rank=1, machine="here", offset=0.0):
    return trace.as_json(rank, machine=machine, cluster_offset_s=offset)


def chunks(content):
    return [event for event in content["traceEvents"] if event["ph"] == "X"]


def test_chunks_of_a_link_follow_each_other_and_a_pause_is_a_gap():
    content = written(
        traced(
            delivery(0, sent=1.0, acknowledged=1.1),
            delivery(1, sent=1.01, acknowledged=1.3),
            delivery(2, sent=2.0, acknowledged=2.1),
        )
    )
    shown = [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in chunks(content)]
    assert [name for name, _, _ in shown] == ["reduce 0", "reduce 1", "reduce 2"]
    assert [begin for _, begin, _ in shown] == pytest.approx([1.0e6, 1.1e6, 2.0e6])
    assert [end for _, _, end in shown] == pytest.approx([1.1e6, 1.3e6, 2.1e6])


def test_each_link_and_the_rounds_have_a_named_row():
    trace = traced(delivery(0, sent=1.0, acknowledged=1.1), delivery(0, sent=1.0, acknowledged=1.1, peer=0))
    trace.add_round("weight", 7, 0.5, 1.5)
    content = written(trace)
    rows = {
        event["tid"]: event["args"]["name"]
        for event in content["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert sorted(rows.values()) == ["link 1→0", "link 1→2", "rounds"]
    assert {rows[event["tid"]] for event in chunks(content)} == {"link 1→0", "link 1→2"}
    begin, end = [event for event in content["traceEvents"] if event["ph"] in "be"]
    assert (begin["name"], begin["ts"], end["ts"]) == ("weight round 7", 0.5e6, 1.5e6)


def test_a_chunk_says_how_long_it_waited_and_what_its_round_trip_was():
    [event] = chunks(written(traced(delivery(5, queued=0.25, sent=1.0, acknowledged=1.125))))
    details = event["args"]
    assert (details["queued_ms"], details["rtt_ms"]) == (750, 125)
    assert (details["chunk"], details["bytes"], details["window"], details["waiting"]) == (5, 1000, 5000, 4)


def test_messages_that_carry_no_chunk_are_left_out():
    assert (
        chunks(written(traced(delivery(0, sent=1.0, acknowledged=1.1, body=encode_body(Heartbeat()))))) == []
    )


def test_only_the_latest_are_kept_and_the_file_says_how_many_are_not():
    trace = traced(
        *(delivery(number, sent=number, acknowledged=number + 0.5) for number in range(10)), most=3
    )
    content = written(trace)
    assert [event["args"]["chunk"] for event in chunks(content)] == [7, 8, 9]
    assert content["otherData"]["forgotten"] == 7


def test_the_rank_stands_before_the_suffix():
    assert str(trace_path("/tmp/trace.json", 3)) == "/tmp/trace.3.json"
    assert str(trace_path("trace", 0)) == "trace.0.json"


@pytest.mark.parametrize(("machines", "shift"), [(("here", "here"), 0.0), (("here", "there"), 5e6)])
def test_nodes_of_several_machines_are_laid_over_each_other_by_the_cluster_clock(tmp_path, machines, shift):
    paths = []
    for rank, machine in enumerate(machines):
        path = tmp_path / f"t.{rank}.json"
        traced(delivery(0, sent=1.0, acknowledged=1.5)).write(
            path, rank, machine=machine, cluster_offset_s=5.0 * rank
        )
        paths.append(path)
    join_traces(paths, tmp_path / "t.json")
    joined = msgspec.json.decode((tmp_path / "t.json").read_bytes())
    assert {event["pid"]: event["ts"] for event in chunks(joined)} == {0: 1e6, 1: 1e6 + shift}
    assert {event["pid"]: event["args"]["sent_us"] for event in chunks(joined)} == {0: 1e6, 1: 1e6 + shift}


@pytest.mark.parametrize("content", [b"", b"\x86", b"{}", b'{"displayTimeUnit": 3}', b"[" * 100_000])
def test_a_file_that_is_no_trace_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "t.0.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"t\.0\.json is no trace of a NetStorm node"):
        join_traces([path], tmp_path / "t.json")
