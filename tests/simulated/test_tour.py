"""The tour of the code (docs/contributing/tour.md) names functions in the order of their calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Final

import numpy as np

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.protocol.codecs import Element, Reduction
from netstorm.topology.network import Change, Network, Rank
from tests.simulated.collectives.exchanges import all_reduce, groups_of, make_calls
from tests.tour import Calls, check_order, places

REAL: Final = ("frontends/", "kvstore/process/", "pslite/tcp_info.py", "pslite/zeromq.py")
"""What the simulation has no part of: frameworks, threads, sockets, the kernel."""


@contextmanager
def followed(table: str, cluster: SimulatedCluster) -> Iterator[None]:
    """Check that all places of a table that are simulated are called meanwhile, in order."""
    simulated = [place for place in places(table) if not place.file.startswith(REAL)]
    processes = {id(cluster.scheduler): "scheduler"}
    for node in cluster.nodes:
        processes[id(node)] = processes[id(node.process)] = f"rank {node.rank}"

    def process_of(frame: FrameType) -> str:
        caller: FrameType | None = frame
        while caller is not None:
            if (name := processes.get(id(caller.f_locals.get("self")))) is not None:
                return name
            caller = caller.f_back
        return "none"

    calls = Calls(simulated, process_of)
    sys.setprofile(calls.record)
    try:
        yield
    finally:
        sys.setprofile(None)
    check_order(simulated, calls.made)


def test_a_gradient_goes_the_way_of_the_tour():
    cluster = SimulatedCluster(2, seed=1).join()
    groups = groups_of(cluster, "world", (0, 1))
    gradient = np.ones(1000, np.float32)
    with followed("gradient", cluster):
        exchanges = {rank: all_reduce(gradient, Element.FLOAT32, Reduction.SUM) for rank in (0, 1)}
        calls = make_calls(cluster, groups, exchanges)
        cluster.run_until_ended(list(calls.values()), 60.0)
    assert all((call.result() == 2).all() for call in calls.values())


def test_a_measured_rate_goes_the_way_of_the_tour():
    ends = (Rank(0), Rank(1)), (Rank(1), Rank(0))
    slower = tuple(Change(at=2.0, source=source, target=target, rate=5e6) for source, target in ends)
    network = replace(Network.uniform(3, rate=50e6, latency=0.01), changes=slower)
    gradient = np.ones(100_000, np.float32)
    cluster = SimulatedCluster(
        3, network=network, seed=3, awareness=True, topology="auto", model="400kB", update_time_s=1.0
    ).join()
    while cluster.now < 2.0:
        cluster.allreduce("w", [gradient] * 3)
    machine = cluster.scheduler.machine
    first = machine.policy.version
    with followed("rate", cluster):
        while machine.policy.version == first:
            assert cluster.now < 30.0, "no policy has followed the change"
            cluster.allreduce("w", [gradient] * 3)
        cluster.allreduce("w", [gradient] * 3)


def test_a_death_goes_the_way_of_the_tour():
    cluster = SimulatedCluster(4, seed=1, elastic="1:4").join()
    gradient = np.ones(1000, np.float32)
    for _ in range(3):
        cluster.allreduce("w", [gradient] * 4)
    with followed("death", cluster):
        cluster.faults.crash(3)
        sums = [node.push("w", gradient) for node in cluster.living]
        cluster.run_until_ended(sums)
    assert all((each.result() == 3).all() for each in sums)
