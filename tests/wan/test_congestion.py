"""TCP's congestion control on connections between hosts, which have another one than BBR."""

from __future__ import annotations

import subprocess
import sys

import pytest

from netstorm.lab.emulation import Wan
from netstorm.lab.emulation.links import available_congestion_controls
from tests.wan.traces import network, run

pytestmark = pytest.mark.skipif(
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
