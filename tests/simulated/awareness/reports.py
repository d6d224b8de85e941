"""What the nodes of a simulated cluster have measured and reported, against the true network."""

from __future__ import annotations

import statistics

import numpy as np

from netstorm.lab.simulation.cluster import SimulatedCluster
from netstorm.lab.simulation.process import LocalClock
from netstorm.protocol import messages as m
from netstorm.protocol.frames import open_frames
from netstorm.topology.network import generate


class Reports:
    """A cluster, and what its nodes have reported last of each link and access line."""

    def __init__(self, family, seed, *, nodes=9, **settings):
        self.truth = generate(family, nodes, seed)
        informed = SimulatedCluster(nodes, network=self.truth)
        watching = {"awareness": True, "update_time_s": 1e6}  # nothing is to follow from what is measured
        self.cluster = SimulatedCluster(
            nodes, network=self.truth, policy=informed.policy, seed=seed, **{**watching, **settings}
        )
        self.links, self.caps = {}, {}
        self.bytes = self.reported_bytes = 0
        others = self.cluster.network.watch
        assert others is not None

        def watch(source, target, header, payload):
            others(source, target, header, payload)
            self.bytes += len(header) + (0 if payload is None else len(payload))
            if target == "scheduler":
                self._report(int(source.removeprefix("node")), header)

        self.cluster.network.watch = watch

    def _report(self, rank, header):
        message = open_frames(header, 1).message
        if isinstance(message, m.Measured):
            self.reported_bytes += len(header)
            for link in message.links:
                self.links[link.source, rank] = link
            self.caps[rank] = message

    def train(self, rounds, megabytes):
        self.cluster.join()
        values = np.ones(megabytes * 250_000, np.float32)
        for _ in range(rounds):
            pending = [node.push("w", values) for node in self.cluster.nodes]
            self.cluster.run_until_ended(pending, 1e4)
        self.cluster.run_for(3.0)
        return self

    def errors(self):
        """Return how far off each link's rate is, as a fraction."""
        return {ends: link.rate / self.truth.link(*ends).rate - 1 for ends, link in self.links.items()}

    def median_error(self):
        return statistics.median(map(abs, self.errors().values()))


def clocks_off_by(seconds, drift):
    """Return clocks of which every second one is wrong."""
    return lambda rank: LocalClock(
        offset_s=1000.0 * rank,
        drift=drift * (rank % 2),
        sync_error_s=seconds * (rank % 2),
        sync_drift=drift * (rank % 2),
    )
