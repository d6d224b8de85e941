"""The relay: a loop that carries packets between TUN devices, as slowly and badly as the links it stands for.

What is between its devices is decided by `Shaper`s; here are the reads, the writes and the timer. One read
moves a whole super-packet, which is passed on as the very bytes that were read.
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
from typing import Any, Final

from netstorm import clock
from netstorm.emulation.links.packets import LARGEST, destination, source
from netstorm.emulation.links.shaping import Shaper
from netstorm.pslite.system.timer_fd import TimerFd

__all__ = ["Cap", "Direction", "Relay"]

_GRAIN_S: Final = 0.0004
"""Packets due this soon after each other are written together: it costs half of it in precision."""
_NEVER: Final = 1e18


@dataclass(slots=True, eq=False)
class Cap:
    """An access cap of a node, and for each packet in its queue the direction that it goes on to."""

    address: bytes
    """The node's. What it forwards for others does not count, as in the planner."""
    shaper: Shaper
    goes_to: deque[Direction] = field(default_factory=deque)

    def offer(self, packet: bytes, now: float, direction: Direction) -> None:
        """Take a packet that comes now, and goes on to `direction`."""
        before = len(self.shaper.queue)
        self.shaper.offer(packet, now)
        self.goes_to.extend([direction] * (len(self.shaper.queue) - before))


@dataclass(slots=True, eq=False)
class Direction:
    """One direction of a link, and where its packets come from and go to."""

    key: str
    """SOURCE-TARGET, for the control channel."""
    reads: int
    writes: int
    shaper: Shaper
    egress: Cap | None = None
    ingress: Cap | None = None
    failed: int = 0
    """Packets that the device did not take: it was down, or had no memory."""

    def take(self, packet: bytes, now: float) -> None:
        """Take a packet from the source's device."""
        if self.egress is not None and source(packet) == self.egress.address:
            self.egress.offer(packet, now, self)
        else:
            self.shaper.offer(packet, now)

    def put(self, packet: bytes) -> None:
        """Give a packet to the target's device."""
        try:
            os.write(self.writes, packet)
        except OSError:
            self.failed += 1


class Relay:
    """Carries packets until its control channel is closed. One thread; never blocks but in its poll."""

    def __init__(self, directions: Sequence[Direction], control: socket.socket) -> None:
        """Take devices and a SEQPACKET control channel; none of them block."""
        self._by_descriptor: Final = {direction.reads: direction for direction in directions}
        self._by_key: Final = {direction.key: direction for direction in directions}
        self._control: Final = control
        self._poll: Final = select.epoll()
        self._timer: Final = TimerFd()
        self._straight: Final = [one for one in directions if one.ingress is None]
        self._capped: Final = [one for one in directions if one.ingress is not None]
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
        # Into one buffer, and a copy of what came: cheaper than 64 KiB of new memory each time.
        buffer = bytearray(LARGEST)
        into, view, read = [buffer], memoryview(buffer), os.readv
        control, timer = self._control.fileno(), self._timer.fileno()
        while True:
            for descriptor, _ in self._poll.poll():
                direction = by_descriptor.get(descriptor)
                if direction is not None:
                    time = now()
                    take = direction.shaper.offer if direction.egress is None else direction.take
                    take(bytes(view[: read(descriptor, into)]), time)
                elif descriptor == timer:
                    self._timer.take()
                    self._armed_for = 0.0
                elif descriptor == control and not self._obey():
                    return
            self._deliver(now())

    def _deliver(self, time: float) -> None:
        """Write what is due, and set the timer for what is due next."""
        limit = time + _GRAIN_S / 2
        soonest = _NEVER
        write = os.write
        for cap in self._egress:
            soonest = min(soonest, _leave(cap, limit, onwards=True))
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
            soonest = min(soonest, _arrive(direction, limit))
        for cap in self._ingress:
            soonest = min(soonest, _leave(cap, limit, onwards=False))
        soonest -= _GRAIN_S / 2  # as early as `limit` allows: waking up takes about as long
        if soonest < _NEVER / 2 and not 0.0 < self._armed_for <= soonest:
            self._armed_for = max(soonest, time + _GRAIN_S)
            self._timer.arm(self._armed_for - time)

    def _obey(self) -> bool:
        """Do what the control channel says; return False if it is closed."""
        try:
            text = self._control.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not text:
            return False
        order: dict[str, Any] = json.loads(text)
        if "set" in order:
            self._by_key[order["link"]].shaper.change(clock.monotonic(), **order["set"])
        else:
            self._control.send(json.dumps(self._counters()).encode())
        return True

    def _counters(self) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        links = {}
        for key, direction in self._by_key.items():
            shaper = direction.shaper
            links[key] = {
                "packets": shaper.carried,
                "bytes": shaper.wire_bytes,
                "dropped": shaper.dropped + direction.failed,
                "lost": shaper.lost,
            }
        return {"pid": os.getpid(), "cpu_s": used.ru_utime + used.ru_stime, "links": links}


def _leave(cap: Cap, limit: float, *, onwards: bool) -> float:
    """Move what is due out of an access cap: on to its link, or the device; return when the next is due."""
    queue = cap.shaper.queue
    while queue and queue[0][0] <= limit:
        due, packet, _ = queue.popleft()
        direction = cap.goes_to.popleft()
        if onwards:
            direction.shaper.offer(packet, due)
        else:
            direction.put(packet)
    return queue[0][0] if queue else _NEVER


def _arrive(direction: Direction, limit: float) -> float:
    """Move what is due out of a link to a node with an ingress cap; return when the next is due."""
    queue = direction.shaper.queue
    cap = direction.ingress
    while queue and queue[0][0] <= limit:
        due, packet, _ = queue.popleft()
        if cap is not None and destination(packet) == cap.address:
            cap.offer(packet, due, direction)
        else:
            direction.put(packet)
    return queue[0][0] if queue else _NEVER
