"""One direction of a link as a queue on virtual time: rate, latency, loss and a bounded buffer. Pure.

A packet waits until those before it have left, takes bytes / rate to leave, and arrives after the latency. So
the state of the queue is the time at which it will be empty; a packet's arrival is computed once, when it is
offered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Final

from netstorm.emulation.links.packets import measure, split

__all__ = ["BUFFER_S", "LEAST_BUFFER", "Shaper", "buffer_bytes"]

BUFFER_S: Final = 0.1
"""Capacity of a queue, in time at the link's rate: as in routers of such links; both bbr and cubic need it.
"""
LEAST_BUFFER: Final = 70_000
"""Bytes: one super-packet, which else would never pass a slow link whole."""
_NEVER: Final = 1 << 60


def buffer_bytes(rate: float) -> int:
    """Return the bytes that the queue of a link of `rate` bit/s holds."""
    return max(LEAST_BUFFER, int(rate / 8 * BUFFER_S))


class Shaper:
    """One direction of a link, or an access cap. Times are in seconds of any monotonic clock."""

    __slots__ = (
        "_buffer",
        "_bytes_per_s",
        "_free_at",
        "_latency",
        "_loss",
        "_random",
        "_till_loss",
        "carried",
        "dropped",
        "lost",
        "queue",
        "wire_bytes",
    )

    def __init__(self, *, rate: float, latency: float, loss: float, random: Random) -> None:
        """Begin empty. `rate` in bit/s, `latency` in s, `loss` as a fraction of segments."""
        self.queue: Final[deque[tuple[float, bytes, int]]] = deque()
        """(when it arrives at the other end, packet, bytes on the wire), in order."""
        self.carried = 0
        """Segments that arrived, or are in flight."""
        self.wire_bytes = 0
        """Bytes of those segments on the wire."""
        self.dropped = 0
        """Segments for which the queue had no room."""
        self.lost = 0
        """Segments lost by chance."""
        self._random: Final = random
        self._free_at = 0.0
        self._bytes_per_s = rate / 8
        self._buffer = buffer_bytes(rate)
        self._latency = latency
        self._loss = loss
        self._till_loss = self._next_loss()

    def change(
        self,
        now: float,
        *,
        rate: float | None = None,
        latency: float | None = None,
        loss: float | None = None,
    ) -> None:
        """Change values from `now` on. Queued packets leave at the new rate; packets in flight stay as they
        are.
        """
        if rate is not None and rate / 8 != self._bytes_per_s:
            factor = self._bytes_per_s / (rate / 8)
            retimed = []
            for due, packet, size in self.queue:
                leaves = due - self._latency
                new_due = now + (leaves - now) * factor + self._latency if leaves > now else due
                retimed.append((new_due, packet, size))
            self.queue.clear()
            self.queue.extend(retimed)
            if self._free_at > now:
                self._free_at = now + (self._free_at - now) * factor
            self._bytes_per_s = rate / 8
            self._buffer = buffer_bytes(rate)
        if latency is not None:
            self._latency = latency
        if loss is not None:
            self._loss = loss
            self._till_loss = self._next_loss()

    def offer(self, packet: bytes, now: float) -> None:
        """Queue a packet that arrives now, whole or in part, or drop it."""
        segments, size = measure(packet)
        free_at = self._free_at
        free_at = max(free_at, now)
        room = self._buffer - (free_at - now) * self._bytes_per_s
        if size > room:
            fitting = int(room * segments // size)
            self.dropped += segments - fitting
            pieces = split(packet, [True] * fitting + [False] * (segments - fitting)) if fitting > 0 else []
            if not pieces:
                self.dropped += fitting
                return
            (packet, segments) = pieces[0]
            segments, size = measure(packet)
        self._free_at = free_at = free_at + size / self._bytes_per_s
        if self._till_loss >= segments:
            self._till_loss -= segments
            self.carried += segments
            self.wire_bytes += size
            # After a change to a shorter latency, a packet must not overtake those in flight.
            due = free_at + self._latency
            queue = self.queue
            if queue and queue[-1][0] > due:
                due = queue[-1][0]
            queue.append((due, packet, size))
        else:
            self._lose(packet, segments, free_at + self._latency)

    def _lose(self, packet: bytes, segments: int, due: float) -> None:
        keep = self._draw(segments)
        gone = segments - sum(keep)
        pieces = split(packet, keep) if segments > 1 else []
        self.lost += gone if pieces else segments
        if self.queue:
            due = max(due, self.queue[-1][0])
        for piece, count in pieces:
            _, size = measure(piece)
            self.carried += count
            self.wire_bytes += size
            self.queue.append((due, piece, size))

    def _draw(self, segments: int) -> Sequence[bool]:
        keep = [True] * segments
        place = self._till_loss
        while place < segments:
            keep[place] = False
            place += 1 + self._next_loss()
        self._till_loss = place - segments
        return keep

    def _next_loss(self) -> int:
        """Return the number of segments until the next loss: geometric."""
        if self._loss <= 0:
            return _NEVER
        return int(math.log(1.0 - self._random.random()) / math.log1p(-self._loss))
