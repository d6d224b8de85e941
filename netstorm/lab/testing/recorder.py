"""A machine that records what it receives, and a process of a test that runs it on a stack and a van."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from netstorm.protocol import messages as m
from netstorm.protocol.frames import Buffer, Peer, bits_to_wire
from netstorm.pslite.endpoint import Endpoint, Stack
from netstorm.pslite.machine import URGENT, Admission, Admit, Connect, Disconnect, Instruction, Order, Send
from netstorm.pslite.session import Limits
from netstorm.pslite.van import Van

__all__ = ["Recorder", "RecordingProcess", "part"]


def part(number: int, *, round: int = 0) -> m.Part:
    """Return a part that tests recognise by its chunk number."""
    return m.Part(
        key=0,
        round=round,
        chunk=number,
        phase=m.Phase.REDUCE,
        version=0,
        tree=0,
        contributors=bits_to_wire(1),
        dtype="float32",
    )


class Recorder:
    """Implements `Machine`: accepts everything and decides nothing.

    Attributes:
        got: (sender, message, payload) of everything received, in order.
        lost: (peer, reason) of every lost session.
        admission: decides on a `Hello`; by default it admits each process as the rank that it claims.
        on_receive: called with each message before it is recorded; may raise.
        instructions: instructions of the test that were not taken yet.
        aborted: the error that `abort` was called with.
    """

    def __init__(self) -> None:
        self.got: list[tuple[Peer, m.Message, bytes | None]] = []
        self.lost: list[tuple[Peer, str]] = []
        self.admission: Callable[[m.Hello], Admission] = lambda hello: Admit(Peer(hello.sender))
        self.on_receive: Callable[[m.Message], None] = lambda _: None
        self.instructions: list[Instruction] = []
        self.aborted: Exception | None = None

    def admit(self, hello: m.Hello, user: str = "") -> Admission:
        """See `Machine`."""
        return self.admission(hello)

    def receive(
        self, peer: Peer, message: m.Message, payload: Buffer | None, payload_crc: int | None, now: float
    ) -> None:
        """See `Machine`."""
        self.on_receive(message)
        self.got.append((peer, message, None if payload is None else bytes(payload)))

    def peer_lost(self, peer: Peer, reason: str, now: float) -> None:
        """See `Machine`."""
        self.lost.append((peer, reason))

    def tick(self, now: float) -> None:
        """See `Machine`."""

    def next_tick(self) -> float:
        """See `Machine`."""
        return math.inf

    def abort(self, error: Exception, now: float) -> None:
        """See `Machine`."""
        self.aborted = error

    def take_instructions(self) -> list[Instruction]:
        """See `Machine`."""
        taken, self.instructions = self.instructions, []
        return taken

    def numbers(self) -> list[int]:
        """Return the chunk numbers of all parts, in the order of their arrival."""
        return [message.chunk for _, message, _ in self.got if isinstance(message, m.Part)]

    def payloads(self) -> dict[int, bytes | None]:
        """Return the payloads of all parts, by chunk number."""
        return {message.chunk: payload for _, message, payload in self.got if isinstance(message, m.Part)}


class RecordingProcess:
    """A process of a test, whose machine is a `Recorder`. `turn` does what a driver does."""

    def __init__(
        self,
        van: Van,
        rank: int,
        *,
        now: Callable[[], float],
        host: str,
        port: int,
        ordered: bool = False,
        limits: Limits | None = None,
        incarnation: int | None = None,
        seed: int = 0,
    ) -> None:
        """Put a recorder on a van that listens at `host`:`port`."""
        self.van = van
        self.rank = rank
        self.host = host
        self.port = port
        self.dead = False
        self.machine = Recorder()
        self.endpoint = Endpoint(
            self.machine,
            job="job",
            incarnation=1000 + rank if incarnation is None else incarnation,
            rank=rank,
            ordered=lambda _: ordered,
            stamp=lambda: int(now() * 1e9),
            limits=limits,
            rng=random.Random(f"{seed} {rank}"),
            progress=van.progress,
        )
        self.stack = Stack(self.machine, self.endpoint)
        self._now = now

    def turn(self, timeout_s: float = 0.0) -> bool:
        """Do everything that is due now; return whether there was anything."""
        events = self.van.poll(timeout_s)
        now = self._now()
        for event in events:
            self.stack.handle(event, now)
        busy = bool(events) or bool(self.machine.instructions) or self.stack.next_tick() <= now
        self.stack.tick(now)
        self.stack.flush(self.van, now)
        return busy

    def connect(self, other: RecordingProcess, host: str | None = None, port: int | None = None) -> None:
        """Announce the address of another process."""
        self.machine.instructions.append(
            Connect(peer=Peer(other.rank), host=host or other.host, port=port or other.port)
        )

    def send(
        self, to: RecordingProcess, message: m.Message, payload: Buffer | None = None, order: Order = URGENT
    ) -> None:
        """Send a message to another process."""
        self.machine.instructions.append(
            Send(peer=Peer(to.rank), message=message, payload=payload, order=order)
        )

    def disconnect(self, other: RecordingProcess, *, at_once: bool = False) -> None:
        """End the sessions with another process."""
        self.machine.instructions.append(Disconnect(peer=Peer(other.rank), at_once=at_once))
