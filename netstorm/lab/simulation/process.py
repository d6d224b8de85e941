"""One process of a simulated cluster: a real machine and sessions, an in-memory van and a local clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from netstorm.pslite.endpoint import Stack
from netstorm.pslite.machine import Machine
from netstorm.pslite.memory_network import MemoryVan, Timeline, Timer
from netstorm.simulation.clock_sync import SyncedClock
from netstorm.simulation.local_clock import LocalClock

__all__ = ["SimulatedProcess"]

M = TypeVar("M", bound=Machine)

_TICKS_AT_ONCE: Final = 1000
"""A machine that asks for more ticks than this without letting time pass is in an endless loop."""


class SimulatedProcess(Generic[M]):
    """Runs a stack whenever an event arrives or a tick is due, as the I/O thread of a real process does."""

    def __init__(self, timeline: Timeline, van: MemoryVan, clock: LocalClock, stack: Stack[M]) -> None:
        self.machine: Final[M] = stack.machine
        self.van: Final = van
        self.alive = True
        self._timeline: Final = timeline
        self._clock: Final = clock
        self.stack: Final = stack
        self.synced_clock: SyncedClock | None = None
        """Its estimate of the cluster clock, by SNTP; None: `clock` says what the error is."""
        self.suspended = False
        self._timer: Timer | None = None
        self._calls: Final[list[Callable[[float], None]]] = []
        """What the program calls once this process runs again."""
        self._awake = False
        self._ticks_at_once = 0
        self._ticked_at = -1.0
        self._shown = clock.local(timeline.now)
        self._stopped_at = 0.0
        van.notify = self.wake
        self.wake()

    def now(self) -> float:
        """Return the time that this process sees: its local clock, which never goes backwards, and stands
        still while it does not run.
        """
        local = self._clock.local(self._timeline.now)
        self._shown = max(self._shown, self.stack.running_time(local, local))
        return self._shown

    def call(self, function: Callable[[float], None]) -> None:
        """Call `function` with the present time, as this process's program would call into its machine."""
        if self.suspended:
            self._calls.append(function)
        elif self.alive:
            self.stack.call(function, self.now())
            self._flush()

    def wake(self) -> None:
        """Handle the van's events, after everything else that happens at this virtual time."""
        if self.alive and not self._awake and not self.suspended:
            self._awake = True
            self._timeline.after(0.0, self._run)

    def die(self, *, silent: bool = False) -> None:
        """End as a killed process does; if `silent`, as one whose host loses power."""
        self.alive = False
        self.van.die(silent=silent)
        if self._timer is not None:
            self._timer.cancel()

    def suspend(self) -> None:
        """Stop running, as a process does that gets SIGSTOP. What comes for it waits."""
        self.suspended = True
        self._stopped_at = self._clock.local(self._timeline.now)

    def go_on(self) -> None:
        """Run again, as after SIGCONT: first what has come meanwhile is handled, then what is overdue."""
        self.suspended = False
        self.stack.running_time(self._clock.local(self._timeline.now), self._stopped_at)
        self.wake()
        calls, self._calls[:] = list(self._calls), []
        for function in calls:
            self._timeline.after(0.0, lambda function=function: self.call(function))  # type: ignore[misc]

    def _run(self) -> None:
        self._awake = False
        if not self.alive or self.suspended:
            return
        now = self.now()
        while events := self.van.poll(0.0):
            for event in events:
                self.stack.handle(event, now)
        self._flush()

    def _tick(self, due: float) -> None:
        if not self.alive or self.suspended:
            return
        self._timer = None
        self._ticks_at_once = self._ticks_at_once + 1 if self._timeline.now == self._ticked_at else 0
        self._ticked_at = self._timeline.now
        if self._ticks_at_once > _TICKS_AT_ONCE:
            raise AssertionError(f"{self.van.host} asks for the tick at {due} in an endless loop")
        self._shown = max(due, self._shown)  # rounding must not make the tick early
        self.stack.tick(self.now())
        self._flush()

    def _arm(self) -> None:
        """Set the timer to the stack's next tick."""
        if self._timer is not None:
            self._timer.cancel()
        due = self.stack.next_tick()
        local = self.stack.local_time(due)
        self._timer = self._timeline.at(self._clock.virtual(local), lambda: self._tick(due))

    def _flush(self) -> None:
        """Carry out the machine's instructions."""
        self.stack.flush(self.van, self.now())
        self._arm()
