"""The ZeroMQ van does what every van must, on real sockets, through a proxy that can cut connections."""

from __future__ import annotations

import socket
import time

import pytest

from netstorm.lab.testing.conformance import DeliveryConformance, VanConformance
from netstorm.lab.testing.tcp_proxy import TcpProxy
from netstorm.pslite.admission import Credentials
from netstorm.pslite.keys import JobKey, NodeKey
from netstorm.pslite.zeromq import ZmqVan


class ProxiedWorld:
    def __init__(self, credentials=None):
        self.credentials = credentials
        self.vans = []
        self.proxies = []

    def make(self):
        van = ZmqVan(credentials=self.credentials)
        self.vans.append(van)
        proxy = TcpProxy("127.0.0.1", van.bind("127.0.0.1", 0))
        self.proxies.append(proxy)
        return van, proxy.host, proxy.port

    def unused_address(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            return server.getsockname()

    def break_connections(self):
        for proxy in self.proxies:
            proxy.cut()

    def now(self):
        return time.monotonic()

    def pass_time(self, seconds):
        time.sleep(seconds)

    def close(self):
        for van in self.vans:
            van.shut(0)
        for proxy in self.proxies:
            proxy.close()


@pytest.fixture
def world():
    world = ProxiedWorld()
    yield world
    world.close()


class TestZmqVan(VanConformance):
    pass


class TestEncryptedZmqVan(VanConformance):
    @pytest.fixture
    def world(self, tmp_path):
        node = NodeKey.create(tmp_path / "node.key", "node")
        (tmp_path / "allow").write_text(node.line)
        world = ProxiedWorld(Credentials.of_process(JobKey.fresh(), node, tmp_path / "allow"))
        yield world
        world.close()


class TestDeliveryOverZmqVans(DeliveryConformance):
    pass
