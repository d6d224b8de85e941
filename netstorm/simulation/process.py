"""One process of a simulated cluster: the real machine and sessions, an in-memory van, a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from netstorm.pslite.clock.virtual_time import Timeline, Timer
from netstorm.pslite.endpoint.stack import Stack
from netstorm.pslite.machine import Machine
from netstorm.pslite.van.memory_van import MemoryVan

if TYPE_CHECKING:
    from netstorm.simulation.timekeeping import Timekeeper

__all__ = ["LocalClock", "SimulatedProcess"]

M = TypeVar("M", bound=Machine)

_TICKS_AT_ONCE: Final = 1000
"""A machine that wants to be called so often without letting time pass has gone mad."""


@dataclass(frozen=True, slots=True)
class LocalClock:
    """A host's monotonic clock: an origin of its own, and a quartz that is not quite right."""

    offset_s: float = 0.0
    drift: float = 0.0
    """Seconds gained in a second; a quartz is good to some 5e-5."""
    sync_error_s: float = 0.0
    """What synchronisation has left of the error of the cluster clock, which stamps messages."""
    sync_drift: float = 0.0
    """By how much that error grows in a second."""

    def local(self, time: float) -> float:
        """Return what this clock shows at a virtual time."""
        return time * (1.0 + self.drift) + self.offset_s

    def cluster(self, time: float) -> float:
        """Return what this host takes for the cluster clock's time at a virtual time."""
        return time * (1.0 + self.sync_drift) + self.sync_error_s

    def virtual(self, local: float) -> float:
        """Return the virtual time at which this clock shows `local`."""
        return (local - self.offset_s) / (1.0 + self.drift)


class SimulatedProcess(Generic[M]):
    """Runs a stack whenever something comes in or is due. What the I/O thread is to a real process."""

    def __init__(self, timeline: Timeline, van: MemoryVan, clock: LocalClock, stack: Stack[M]) -> None:
        self.machine: Final[M] = stack.machine
        self.van: Final = van
        self.alive = True
        self._timeline: Final = timeline
        self._clock: Final = clock
        self.stack: Final = stack
        self.timekeeper: Timekeeper | None = None
        """What keeps its clock with the cluster's; None: nothing does."""
        self._timer: Timer | None = None
        self._awake = False
        self._ticks_at_once = 0
        self._ticked_at = -1.0
        self._shown = clock.local(timeline.now)
        van.notify = self.wake
        self.wake()

    def now(self) -> float:
        """Return what this process takes for the time."""
        self._shown = max(self._shown, self._clock.local(self._timeline.now))
        return self._shown

    def call(self, function: Callable[[float], None]) -> None:
        """Let the program of this process do something to its machine, now (its time is passed)."""
        if self.alive:
            self.stack.call(function, self.now())
            self._flush()

    def wake(self) -> None:
        """Look at what has come in, after everything else that happens at this moment."""
        if self.alive and not self._awake:
            self._awake = True
            self._timeline.after(0.0, self._run)

    def die(self, *, silent: bool = False) -> None:
        """End as a killed process does; `silent`: as one whose host loses power."""
        self.alive = False
        self.van.die(silent=silent)
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        self._awake = False
        if not self.alive:
            return
        now = self.now()
        while events := self.van.poll(0.0):
            for event in events:
                self.stack.handle(event, now)
        self._flush()

    def _tick(self, due: float) -> None:
        if not self.alive:
            return
        self._timer = None
        self._ticks_at_once = self._ticks_at_once + 1 if self._timeline.now == self._ticked_at else 0
        self._ticked_at = self._timeline.now
        if self._ticks_at_once > _TICKS_AT_ONCE:
            raise AssertionError(f"{self.van.host} wants to be called at {due} for ever: it is {self.now()}")
        self._shown = max(due, self._shown)  # converting back must not make it early by a rounding
        self.stack.tick(self.now())
        self._flush()

    def _arm(self) -> None:
        """Set the timer to when the stack wants to be called."""
        if self._timer is not None:
            self._timer.cancel()
        due = self.stack.next_tick()
        self._timer = self._timeline.at(self._clock.virtual(due), lambda: self._tick(due))

    def _flush(self) -> None:
        """Do what the machine wants done."""
        self.stack.flush(self.van, self.now())
        self._arm()
