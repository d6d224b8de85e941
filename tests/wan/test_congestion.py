"""TCP on connections between hosts whose system does not use BBR: its congestion control, and its streams."""

from __future__ import annotations

import subprocess
import sys

import pytest

from netstorm.lab.emulation import Wan
from netstorm.lab.emulation.links import available_congestion_controls
from tests.wan.traces import network, run

needs_bbr = pytest.mark.skipif(
    "bbr" not in available_congestion_controls(), reason="this kernel has no bbr loaded"
)

RECEIVE = """
from netstorm.pslite.zeromq import ZmqVan
van = ZmqVan()
print(van.bind("*", 0), flush=True)
while not van.poll(1.0):
    pass
van.shut(0.0)
"""

SEND = """
import socket, sys
from netstorm.pslite.tcp_info import borrowed_socket
from netstorm.pslite.van import Connection
from netstorm.pslite.zeromq import ZmqVan

van = ZmqVan(prefers_bbr=sys.argv[1] == "auto")
van.open(Connection(1), sys.argv[2], int(sys.argv[3]))
link = van._links[Connection(1)]
while not link.up:
    van.poll(0.1)
with borrowed_socket(link.descriptor) as connection:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
print(name.rstrip(bytes(1)).decode())
assert van.transmit(Connection(1), b"header", None)
van.shut(5.0)
"""


@needs_bbr
@pytest.mark.parametrize(
    ("setting", "place", "used"), [("auto", 1, "bbr"), ("system", 1, "reno"), ("auto", 0, "reno")]
)
def test_connections_to_other_machines_alone_use_bbr(setting: str, place: int, used: str) -> None:
    with Wan.up(network(), congestion="reno") as wan:
        words = wan.command(place, [sys.executable, "-c", RECEIVE])
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            assert run(wan, 0, SEND, setting, f"10.78.0.{place + 1}", port).strip() == used
            assert receiver.wait(timeout=60) == 0


RECEIVE_ALL = """
import sys
from netstorm.pslite.van import Received
from netstorm.pslite.zeromq import ZmqVan
van = ZmqVan()
print(van.bind("*", 0), flush=True)
numbers, connections = set(), set()
while len(numbers) < int(sys.argv[1]):
    for event in van.poll(1.0):
        assert isinstance(event, Received), event
        van.admit(event.connection)
        connections.add(event.connection)
        numbers.add(int(event.frames[0]))
        van.transmit(event.connection, b"", None)
assert len(connections) == 1
van.shut(5.0)
"""

SEND_ALL = """
import sys
from netstorm.pslite.van import Connection, Received, Widened
from netstorm.pslite.zeromq import ZmqVan

van = ZmqVan(streams=3)
van.open(Connection(1), sys.argv[1], int(sys.argv[2]))
sent = answered = 0
streams = 1
while answered < int(sys.argv[3]):
    while sent < min(answered + 4, int(sys.argv[3])):
        assert van.transmit(Connection(1), b"%d" % sent, bytes(100_000), sent % streams)
        sent += 1
    for event in van.poll(1.0):
        assert isinstance(event, (Received, Widened)) or answered == int(sys.argv[3]), event
        streams = event.streams if isinstance(event, Widened) else streams
        answered += isinstance(event, Received)
print(streams)
van.shut(1.0)
"""


@pytest.mark.parametrize(("loss", "streams"), [("1%", 3), ("0%", 1)])
def test_a_connection_that_loses_packets_gets_more_streams(loss: str, streams: int) -> None:
    text = (
        f"nodes: {{0: {{}}, 1: {{}}}}\nlinks: [{{between: [0, 1], rate: 50Mbit, latency: 5ms, loss: {loss}}}]"
    )
    messages = "60" if streams > 1 else "30"
    with Wan.up(network(text), congestion="reno") as wan:
        words = wan.command(1, [sys.executable, "-c", RECEIVE_ALL, messages])
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            assert run(wan, 0, SEND_ALL, "10.78.0.2", port, messages).strip() == str(streams)
            assert receiver.wait(timeout=60) == 0
