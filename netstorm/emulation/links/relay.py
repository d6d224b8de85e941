"""The relay: a loop that carries packets between TUN devices, with the rates, latencies and losses of links.

`Shaper`s decide when a packet arrives; here are the reads, the writes and the timer. One read moves a whole
super-packet, whose bytes are passed on unchanged.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from netstorm import clock
from netstorm.emulation.links.packets import LARGEST, destination, source
from netstorm.emulation.links.shaping import Shaper
from netstorm.emulation.reports import LinkCounters, RelayAnswer
from netstorm.pslite.system import TimerFd

__all__ = ["Cap", "Direction", "Relay"]

_GRAIN_S: Final = 0.0004
"""Packets that are due within this time are written together, which costs half of it in precision."""
_NEVER: Final = 1e18


@dataclass(slots=True, eq=False)
class Cap:
    """An access cap of a node, and for each packet in its queue its next direction."""

    addresses: frozenset[bytes]
    """The node's, of IPv4 and IPv6. Packets that it forwards for other nodes do not count, as in planning."""
    shaper: Shaper
    goes_to: deque[Direction] = field(default_factory=deque)

    def offer(self, packet: bytes, now: float, direction: Direction) -> None:
        """Add a packet that arrives now, and continues to `direction`."""
        before = len(self.shaper.queue)
        self.shaper.offer(packet, now)
        self.goes_to.extend([direction] * (len(self.shaper.queue) - before))


@dataclass(slots=True, eq=False)
class Direction:
    """One direction of a link, and its devices."""

    key: str
    """SOURCE-TARGET, for the control channel."""
    reads: int
    writes: int
    shaper: Shaper
    egress: Cap | None = None
    ingress: Cap | None = None
    failed: int = 0
    """Packets that the device refused: it was down, or had no memory."""

    def receive(self, packet: bytes, now: float) -> None:
        """Add a packet from the source's device."""
        if self.egress is not None and source(packet) in self.egress.addresses:
            self.egress.offer(packet, now, self)
        else:
            self.shaper.offer(packet, now)

    def deliver(self, packet: bytes) -> None:
        """Write a packet to the target's device."""
        try:
            os.write(self.writes, packet)
        except OSError:
            self.failed += 1


class Relay:
    """Carries packets until its control channel is closed. One thread; never blocks but in its poll."""

    def __init__(self, directions: Sequence[Direction], control: socket.socket) -> None:
        """Begin without packets; the devices and the SEQPACKET control channel must not block."""
        self._by_descriptor: Final = {direction.reads: direction for direction in directions}
        self._by_key: Final = {direction.key: direction for direction in directions}
        self._control: Final = control
        self._poll: Final = select.epoll()
        self._timer: Final = TimerFd()
        self._straight: Final = [direction for direction in directions if direction.ingress is None]
        self._capped: Final = [direction for direction in directions if direction.ingress is not None]
        self._egress: Final = list({id(one.egress): one.egress for one in directions if one.egress}.values())
        self._ingress: Final = list(
            {id(one.ingress): one.ingress for one in directions if one.ingress}.values()
        )
        self._armed_for = 0.0
        for descriptor in (*self._by_descriptor, control.fileno(), self._timer.fileno()):
            self._poll.register(descriptor, select.EPOLLIN)

    def run(self) -> None:
        """Carry packets until the control channel is closed at its other end."""
        now = clock.monotonic
        by_descriptor = self._by_descriptor
        # One buffer, and a copy of each packet: cheaper than 64 KiB of new memory each time.
        buffer = bytearray(LARGEST)
        into, view, read = [buffer], memoryview(buffer), os.readv
        control, timer = self._control.fileno(), self._timer.fileno()
        while True:
            for descriptor, _ in self._poll.poll():
                direction = by_descriptor.get(descriptor)
                if direction is not None:
                    time = now()
                    receive = direction.shaper.offer if direction.egress is None else direction.receive
                    receive(bytes(view[: read(descriptor, into)]), time)
                elif descriptor == timer:
                    self._timer.take()
                    self._armed_for = 0.0
                elif descriptor == control and not self._answer_control():
                    return
            self._deliver(now())

    def _deliver(self, time: float) -> None:
        """Write what is due, and set the timer for what is due next."""
        limit = time + _GRAIN_S / 2
        soonest = _NEVER
        write = os.write
        for cap in self._egress:
            soonest = min(soonest, _drain_cap(cap, limit, onwards=True))
        for direction in self._straight:
            queue = direction.shaper.queue
            while queue:
                due = queue[0][0]
                if due > limit:
                    soonest = min(due, soonest)
                    break
                try:
                    write(direction.writes, queue.popleft()[1])
                except OSError:
                    direction.failed += 1
        for direction in self._capped:
            soonest = min(soonest, _drain_link(direction, limit))
        for cap in self._ingress:
            soonest = min(soonest, _drain_cap(cap, limit, onwards=False))
        soonest -= _GRAIN_S / 2  # waking up takes about as long
        if soonest < _NEVER / 2 and not 0.0 < self._armed_for <= soonest:
            self._armed_for = max(soonest, time + _GRAIN_S)
            self._timer.arm(self._armed_for - time)

    def _answer_control(self) -> bool:
        """Handle a request of the control channel; return False if the channel is closed."""
        try:
            text = self._control.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not text:
            return False
        request = json.loads(text)
        if "set" in request:
            self._by_key[request["link"]].shaper.change(clock.monotonic(), **request["set"])
        else:
            self._control.send(json.dumps(self._counters()).encode())
        return True

    def _counters(self) -> RelayAnswer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        links: dict[str, LinkCounters] = {}
        for key, direction in self._by_key.items():
            shaper = direction.shaper
            links[key] = {
                "packets": shaper.carried,
                "bytes": shaper.wire_bytes,
                "dropped": shaper.dropped + direction.failed,
                "lost": shaper.lost,
            }
        return {"pid": os.getpid(), "cpu_s": used.ru_utime + used.ru_stime, "links": links}


def _drain_cap(cap: Cap, limit: float, *, onwards: bool) -> float:
    """Move due packets out of an access cap, to their link or device; return when the next is due."""
    queue = cap.shaper.queue
    while queue and queue[0][0] <= limit:
        due, packet, _ = queue.popleft()
        direction = cap.goes_to.popleft()
        if onwards:
            direction.shaper.offer(packet, due)
        else:
            direction.deliver(packet)
    return queue[0][0] if queue else _NEVER


def _drain_link(direction: Direction, limit: float) -> float:
    """Move due packets out of a link to a node with an ingress cap; return when the next is due."""
    queue = direction.shaper.queue
    cap = direction.ingress
    while queue and queue[0][0] <= limit:
        due, packet, _ = queue.popleft()
        if cap is not None and destination(packet) in cap.addresses:
            cap.offer(packet, due, direction)
        else:
            direction.deliver(packet)
    return queue[0][0] if queue else _NEVER
