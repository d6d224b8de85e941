"""Processes with endpoints over vans in memory, on virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from netstorm.lab.simulation.memory_network import FixedDelay, MemoryNetwork, MemoryVan, Timeline
from netstorm.lab.testing.recorder import Recorder, RecordingProcess, part
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer, Header, open_frames
from netstorm.pslite.endpoint import Endpoint, Stack
from netstorm.pslite.session import Limits
from netstorm.pslite.van import Connection, Received, VanEvent


class WatchedVan(MemoryVan):
    """Keeps what it has received, and the connections that it has opened."""

    def __init__(self, network: MemoryNetwork, host: str) -> None:
        super().__init__(network, host)
        self.received: list[Received] = []
        self.opened: list[Connection] = []

    def poll(self, timeout_s: float) -> list[VanEvent]:
        events = super().poll(timeout_s)
        self.received += [event for event in events if isinstance(event, Received)]
        return events

    def open(self, connection: Connection, host: str, port: int) -> None:
        self.opened.append(connection)
        super().open(connection, host, port)


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
        van = WatchedVan(self.network, self.hosts.format(rank=rank))
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


def met(**options: Any) -> tuple[World, RecordingProcess, RecordingProcess]:
    """Return a world of two processes, the first of which knows where the second is."""
    world = World(**options)
    return world, *world.pair()


def connected(**options: Any) -> tuple[World, RecordingProcess, RecordingProcess]:
    """Return such a world in which part 0 has gone from the first to the second."""
    world, here, there = met(**options)
    here.send(there, part(0))
    world.run(1)
    return world, here, there


def hello_of(process: RecordingProcess, sender: int) -> tuple[Connection, m.Hello]:
    """Return the last Hello of a rank that a process has received, and over which connection."""
    assert isinstance(process.van, WatchedVan)
    for event in reversed(process.van.received):
        message = open_frames(event.frames[0], len(event.frames)).message
        if isinstance(message, m.Hello) and message.sender == sender:
            return event.connection, message
    raise AssertionError(f"no Hello of rank {sender}")


def swallow(process: RecordingProcess, wanted: Callable[[Header], object]) -> None:
    """Let the messages of a process that `wanted` holds for vanish on their way."""
    transmit = process.van.transmit

    def transmit_others(
        connection: Connection, header: bytes, payload: Buffer | None, stream: int = 0
    ) -> bool:
        lost = wanted(open_frames(header, 1 if payload is None else 2))
        return True if lost else transmit(connection, header, payload, stream)

    setattr(process.van, "transmit", transmit_others)  # noqa: B010 - a method


def give(process: RecordingProcess, machine: Recorder, **options: Any) -> None:
    """Have a process begin anew with another machine, and options of its endpoint."""
    before = process.endpoint.process
    process.machine = machine
    process.endpoint = Endpoint(
        machine, job=before.job, incarnation=before.incarnation, rank=before.rank, stamp=lambda: 0, **options
    )
    process.stack = Stack(machine, process.endpoint)
