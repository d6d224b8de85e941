"""How messages cross a chain of shared resources: cut-through, so a long path costs its bottleneck and not
the sum.

The first bit of a message enters the next resource as soon as its service begins at the one before (plus the
latency between them); the last bit leaves a resource when its own service is done and the last bit has come
in. A slow resource in front of a fast one is thus right on average; within one message it may take the fast
one's capacity early, so rates are exact over times that are long against one message, and not below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from netstorm.pslite.virtual_time import Timeline
from netstorm.simulation.shared_resource import SharedResource

__all__ = ["Hop", "Passage"]


@dataclass(slots=True)
class Hop:
    """One resource of a path and the latency behind it, in s, which may change. Passages share hops."""

    resource: SharedResource
    latency_s: float


class Passage:
    """A flow's way through its resources. Everything on it ends when it is closed."""

    __slots__ = ("_flow", "_hops", "_open", "_timeline")

    def __init__(self, timeline: Timeline, flow: int, hops: tuple[Hop, ...]) -> None:
        self._timeline = timeline
        self._flow = flow
        self._hops = hops
        self._open = True

    def send(self, bits: float, arrived: Callable[[], None]) -> None:
        """Send a message."""
        _Transit(self, bits, arrived).enter(0)

    def close(self) -> None:
        """Drop what is under way."""
        self._open = False
        for hop in self._hops:
            hop.resource.forget(self._flow)

    def is_open(self) -> bool:
        """Return whether it still carries anything."""
        return self._open

    def serve(self, index: int, bits: float, begun: Callable[[], None], done: Callable[[], None]) -> None:
        """Queue a message at resource `index`."""
        self._hops[index].resource.enter(self._flow, bits, begun, done)

    def behind(self, index: int, action: Callable[[], None]) -> None:
        """Do something when what leaves resource `index` now has come to the next."""
        self._timeline.after(self._hops[index].latency_s, action)

    def length(self) -> int:
        """Return the number of resources."""
        return len(self._hops)


class _Transit:
    """One message on a passage."""

    __slots__ = ("_all_in", "_arrived", "_bits", "_passage", "_served")

    def __init__(self, passage: Passage, bits: float, arrived: Callable[[], None]) -> None:
        self._passage = passage
        self._bits = bits
        self._arrived = arrived
        self._served = 0
        """Bit set of the resources whose service is done."""
        self._all_in = 0
        """Last resource that the last bit has come to."""

    def enter(self, index: int) -> None:
        """The first bit comes to resource `index`."""
        passage = self._passage
        if not passage.is_open():
            return
        if index == passage.length():
            if index == 0:
                self._arrived()
            return
        passage.serve(
            index,
            self._bits,
            lambda: passage.behind(index, lambda: self.enter(index + 1)),
            lambda: self._through(index),
        )

    def _through(self, index: int) -> None:
        self._served |= 1 << index
        if self._all_in >= index:
            self._leave(index)

    def _leave(self, index: int) -> None:
        """The last bit leaves resource `index`."""
        self._passage.behind(index, lambda: self._come(index + 1))

    def _come(self, index: int) -> None:
        """The last bit comes to resource `index`."""
        if not self._passage.is_open():
            return
        self._all_in = index
        if index == self._passage.length():
            self._arrived()
        elif self._served >> index & 1:
            self._leave(index)
