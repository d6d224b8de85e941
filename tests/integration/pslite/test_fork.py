"""A process with open sessions forks, as a DataLoader or a multiprocessing.Pool does in the middle of
training.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from netstorm.lab.testing.recorder import part
from netstorm.protocol.frames import Peer
from netstorm.pslite.machine import Send
from tests.integration.pslite.processes import RealProcess, wait_until

ROOT = Path(__file__).parents[3]


class Forker:
    """The process that forks."""

    def __init__(self, port):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.pslite.forker", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.port = int(self.answer())

    def tell(self, *commands):
        self.stdin.write("\n".join(commands) + "\n")
        self.stdin.flush()

    def answer(self):
        return self.stdout.readline().strip()


@pytest.fixture
def there():
    process = RealProcess(1, link_timeout_s=60.0)
    yield process
    process.close()


@pytest.fixture
def forker(there):
    forker = Forker(there.port)
    yield forker
    forker.process.kill()
    forker.process.wait()
    forker.stdin.close()
    forker.stdout.close()


def test_the_parents_traffic_goes_on_over_the_same_connection_however_children_end(there, forker):
    for how in ("hard", "soft"):
        forker.tell("send 20", f"fork 0.2 {how}", "send 20")
        name, _, *problems = forker.answer().split(maxsplit=2)
        assert (name, problems) == ("child", ["[]"])
        forker.tell("send 20", "wait")
        assert forker.answer() == "waited"
    forker.tell(*["send 5", "fork 0.3 soft"] * 4, *["wait"] * 4, "send 5", "idle")
    answers = [forker.answer() for _ in range(9)]
    assert answers[-1] == "idle 1 0 []"
    assert len([answer for answer in answers if answer.startswith("child") and answer.endswith("[]")]) == 4
    wait_until(lambda: there.machine.numbers() == list(range(145)))


def test_an_orphan_does_not_keep_the_connections_of_its_dead_parent_open(there, forker):
    there.connect(0, forker.port)
    there.do(Send(peer=Peer(0), message=part(0)))
    forker.tell("send 5", "fork 40 hard")
    _, child, problems = forker.answer().split(maxsplit=2)
    assert problems == "[]"
    forker.tell("idle")
    forker.answer()
    wait_until(there.is_idle)
    try:
        forker.process.kill()
        forker.process.wait()
        # heartbeats would notice after 30 s (link time-out 60 s): what notices now is that the connection
        # ends
        wait_until(lambda: Peer(0) not in there.endpoint.connections(), 20)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", forker.port))
    finally:
        os.kill(int(child), signal.SIGKILL)
