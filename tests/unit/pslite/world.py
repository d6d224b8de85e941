"""Two or more processes with endpoints over vans in memory, on virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from netstorm.errors import PeerError
from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer, bits_to_wire
from netstorm.pslite.endpoint import Endpoint
from netstorm.pslite.limits import Limits
from netstorm.pslite.machine import (
    URGENT,
    Admission,
    Admit,
    Connect,
    Disconnect,
    Instruction,
    NotYet,
    Order,
    Refuse,
    Send,
)
from netstorm.pslite.memory_network import FixedDelay, MemoryNetwork
from netstorm.pslite.memory_van import MemoryVan
from netstorm.pslite.stack import Stack
from netstorm.pslite.virtual_time import Timeline


class Recorder:
    """A machine that writes down what happens to it, and does what the test says."""

    def __init__(self) -> None:
        self.got: list[tuple[Peer, m.Message, bytes | None]] = []
        self.lost: list[tuple[Peer, str]] = []
        self.admission: Callable[[m.Hello], Admission] = lambda hello: Admit(Peer(hello.sender))
        self.instructions: list[Instruction] = []
        self.on_receive: Callable[[m.Message], None] = lambda message: None
        self.aborted: Exception | None = None

    def admit(self, hello: m.Hello) -> Admission:
        return self.admission(hello)

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int, now: float
    ) -> None:
        self.on_receive(message)
        self.got.append((peer, message, None if payload is None else bytes(payload)))

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        self.lost.append((peer, reason))

    def tick(self, now: float) -> None:
        pass

    def next_tick(self) -> float:
        return math.inf

    def abort(self, error: Exception, now: float) -> None:
        self.aborted = error

    def take_instructions(self) -> list[Instruction]:
        taken, self.instructions = self.instructions, []
        return taken

    def numbers(self) -> list[int]:
        """Return the chunk numbers of all parts, in the order in which they came."""
        return [message.chunk for _, message, _ in self.got if isinstance(message, m.Part)]


class Process:
    """One rank: a recorder on a stack on a van."""

    def __init__(self, world: World, rank: int, *, ordered: bool = False, limits: Limits | None = None) -> None:
        self.world = world
        self.rank = rank
        self.machine = Recorder()
        self.van = MemoryVan(world.network, f"host{rank}")
        self.port = self.van.bind("*", 0)
        self.endpoint = Endpoint(
            self.machine,
            job="job",
            incarnation=1000 + rank,
            rank=rank,
            ordered=lambda peer: ordered,
            stamp=lambda: int(world.timeline.now * 1e9),
            limits=limits or world.limits,
            rng=random.Random(rank),
        )
        self.stack = Stack(self.machine, self.endpoint)
        self.dead = False

    def turn(self) -> bool:
        """Do everything that is to be done now; return whether there was anything."""
        now = self.world.timeline.now
        events = self.van.poll(0)
        for event in events:
            self.stack.handle(event, now)
        busy = bool(events) or bool(self.machine.instructions) or self.stack.next_tick() <= now
        self.stack.tick(now)
        self.stack.flush(self.van, now)
        return busy

    def connect(self, other: Process) -> None:
        self.machine.instructions.append(
            Connect(peer=Peer(other.rank), host=f"host{other.rank}", port=other.port)
        )

    def send(
        self, to: Process, message: m.Message, payload: Buffer | None = None, order: Order = URGENT
    ) -> None:
        self.machine.instructions.append(
            Send(peer=Peer(to.rank), message=message, payload=payload, order=order)
        )

    def disconnect(self, other: Process, *, at_once: bool = False) -> None:
        self.machine.instructions.append(Disconnect(peer=Peer(other.rank), at_once=at_once))


class World:
    """A timeline, a network and the processes on it."""

    def __init__(
        self,
        processes: int = 2,
        *,
        ordered: bool = False,
        delay_s: float = 0.01,
        limits: Limits | None = None,
        **network: float,
    ) -> None:
        self.timeline = Timeline()
        self.limits = limits or Limits()
        self.network = MemoryNetwork(
            self.timeline, FixedDelay(self.timeline, delay_s=delay_s), **network  # type: ignore[arg-type]
        )
        self.processes = [Process(self, rank, ordered=ordered) for rank in range(processes)]

    def settle(self) -> None:
        """Let every process do what is to be done now."""
        while any([process.turn() for process in self.processes if not process.dead]):
            pass

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.run_until(lambda: False, seconds)

    def run_until(self, wanted: Callable[[], bool], seconds: float = 600.0) -> bool:
        """Let time pass until `wanted` holds, at most `seconds`; return whether it holds."""
        limit = self.timeline.now + seconds
        while True:
            self.settle()
            if wanted():
                return True
            due = min(
                (process.stack.next_tick() for process in self.processes if not process.dead), default=math.inf
            )
            due = max(due, self.timeline.now)
            if not self.timeline.step(min(limit, due)) and self.timeline.now >= limit:
                self.settle()
                return wanted()

    def pair(self) -> tuple[Process, Process]:
        """Return the first two, the first of which knows where the second is."""
        here, there = self.processes[:2]
        here.connect(there)
        return here, there


def part(number: int, **fields: object) -> m.Part:
    """Return a part that is recognised by its chunk number."""
    return m.Part(
        key=0,
        round=0,
        chunk=number,
        phase=m.Phase.REDUCE,
        version=0,
        tree=0,
        contributors=bits_to_wire(1),
        dtype="float32",
        **fields,  # type: ignore[arg-type]
    )


__all__ = ["NotYet", "PeerError", "Process", "Recorder", "Refuse", "World", "part"]
