"""Sends and receives between the ranks of a simulated cluster."""

from __future__ import annotations

import numpy as np
import pytest

from netstorm.errors import Closed, NodeFailed, UnevenRounds, UsageError, WaitTimeout
from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.topology.network import Rank
from netstorm.topology.policy import Policy
from netstorm.topology.tree import Tree

CHAIN = Policy(
    version=0,
    trees=(Tree(root=Rank(0), reduce_parent=(-1, 0, 1, 2), broadcast_parent=(-1, 0, 1, 2)),),
    weights=(1,),
)
"""Ranks 0 and 3 are linked over 1 and 2."""

LARGE = 5 * 2**18 + 3
"""Elements; 5 MiB of float32, of which the last piece is short."""


def values_of(elements, seed=0, dtype="float32"):
    return np.random.default_rng(seed).integers(0, 100, elements).astype(dtype)


def exchange(cluster, sends, receives, limit_s=60.0):
    """Wait for all of them, and return the received arrays."""
    cluster.run_until_ended([*sends, *receives], limit_s)
    for send in sends:
        assert send.error is None, send.error
    return [receive.result() for receive in receives]


@pytest.mark.parametrize("elements", [0, 1, 65_536, 65_537, 2**18, LARGE])
@pytest.mark.parametrize("posted_first", [True, False])
def test_a_message_of_any_size_arrives_over_nodes_that_forward(elements, posted_first):
    cluster = SimulatedCluster(4, policy=CHAIN).join()
    values = values_of(elements)
    if posted_first:
        receive = cluster.nodes[0].receive(3, (elements,))
        cluster.run_for(1.0)
        send = cluster.nodes[3].send(0, values)
    else:
        send = cluster.nodes[3].send(0, values)
        cluster.run_for(1.0)
        receive = cluster.nodes[0].receive(3, (elements,))
    [got] = exchange(cluster, [send], [receive])
    assert got.tobytes() == values.tobytes()
    cluster.finish()


def test_one_byte_arrives():
    cluster = SimulatedCluster(3).join()
    send = cluster.nodes[2].send(1, np.array([7], np.uint8))
    [got] = exchange(cluster, [send], [cluster.nodes[1].receive(2, (1,), "uint8")])
    assert got.tolist() == [7]


def test_a_small_send_is_complete_before_its_receive_and_a_large_one_with_it():
    cluster = SimulatedCluster(3).join()
    small, large = (cluster.nodes[0].send(1, values_of(size), tag=size) for size in (65_536, 65_537))
    cluster.run_for(5.0)
    assert small.ended_well
    assert not large.ended
    receives = [cluster.nodes[1].receive(0, (size,), tag=size) for size in (65_537, 65_536)]
    exchange(cluster, [small, large], receives)
    assert (large.ended_at or 0.0) >= (receives[0].ended_at or 0.0) > 0.0


def test_messages_of_one_tag_match_receives_in_order_whatever_their_sizes():
    cluster = SimulatedCluster(4, policy=CHAIN).join()
    sizes = [70_000, 1, 200_000, 0, 65_536, 65_537, 3]
    sends = [cluster.nodes[0].send(2, np.full(size, place, "float32")) for place, size in enumerate(sizes)]
    cluster.run_for(0.5)
    got = exchange(cluster, sends, [cluster.nodes[2].receive(0, (size,)) for size in sizes])
    for place, array in enumerate(got):
        assert (array == place).all()


def test_tags_and_channels_keep_messages_apart():
    cluster = SimulatedCluster(2).join()
    one, other = cluster.nodes
    sends = [
        one.send(1, np.array([number], "int64"), tag=tag, channel=channel)
        for number, (tag, channel) in enumerate([(0, "world"), (5, "world"), (0, "pairs"), (-5, "world")])
    ]
    receives = [
        other.receive(0, (1,), "int64", tag=tag, channel=channel)
        for tag, channel in [(-5, "world"), (0, "pairs"), (5, "world"), (0, "world")]
    ]
    assert [got.item() for got in exchange(cluster, sends, receives)] == [3, 2, 1, 0]


def test_a_receive_from_any_rank_takes_what_comes_first_of_the_ranks_it_names():
    cluster = SimulatedCluster(4).join()
    receive = cluster.nodes[0].receive(-1, (1,), "int64", peers=(1, 2))
    cluster.nodes[3].send(0, np.array([3]))
    cluster.run_for(0.5)
    assert not receive.ended
    cluster.nodes[2].send(0, np.array([2]))
    cluster.run_for(0.5)
    cluster.nodes[1].send(0, np.array([1]))
    cluster.run_for(0.5)
    later = [cluster.nodes[0].receive(-1, (1,), "int64", peers=peers) for peers in ((1, 2), ())]
    assert [got.item() for got in exchange(cluster, [], [receive, *later])] == [2, 1, 3]


def test_a_rank_sends_to_itself():
    cluster = SimulatedCluster(2).join()
    node = cluster.nodes[1]
    small, large = values_of(10), values_of(LARGE)
    sends = [node.send(1, small), node.send(1, large)]
    got = exchange(cluster, sends, [node.receive(1, (10,)), node.receive(1, (LARGE,))])
    assert [array.tobytes() for array in got] == [small.tobytes(), large.tobytes()]


def test_all_pairs_exchange_large_messages_at_once():
    cluster = SimulatedCluster(5, topology="mst").join()
    pairs = [(source, target) for source in range(5) for target in range(5) if source != target]
    arrays = {pair: values_of(300_000, seed=number) for number, pair in enumerate(pairs)}
    sends = [cluster.nodes[source].send(target, arrays[source, target]) for source, target in pairs]
    receives = [cluster.nodes[target].receive(source, (300_000,)) for source, target in pairs]
    for pair, got in zip(pairs, exchange(cluster, sends, receives), strict=True):
        assert got.tobytes() == arrays[pair].tobytes()
    cluster.finish()


def test_a_mismatch_of_a_large_message_fails_both_sides_with_one_text_and_nothing_else():
    cluster = SimulatedCluster(3).join()
    send = cluster.nodes[2].send(0, np.zeros((300, 400), "float32"), tag=7)
    receive = cluster.nodes[0].receive(2, (300, 500), tag=7)
    cluster.run_until_ended([send, receive])
    text = (
        "rank 2 sends float32 (300, 400), 480000 bytes, to rank 0 with tag 7; "
        "rank 0 expects float32 (300, 500), 600000 bytes"
    )
    for side in (send, receive):
        assert isinstance(side.error, UsageError)
        assert str(side.error).startswith(text)
    after = cluster.nodes[2].send(0, np.ones(3, "float32"), tag=7)
    [got] = exchange(cluster, [after], [cluster.nodes[0].receive(2, (3,), tag=7)])
    assert got.tolist() == [1, 1, 1]
    cluster.finish()


def test_a_mismatch_of_a_small_message_fails_the_receive_and_is_logged_by_the_sender(caplog):
    cluster = SimulatedCluster(3).join()
    send = cluster.nodes[2].send(0, np.zeros((3, 4), "float32"), tag=7)
    receive = cluster.nodes[0].receive(2, (3, 5), tag=7)
    cluster.run_until_ended([send, receive])
    cluster.run_for(1.0)
    text = (
        "rank 2 sends float32 (3, 4), 48 bytes, to rank 0 with tag 7; rank 0 expects float32 (3, 5), 60 bytes"
    )
    assert str(receive.error).startswith(text)
    assert text in caplog.text
    cluster.finish()


def test_what_a_finished_rank_has_sent_is_still_delivered_and_what_it_has_not_fails():
    cluster = SimulatedCluster(4, policy=CHAIN).join()
    sender, receiver = cluster.nodes[3], cluster.nodes[0]
    missing = receiver.receive(3, (1,), tag=9)
    sends = [sender.send(0, values_of(size), tag=size) for size in (LARGE, 10)]
    sender.finish()
    cluster.run_for(1.0)
    got = exchange(cluster, sends, [receiver.receive(3, (size,), tag=size) for size in (10, LARGE)])
    assert [array.tobytes() for array in got] == [values_of(10).tobytes(), values_of(LARGE).tobytes()]
    too_late = receiver.receive(3, (2,), tag=LARGE)
    cluster.run_until_ended([missing, too_late])
    assert isinstance(missing.error, UnevenRounds)
    assert "rank 0 waits for a message from rank 3 (tag 9, float32 (1,))" in str(missing.error)
    assert isinstance(too_late.error, UnevenRounds)
    cluster.finish()


def test_a_receive_from_any_rank_fails_once_all_of_them_have_finished():
    cluster = SimulatedCluster(3).join()
    receive = cluster.nodes[0].receive(-1, (1,))
    cluster.nodes[1].finish()
    cluster.run_for(2.0)
    assert not receive.ended
    cluster.nodes[2].finish()
    cluster.run_until_ended([receive])
    assert isinstance(receive.error, UnevenRounds)
    cluster.finish()


def test_a_large_send_to_a_rank_that_has_finished_fails():
    cluster = SimulatedCluster(3).join()
    before = cluster.nodes[0].send(1, values_of(LARGE), tag=4)
    cluster.run_for(1.0)
    cluster.nodes[1].finish()
    cluster.run_for(1.0)
    after = cluster.nodes[2].send(1, values_of(LARGE), tag=5)
    cluster.run_until_ended([before, after])
    for send, rank, tag in ((before, 0, 4), (after, 2, 5)):
        assert isinstance(send.error, UnevenRounds)
        assert str(send.error).startswith(f"rank {rank} sends float32 ({LARGE},)")
        assert f"to rank 1 with tag {tag}, but rank 1 has finished" in str(send.error)
    cluster.finish()


def test_a_rank_that_has_finished_sends_and_receives_nothing_more():
    cluster = SimulatedCluster(2).join()
    cluster.nodes[0].finish()
    late = [cluster.nodes[0].send(1, values_of(3)), cluster.nodes[0].receive(1, (3,))]
    cluster.run_until_ended(late)
    assert all(isinstance(one.error, Closed) for one in late)


def test_a_failed_job_fails_every_message():
    cluster = SimulatedCluster(3).join()
    waiting = [cluster.nodes[0].send(1, values_of(LARGE)), cluster.nodes[0].receive(2, (1,))]
    cluster.nodes[2].fail("out of memory")
    cluster.run_until_ended(waiting)
    assert all(isinstance(one.error, NodeFailed) for one in waiting)
    late = cluster.nodes[0].receive(1, (1,))
    cluster.run_until_ended([late])
    assert isinstance(late.error, NodeFailed)


def test_a_receive_that_waits_too_long_ends_the_job_and_says_for_what():
    cluster = SimulatedCluster(4, wait_timeout_s=30.0).join()
    receive = cluster.nodes[0].receive(3, (3, 4), tag=7)
    assert cluster.nodes[0].machine.outstanding() == 1
    cluster.run_until_ended([receive], 100.0)
    assert isinstance(receive.error, WaitTimeout)
    assert "a message from rank 3 (tag 7, float32 (3, 4))" in str(receive.error)


def test_messages_without_end_wait_at_their_sender_not_at_the_receiver():
    cluster = SimulatedCluster(2).join()
    sends = [cluster.nodes[0].send(1, np.full(60_000, place, "float32")) for place in range(40)]
    cluster.run_for(5.0)
    assert cluster.traffic(0, 1) < 2**20 + 20_000, "240 KB each; at most 1 MiB waits unreceived"
    assert sum(send.ended for send in sends) == 4
    got = exchange(cluster, sends, [cluster.nodes[1].receive(0, (60_000,)) for _ in sends])
    assert [array[0] for array in got] == list(range(40))


@pytest.mark.parametrize(
    ("peer", "more", "words"),
    [
        (2, {}, "rank 2 as the other end of a message: expected one of 0 to 1"),
        (-1, {}, "rank -1 as the other end"),
        (1, {"tag": 2**63}, "expected a number of 64 bits"),
        (1, {"channel": "x" * 300}, "300 characters: expected 256 at most"),
    ],
)
def test_a_send_that_makes_no_sense_fails_at_once(peer, more, words):
    cluster = SimulatedCluster(2).join()
    send = cluster.nodes[0].send(peer, values_of(3), **more)
    cluster.run_until_ended([send])
    assert isinstance(send.error, UsageError)
    assert words in str(send.error)
