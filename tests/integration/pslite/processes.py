"""A process with a recorder on real sockets, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable

from netstorm import clock
from netstorm.lab.testing.recorder import Recorder
from netstorm.protocol.frames import Peer
from netstorm.pslite.endpoint import Endpoint, Stack
from netstorm.pslite.io_thread import IoThread
from netstorm.pslite.machine import Connect, Instruction
from netstorm.pslite.session import Limits
from netstorm.pslite.zeromq import ZmqVan


class RealProcess:
    """A recorder on an I/O thread of its own."""

    def __init__(
        self,
        rank: int,
        *,
        link_timeout_s: float = 10.0,
        switch_interval_s: float | None = None,
        machine: Recorder | None = None,
    ) -> None:
        self.rank = rank
        self.machine = machine or Recorder()
        self.van = ZmqVan(link_timeout_s=link_timeout_s)
        self.port = self.van.bind("127.0.0.1", 0)
        self.endpoint = Endpoint(
            self.machine,
            job="job",
            incarnation=1000 + rank,
            rank=rank,
            ordered=lambda _: False,
            stamp=clock.monotonic_ns,
            limits=Limits(link_timeout_s=link_timeout_s),
        )
        self.thread = IoThread(
            Stack(self.machine, self.endpoint),
            self.van,
            switch_interval_s=switch_interval_s,
            name=f"io-{rank}",
        )

    def do(self, *instructions: Instruction) -> None:
        """Have the machine give instructions."""
        self.thread.post(lambda _: self.machine.instructions.extend(instructions))

    def connect(self, rank: int, port: int) -> None:
        """Know where another one is."""
        self.do(Connect(peer=Peer(rank), host="127.0.0.1", port=port))

    def is_idle(self) -> bool:
        """Return whether everything has been sent and acknowledged."""
        return self.thread.call(lambda _: not self.machine.instructions and self.endpoint.idle()).result(20)

    def close(self) -> None:
        """End the thread."""
        self.thread.close()


def wait_until(wanted: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait; fail if it does not happen in time."""
    deadline = time.monotonic() + seconds
    while not wanted():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.002)
