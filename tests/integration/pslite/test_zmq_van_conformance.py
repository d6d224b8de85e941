"""The ZeroMQ van does what every van must, on real sockets, through a proxy that can cut connections."""

from __future__ import annotations

import math
import socket
import time

import pytest

from netstorm.lab.testing.conformance import DeliveryConformance, VanConformance
from netstorm.lab.testing.tcp_proxy import TcpProxy
from netstorm.pslite.admission import Credentials
from netstorm.pslite.keys import JobKey, NodeKey
from netstorm.pslite.zeromq import ZmqVan


class ProxiedWorld:
    def __init__(self, make_van=ZmqVan):
        self.make_van = make_van
        self.vans = []
        self.proxies = []

    def make(self):
        van = self.make_van()
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


@pytest.fixture
def credentials(tmp_path):
    node = NodeKey.create(tmp_path / "node.key", "node")
    (tmp_path / "allow").write_text(node.line)
    return Credentials.of_process(JobKey.fresh(), node, tmp_path / "allow")


class TestEncryptedZmqVan(VanConformance):
    @pytest.fixture
    def world(self, credentials):
        world = ProxiedWorld(lambda: ZmqVan(credentials=credentials))
        yield world
        world.close()


class TestDeliveryOverZmqVans(DeliveryConformance):
    pass


class WidenedVan(ZmqVan):
    """Has three streams of each connection that carries a payload, though this machine loses nothing."""

    def transmit(self, connection, header, payload, stream=0):
        taken = super().transmit(connection, header, payload, stream)
        if connection > 0 and payload is not None and taken and self._links[connection].look_at < math.inf:
            self.widen(connection)
        return taken


class TestDeliveryOverStreams(DeliveryConformance):
    @pytest.fixture
    def world(self, credentials):
        world = ProxiedWorld(lambda: WidenedVan(streams=3, credentials=credentials))
        yield world
        world.close()
