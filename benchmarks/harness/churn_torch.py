"""Jobs of `netstorm bench churn` whose sums PyTorch's Gloo makes: torchft, and torchrun with checkpoints."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from harness.churn_job import ChurnJob, Member
from systems.base import BENCHMARKS, environment

__all__ = ["TorchftJob", "TorchrunJob"]

_JOIN_MS: Final = 1000
"""How long torchft's lighthouse waits for ranks that are alive and do not ask for the quorum. Its default of
a minute is for ranks that start together; a rank that has died counts as alive for a heartbeat time-out, and
all others would wait for it. With a tenth of a second, slow ranks went on alone, with other states."""

_MOST_RESTARTS: Final = 100_000


@dataclass(slots=True)
class TorchftJob(ChurnJob):
    """Each rank is a replica group of one process."""

    kinds: ClassVar[Sequence[str]] = ("kill", "stop")
    may_skip: ClassVar[bool] = True
    """A rank that has not got a step's sum takes the others' state."""

    heartbeat_s: float = 3.0

    def start_scheduler(self) -> None:
        """Start the lighthouse."""
        address = self.variables["BENCHMARK_LIGHTHOUSE"].removeprefix("http://")
        host, _, port = address.partition(":")
        worker = str(BENCHMARKS / "workers" / "torchft_lighthouse.py")
        times = [str(_JOIN_MS), str(round(1000 * self.heartbeat_s))]
        with (self.folder / "scheduler.log").open("ab") as log:
            self.scheduler = subprocess.Popen(
                [sys.executable, worker, host, port, str(self.nodes // 2 + 1), *times],
                env=environment(),
                stdin=subprocess.PIPE,  # it ends with this process
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def variables_of(self, rank: int) -> Mapping[str, str]:
        """See `ChurnJob`."""
        return {**self.variables, "RANK": str(rank)}


@dataclass(slots=True)
class TorchrunJob(ChurnJob):
    """One agent starts all ranks, and starts all of them again when one has died. That is the best case for
    it: agents of several machines would have to agree first.
    """

    kinds: ClassVar[Sequence[str]] = ("kill", "stop")

    checkpoint_every: int = 50
    _agent: subprocess.Popen[bytes] | None = None
    _socket: socket.socket | None = None
    _words: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def start_scheduler(self) -> None:
        """Start the agent, which starts the ranks."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.folder / "socket"))
        self._socket.setblocking(False)
        self._words.register(self._socket, selectors.EVENT_READ)
        with (self.folder / "agent.log").open("ab") as log:
            self._agent = subprocess.Popen(
                [
                    *(sys.executable, str(BENCHMARKS / "workers" / "torchrun_agent.py"), "--standalone"),
                    *("--nproc-per-node", str(self.nodes), "--max-restarts", str(_MOST_RESTARTS)),
                    *("--monitor-interval", "0.1"),
                    str(BENCHMARKS / "workers" / "churn_restart.py"),
                    *(str(self.folder), str(self.checkpoint_every)),
                ],
                env=environment(
                    OMP_NUM_THREADS="1",
                    GLOO_SOCKET_IFNAME="lo",
                    # With the agent's store (PyTorch 2.13) ranks find addresses of those before a restart.
                    TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
                    PYTHONPATH=os.pathsep.join((str(BENCHMARKS), str(BENCHMARKS.parent))),
                ),
                stdin=subprocess.PIPE,  # it ends with this process
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start(self, rank: int, now: float) -> None:
        """Expect a rank."""
        assert self._agent is not None
        self.members[rank] = Member(rank, self._agent, 0, self.folder / "agent.log", now)

    def tell(self, rank: int, command: str) -> None:
        """Have all ranks end: the only command."""
        (self.folder / command).touch()

    def kill(self, rank: int, restart_at: float) -> None:
        """Kill a rank. The agent starts all ranks again, at once."""
        os.kill(self.members[rank].pid, signal.SIGKILL)
        for member in self.members.values():
            if member.contributes:
                member.started_at = time.monotonic()
            member.contributes, member.killed = False, True

    def read(self, timeout_s: float) -> None:
        """Take what ranks have said, for at most so long."""
        assert self._socket is not None
        assert self._agent is not None
        if self._words.select(timeout_s):
            for _ in range(1000):
                try:
                    words = json.loads(self._socket.recv(1 << 16))
                except BlockingIOError:
                    break
                self._heard(self.members[words["rank"]], words)
        code = self._agent.poll()
        if code is not None and not all(member.ended for member in self.members.values()):
            self.errors.append(f"torchrun ended with exit code {code}: {self.log_of(self.members[0])[-300:]}")
            for member in self.members.values():
                member.ended = True

    def _heard(self, member: Member, words: dict[str, Any]) -> None:
        if words.get("event") == "joined":
            member.pid, member.step = words["pid"], -1
            member.killed = member.stopped = False
        elif words.get("event") == "ended":
            member.ended = True
        elif words["pid"] == member.pid and not member.killed:
            self._said(member, words)

    def stop(self) -> None:
        """End all processes."""
        if self._agent is not None:
            assert self._agent.stdin is not None
            self._agent.stdin.close()
            for member in self.members.values():
                if member.pid and not member.ended:
                    self.send(member.rank, signal.SIGCONT)
            self._agent.terminate()
            try:
                self._agent.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._agent.pid, signal.SIGKILL)
                self._agent.wait()
        if self._socket is not None:
            self._socket.close()
        self._words.close()
        self._selector.close()
