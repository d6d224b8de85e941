"""What this machine allows: NumPy adds up arrays that lie in memory which all processes share, and no more.

Each rank copies its values in, adds up a share of all ranks', and copies the result out. Nothing is sent but
the word that all are there, three times a round, through sockets.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from systems.base import Case, Launch, Node, Process, environment, worker_command

__all__ = ["BareSharedMemory"]

_BLOCK = 65_536
"""Elements that are added at a time: the cache holds them."""
_START_S = 60.0
_STEP_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class BareSharedMemory:
    """A sum in shared memory, without a system."""

    name: str = "shared-memory"
    framework: str = "torch"
    settings: Mapping[str, str] = field(default_factory=lambda: {"algorithm": "a share of the sum a rank"})

    def launch(self, case: Case) -> Launch:
        """Return the processes of one group."""
        port = case.port()
        return Launch(
            workers=[
                Process(
                    name=f"{self.name} worker {rank}",
                    command=worker_command(self.name, case),
                    environment=environment(BENCHMARK_RANK=rank, BENCHMARK_PORT=port),
                    rank=rank,
                )
                for rank in range(case.nodes)
            ]
        )

    def memory(self, case: Case) -> int:
        """Return about how many bytes a group needs at its peak."""
        return case.nodes * (100_000_000 + 2 * case.bytes) + case.bytes

    def join(self, case: Case) -> Node:
        """Join the group that this worker process was started for."""
        return _SharedNode(case)


class _SharedNode:
    def __init__(self, case: Case) -> None:
        self.rank = int(os.environ["BENCHMARK_RANK"])
        self.nodes = case.nodes
        self.sizes = case.sizes
        self._values = np.zeros(sum(case.sizes), np.float32)
        self._starts = np.cumsum([0, *case.sizes])
        port = int(os.environ["BENCHMARK_PORT"])
        self._peers: list[socket.socket] = []
        size = (case.nodes + 1) * self._values.nbytes
        if self.rank == 0:
            descriptor = os.memfd_create("netstorm-benchmark")
            os.ftruncate(descriptor, size)
            with socket.create_server(("127.0.0.1", port)) as server:
                self._peers = [server.accept()[0] for _ in range(case.nodes - 1)]
            for peer in self._peers:
                peer.sendall(f"/proc/{os.getpid()}/fd/{descriptor}".ljust(64).encode())
        else:
            self._peers = [_connected(port)]
            descriptor = os.open(self._peers[0].recv(64, socket.MSG_WAITALL).decode().strip(), os.O_RDWR)
        for peer in self._peers:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shared = np.frombuffer(mmap.mmap(descriptor, size), np.float32).reshape(case.nodes + 1, -1)
        self._of_ranks, self._result = shared[:-1], shared[-1]
        self._wait_for_all()

    def write(self, index: int, start: int, values: NDArray[np.float32]) -> None:
        """Overwrite a part of array `index`."""
        begin = self._starts[index] + start
        self._values[begin : begin + len(values)] = values

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return a part of array `index`."""
        return self._values[self._starts[index] + start : self._starts[index] + stop]

    def settle(self) -> None:
        """Do nothing: writes are done when they return."""

    def allreduce(self) -> None:
        """Replace every array by the sum over all ranks."""
        np.copyto(self._of_ranks[self.rank], self._values)
        self._wait_for_all()
        begin, end = (len(self._values) * place // self.nodes for place in (self.rank, self.rank + 1))
        for start in range(begin, end, _BLOCK):
            stop = min(start + _BLOCK, end)
            np.add.reduce(self._of_ranks[:, start:stop], axis=0, out=self._result[start:stop])
        self._wait_for_all()
        np.copyto(self._values, self._result)
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        """Return once all ranks have called this."""
        if self.rank:
            self._peers[0].sendall(b".")
            self._peers[0].recv(1, socket.MSG_WAITALL)
            return
        for peer in self._peers:
            peer.recv(1, socket.MSG_WAITALL)
        for peer in self._peers:
            peer.sendall(b".")


def _connected(port: int) -> socket.socket:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_STEP_S)
