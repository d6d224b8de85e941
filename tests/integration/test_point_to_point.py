"""Messages between real processes on real sockets: the sender's memory is free once a send is complete."""

from __future__ import annotations

from tests.integration.jobs import Job

NODES = 3

NODE = """
import threading
import numpy as np
from netstorm.kvstore.operations import ReceiveOperation, SendOperation
from netstorm.kvstore.process.runtime import runtime_of_this_process

runtime = runtime_of_this_process()
ranks = range(runtime.size)

def begin(kind, **more):
    ended, errors = threading.Event(), []
    def done(error):
        errors.append(error)
        ended.set()
    operation = kind(channel="world", tag=3, what="uint8", done=done, **more)
    runtime.submit(operation)
    def wait():
        assert ended.wait(60), str(operation)
        assert errors == [None], errors
    return wait

def values(source, target, size, turn):
    return np.random.default_rng([source, target, size, turn]).integers(0, 256, size).astype(np.uint8)

for size in (0, 1, 262_144, 262_145, 10_000_000):
    sent = [np.empty(size, np.uint8) for _ in ranks]
    for turn in range(3):
        waits = []
        for peer in ranks:
            sent[peer][:] = values(runtime.rank, peer, size, turn)  # the memory of the turn before
            waits.append(begin(SendOperation, peer=peer, source=sent[peer]))
        got = [np.empty(size, np.uint8) for _ in ranks]
        waits += [begin(ReceiveOperation, peer=peer, destination=got[peer]) for peer in ranks]
        for wait in waits:
            wait()
        for peer in ranks:
            assert got[peer].tobytes() == values(peer, runtime.rank, size, turn).tobytes(), (peer, size, turn)
runtime.barrier()
assert runtime.statistics().get("messages_known_before", 0) == 0
"""


def test_every_rank_sends_to_every_rank_over_a_hub(tmp_path):
    settings = {"NETSTORM_TOPOLOGY": "star", "NETSTORM_HUB": 0, "NETSTORM_TRACE": tmp_path / "trace"}
    with Job(tmp_path, NODES, **settings) as job:
        for rank in range(NODES):
            job.start(rank, NODE, **settings)
        ends = job.end_all()
        assert [end.code for end in ends] == [0] * NODES, [end.text for end in ends]
        assert job.end(-1).code == 0
    trace = (tmp_path / "trace.1.json").read_text()
    assert "send to rank 2" in trace
    assert "receive from rank 2" in trace
