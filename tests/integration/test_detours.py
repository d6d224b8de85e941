"""Auxiliary paths and clocks along the trees, of real processes on real sockets."""

from __future__ import annotations

import json

import pytest

from netstorm.topology.files import dump_network
from netstorm.topology.network import Link, Network, Node, Rank
from tests.integration.jobs import Job

NODES = 4

NODE = """
import json, pathlib, sys, time
import numpy as np
from netstorm.kvstore.process.runtime import runtime_of_this_process
from netstorm.kvstore.operations import Operation

ROUNDS, SIZE = 3, 400_000

def addend(rank, round):
    return np.random.default_rng([rank, round]).integers(-1000, 1000, SIZE).astype(np.float32)

runtime = runtime_of_this_process()
key = runtime.register(runtime.open_namespace(), "w", (SIZE,), "float32")
for round in range(ROUNDS):
    total = np.empty(SIZE, np.float32)
    operation = Operation(
        key=key,
        round=key.take_round(),
        source=addend(runtime.rank, round),
        destination=total,
        done=lambda _: None,
    )
    runtime.allreduce(operation)
    right = sum(addend(rank, round) for rank in range(runtime.size))
    assert total.tobytes() == right.tobytes(), round
runtime.barrier()  # all results have arrived: nobody sends or forwards any more
statistics = runtime.statistics()
folder = pathlib.Path(sys.argv[0]).parent
"""
COUNT = NODE + "(folder / f'{runtime.rank}.json').write_text(json.dumps(statistics))\n"


def counted(folder, name):
    """Return a counter of each node, by rank."""
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NODES)]
    return [one.get(name, 0) for one in found]


def star_file(folder):
    """Write a network in which the hub's links from and to rank 1 are slow, and return its path."""
    links = tuple(
        Link(
            source=Rank(source),
            target=Rank(target),
            rate=1e8 if {source, target} == {0, 1} else 1e9,
            latency=1e-4,
        )
        for source in range(NODES)
        for target in range(NODES)
        if source != target
    )
    path = folder / "network.yaml"
    path.write_text(dump_network(Network(nodes=tuple(Node(rank=Rank(n)) for n in range(NODES)), links=links)))
    return path


def run(folder, script, **settings):
    with Job(folder, NODES, **settings) as job:
        for rank in range(NODES):
            job.start(rank, script, **settings)
        ends = job.end_all()
        assert [end.code for end in ends] == [0] * NODES, [end.text for end in ends]
        assert job.end(-1).code == 0


@pytest.mark.parametrize("way", ["queue", "exploration"])
def test_sums_are_exact_and_parts_on_auxiliary_paths_are_counted_at_both_ends(tmp_path, way):
    settings: dict[str, object] = {"CHUNK_SIZE": 4096, "NETSTORM_LARGEST_CHUNK": 4096, "PROBE_CHUNK_SIZE": 0}
    if way == "queue":
        settings |= {
            "NETSTORM_NETWORK": star_file(tmp_path),
            "NETSTORM_TOPOLOGY": "star",
            "NETSTORM_HUB": 0,
            "NETSTORM_AUX_RULE": "queue",
            "PRIMARY_BUSY_BOUND": 1,
            "AUXILIARY_QUEUE_LENGTH": 4,
        }
    else:  # nothing is known: what the one tree does not use is explored
        settings |= {"NETSTORM_TOPOLOGY": "fapt", "NUM_ROOT_SERVERS": 1, "NETSTORM_EXPLORE_SHARE": 0.5}
    run(tmp_path, COUNT, **settings)
    detoured = counted(tmp_path, "detoured")
    assert sum(detoured) > 10
    assert sum(counted(tmp_path, "relayed")) == sum(detoured)  # over one node each
    assert sum(counted(tmp_path, "explored")) == (0 if way == "queue" else sum(detoured))
    for name in ("protocol_violations", "credits_unasked", "contributions_counted_before"):
        assert sum(counted(tmp_path, name)) == 0, name


def test_clocks_follow_the_trees_if_asked_to(tmp_path):
    wait = """
deadline = time.monotonic() + 60
while True:
    hops, error = runtime.process.cluster_clock.client.quality()
    if hops == (1 if runtime.rank == 0 else 2):
        break
    assert time.monotonic() < deadline, (runtime.rank, hops, error)
    time.sleep(0.05)
before, now, after = time.time_ns(), runtime.process.cluster_clock.client.now_ns(), time.time_ns()
off = max(before - now, now - after, 0) / 1e9
statistics |= {"hops": hops, "off": off, "error": error}
"""
    script = COUNT.replace("(folder /", wait + "(folder /")
    run(
        tmp_path,
        script,
        NETSTORM_CLOCK="trees",
        NETSTORM_TOPOLOGY="star",
        NETSTORM_HUB=0,
    )
    assert counted(tmp_path, "hops") == [1, 2, 2, 2]
    for off, error in zip(counted(tmp_path, "off"), counted(tmp_path, "error"), strict=True):
        assert abs(off) < error + 0.001  # the scheduler's clock is this host's, as it was when it began
