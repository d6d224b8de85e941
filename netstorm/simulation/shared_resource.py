"""A shared capacity on virtual time: processor sharing, as TCP connections share a bottleneck.

Every flow that has something to send gets the same share at every moment; within a flow messages go in order.
Finding the next to finish costs O(log flows): all flows advance at the same speed, so each message's end is
one number in a common "service received" coordinate (the virtual time of generalised processor sharing,
Parekh and Gallager 1993, with equal weights).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Final

from netstorm.pslite.virtual_time import Timeline, Timer

__all__ = ["SharedResource"]


class _Job:
    """One message at one resource."""

    __slots__ = ("begun", "bits", "done", "flow", "live")

    def __init__(self, flow: int, bits: float, begun: Callable[[], None], done: Callable[[], None]) -> None:
        self.flow = flow
        self.bits = bits
        self.begun = begun
        self.done = done
        self.live = True


class SharedResource:
    """A link, an access line: so many bit/s for all flows together."""

    def __init__(self, timeline: Timeline, capacity: float) -> None:
        """Begin idle. `capacity` in bit/s; 0 means that nothing gets through."""
        self._timeline: Final = timeline
        self._capacity = capacity
        self._queues: dict[int, deque[_Job]] = {}
        """By flow; the first of each is being served."""
        self._served = 0.0
        """Bits that a flow which never paused has been served."""
        self._served_at = timeline.now
        self._ends: list[tuple[float, int, _Job]] = []
        self._entered = 0
        self._timer: Timer | None = None
        self.bits = 0.0
        """Bits served completely, for utilisation."""

    @property
    def capacity(self) -> float:
        """Bit/s for all flows together."""
        return self._capacity

    def set_capacity(self, capacity: float) -> None:
        """Change the capacity from now on, also for what is being served."""
        self._advance()
        self._capacity = capacity
        self._plan()

    def enter(self, flow: int, bits: float, begun: Callable[[], None], done: Callable[[], None]) -> None:
        """Serve a message; call `begun` when its turn in its flow comes, `done` when all of it is through."""
        job = _Job(flow, bits, begun, done)
        queue = self._queues.get(flow)
        if queue is not None:
            queue.append(job)
            return
        self._advance()
        self._queues[flow] = deque((job,))
        self._begin(job)
        self._plan()

    def forget(self, flow: int) -> None:
        """Drop what a flow has here."""
        self._advance()
        for job in self._queues.pop(flow, ()):
            job.live = False
        self._plan()

    def _begin(self, job: _Job) -> None:
        heapq.heappush(self._ends, (self._served + job.bits, self._entered, job))
        self._entered += 1
        job.begun()

    def _advance(self) -> None:
        """Account for the service since the last look."""
        now = self._timeline.now
        if self._queues and now > self._served_at:
            self._served += self._capacity * (now - self._served_at) / len(self._queues)
        self._served_at = now

    def _plan(self) -> None:
        """Set the timer to the next message that will be through."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and not self._ends[0][2].live:
            heapq.heappop(self._ends)
        if self._ends and self._capacity > 0:
            left = max(0.0, self._ends[0][0] - self._served) * len(self._queues)
            time = self._timeline.now + left / self._capacity
            if time < math.inf:
                self._timer = self._timeline.at(time, self._finish)

    def _finish(self) -> None:
        self._timer = None
        self._served_at = self._timeline.now
        end, _, job = heapq.heappop(self._ends)
        self._served = max(self._served, end)  # exactly: rounding must not leave a sliver to serve
        job.live = False
        self.bits += job.bits
        queue = self._queues[job.flow]
        queue.popleft()
        if queue:
            self._begin(queue[0])
        else:
            del self._queues[job.flow]
        if not self._queues:
            self._served = 0.0  # keep the numbers small, and so their rounding
        self._plan()
        job.done()
