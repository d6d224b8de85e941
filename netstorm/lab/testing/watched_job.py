"""A simulated job with something to see: rates change, a link fails, a node dies, and the policy follows.

The tests of the dashboard watch it, and the pictures in the documentation show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.scheduler.build_status import policy_status
from netstorm.scheduler.status import DetourStatus, JobStatus, KeysStatus, LinkStatus, NodeView
from netstorm.topology.form import form_policy
from netstorm.topology.network import Change, Network, generate

__all__ = ["LOST", "large_job", "watch_a_job"]

LOST: Final = 8
"""The rank that dies."""

_ELEMENTS: Final = {"embedding": 400_000, "dense.weight": 250_000, "dense.bias": 1_000, "head": 60_000}
"""Of each key; with larger chunks than a job would have, since each takes time to simulate."""


def watch_a_job(network: Network, see: Callable[[JobStatus], None]) -> None:
    """Run a job of nine nodes for 50 virtual seconds, and call `see` with its status each second.

    Rates change at 15 s, a link fails at 25, a node dies at 35.

    Args:
        network: of nine nodes, all of which have links; its changes are replaced.
        see: is given each status.
    """
    slow = [
        Change(at=15.0, source=link.source, target=link.target, rate=link.rate / 6)
        for link in network.links
        if 4 in (link.source, link.target)
    ]
    cluster = SimulatedCluster(
        network.size,
        network=replace(network, changes=tuple(slow)),
        seed=7,
        awareness=True,
        topology="auto",
        model=f"{4 * sum(_ELEMENTS.values())}B",
        update_time_s=5.0,
        chunk_size=200_000,
        largest_chunk=200_000,
        elastic="3:9",
        heartbeat_timeout_s=8.0,
        link_timeout_s=3.0,
    )
    cluster.watch(1.0, see)
    cluster.join()
    ends = network.links[0]
    cluster.at(25.0, lambda: cluster.faults.cut(ends.source, ends.target))
    cluster.at(35.0, lambda: cluster.faults.crash(LOST))
    values = {name: np.ones(size, np.float32) for name, size in _ELEMENTS.items()}
    while cluster.now < 50.0:
        pending = [
            node.push(name, each, priority=-place)
            for node in cluster.living
            for place, (name, each) in enumerate(values.items())
        ]
        cluster.run_until(
            lambda pending=pending: all(  # type: ignore[misc]
                one.ended or not node.alive
                for one, node in zip(pending, (node for node in cluster.nodes for _ in values), strict=False)
            ),
            120.0,
            "the end of a round",
        )
        for node in cluster.nodes:
            node.pending.clear()
        cluster.run_for(0.9)  # a step computes, too


def large_job(nodes: int, *, time: float, version: int = 1) -> JobStatus:
    """Return the status of a job of many nodes, made up: to simulate one would take hours.

    Args:
        nodes: of a generated network, whose links all are measured.
        time: of the status.
        version: of its policy.
    """
    network = generate("internet2", nodes, 3)
    policy = form_policy(network, "fapt", tensors=(100_000_000,), chunk_bytes=1_000_000)
    return JobStatus(
        time=time,
        job="large",
        release="0",
        scheduler="simulated",
        http="",
        phase="running",
        text="runs",
        age_s=time,
        num_workers=nodes,
        nodes=tuple(_node(rank, time) for rank in range(nodes)),
        policy=msgspec.structs.replace(
            policy_status(policy, 5.0, ""),
            version=version,
            detours=(DetourStatus(path=(0, 1, 2), explore=False),),
        ),
        former=(),
        keys=KeysStatus(count=1, bytes=100_000_000),
        links=tuple(
            LinkStatus(
                source=link.source,
                target=link.target,
                rate=link.rate,
                measured=True,
                error=0.02,
                latency_s=link.latency,
                age_s=3.0,
                censored=False,
            )
            for link in network.links
        ),
        counters={},
    )


def _node(rank: int, time: float) -> NodeView:
    return NodeView(
        rank=rank,
        host=f"10.0.{rank // 250}.{rank % 250 + 1}",
        port=9091,
        site=f"site-{rank // 8}",
        state="running",
        heard_s=0.5,
        said="",
        waits_for="rank 3's values of w" if rank % 7 == 0 else "",
        rounds=int(time),
        last_round=int(time),
        round_s=1.0 + rank / 1000,
        waited_s=time / 2,
        waiting=0.1 + (rank % 9) / 10,
        bytes_sent=int(time * 1e6),
        sending=8e6,
        compression="",
        clock_offset_s=0.001,
        clock_error_s=0.0001,
        clock_drift=0.0,
        clock_hops=1,
        detoured=0,
        egress=None,
        ingress=None,
    )
