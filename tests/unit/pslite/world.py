"""Processes with endpoints over vans in memory, on virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable

from netstorm.lab.simulation.memory_network import FixedDelay, MemoryNetwork, MemoryVan, Timeline
from netstorm.lab.testing.recorder import RecordingProcess
from netstorm.pslite.session import Limits


class World:
    """A timeline, a network and the processes on it."""

    def __init__(
        self,
        processes: int = 2,
        *,
        ordered: bool = False,
        delay_s: float = 0.01,
        limits: Limits | None = None,
        seed: int = 0,
        corrupt_probability: float = 0.0,
        break_probability: float = 0.0,
        hosts: str = "host{rank}",
    ) -> None:
        """`hosts`: how the processes' hosts are called."""
        self.hosts = hosts
        self.timeline = Timeline()
        self.limits = limits or Limits()
        self.ordered = ordered
        self.network = MemoryNetwork(
            self.timeline,
            FixedDelay(self.timeline, delay_s=delay_s),
            seed=seed,
            corrupt_probability=corrupt_probability,
            break_probability=break_probability,
        )
        self.processes: list[RecordingProcess] = []
        for rank in range(processes):
            self.add(rank)

    @property
    def now(self) -> float:
        return self.timeline.now

    def add(self, rank: int, *, incarnation: int | None = None, port: int = 0) -> RecordingProcess:
        """Start a process; its host is named after its rank."""
        van = MemoryVan(self.network, self.hosts.format(rank=rank))
        process = RecordingProcess(
            van,
            rank,
            now=lambda: self.timeline.now,
            host=van.host,
            port=van.bind("*", port),
            ordered=self.ordered,
            limits=self.limits,
            incarnation=incarnation,
        )
        self.processes.append(process)
        return process

    def kill(self, process: RecordingProcess, *, silent: bool = False) -> None:
        process.dead = True
        assert isinstance(process.van, MemoryVan)
        process.van.die(silent=silent)

    def settle(self) -> None:
        """Let every process do what is to be done now."""
        busy = True
        while busy:
            turns = [process.turn() for process in self.processes if not process.dead]
            busy = any(turns)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.run_until(lambda: False, seconds)

    def run_until(self, wanted: Callable[[], object], seconds: float = 600.0) -> bool:
        """Let time pass until `wanted` holds, at most `seconds`; return whether it holds."""
        limit = self.now + seconds
        while True:
            self.settle()
            if wanted():
                return True
            due = min(
                (process.stack.next_tick() for process in self.processes if not process.dead),
                default=math.inf,
            )
            if not self.timeline.step(min(limit, max(due, self.now))) and self.now >= limit:
                self.settle()
                return bool(wanted())

    def pair(self) -> tuple[RecordingProcess, RecordingProcess]:
        """Return the first two, the first of which knows where the second is."""
        here, there = self.processes[:2]
        here.connect(there)
        return here, there
