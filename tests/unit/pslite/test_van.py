"""The van in memory does what every van must."""

from __future__ import annotations

import pytest

from netstorm.lab.simulation.memory_network import FixedDelay, MemoryNetwork, MemoryVan, Timeline
from netstorm.lab.testing.conformance import DeliveryConformance, VanConformance


class MemoryWorld:
    def __init__(self):
        self.timeline = Timeline()
        self.network = MemoryNetwork(self.timeline, FixedDelay(self.timeline, delay_s=0.001, jitter_s=0.002))
        self.hosts = []

    def make(self):
        host = f"host{len(self.hosts)}"
        self.hosts.append(host)
        van = MemoryVan(self.network, host)
        return van, host, van.bind("*", 0)

    def unused_address(self):
        return self.hosts[0], 9

    def break_connections(self):
        for number, one in enumerate(self.hosts):
            for other in self.hosts[number:]:
                self.network.reset(one, other)

    def now(self):
        return self.timeline.now

    def pass_time(self, seconds):
        self.timeline.run_until(lambda: False, self.timeline.now + seconds)


@pytest.fixture
def world():
    return MemoryWorld()


class TestMemoryVan(VanConformance):
    pass


class TestDeliveryOverMemoryVans(DeliveryConformance):
    pass
