"""A machine on its endpoint: what drivers drive, on real sockets and in the simulated cluster. Pure.

A driver's turn is: `handle` each event, `call` what the program wants, `tick`, then `flush` into the van.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from netstorm.pslite.endpoint.endpoint import Endpoint
from netstorm.pslite.machine import (
    Become,
    Call,
    Connect,
    Disconnect,
    Inquire,
    Instruction,
    Machine,
    Send,
    TakeBack,
)
from netstorm.pslite.session.link_state import Dispatcher
from netstorm.pslite.van.interface import Transmitter, VanEvent

__all__ = ["Stack"]

_log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Machine)

_LATE_S: Final = 0.5
"""A process that runs so much later than it wanted to did not run meanwhile. Waiting for a processor takes
less, also on a busy machine."""

_CATCH_UP_S: Final = 0.25
"""For how long such a process only reads what has come meanwhile, before it checks any time-out."""

_WORTH_A_LINE_S: Final = 2.0
"""How long a process must not have run for a line in its log."""


class Stack(Generic[M]):
    """Carries out the instructions of a machine."""

    def __init__(self, machine: M, endpoint: Endpoint) -> None:
        self.machine: Final = machine
        self.endpoint: Final = endpoint
        any_machine: object = machine
        self._dispatcher: Final = any_machine if isinstance(any_machine, Dispatcher) else None
        self._missed_s = 0.0
        self._judges_from = -math.inf
        """Until then nothing is due: what has come while this process did not run is to be read first."""

    def running_time(self, now: float, wanted: float) -> float:
        """Return the time for all other methods: it stands still while this process does not run.

        Otherwise a process that was stopped, or whose interpreter lock was held by other code, would find all
        others silent when it goes on, although it has just not read what they sent.

        Args:
            now: by the local clock.
            wanted: when the process wanted to run at the latest, by the same clock.
        """
        missed = now - wanted
        if missed > _LATE_S:
            self._missed_s += missed
            self._judges_from = now - self._missed_s + _CATCH_UP_S
            self.endpoint.resumed(now - self._missed_s, missed)
            if missed > _WORTH_A_LINE_S:
                _log.warning(
                    "this process did not run for %.1f s: it was stopped, or other code kept the interpreter "
                    "lock; time-outs do not count that time",
                    missed,
                )
        return now - self._missed_s

    def local_time(self, running: float) -> float:
        """Return the time by the local clock, of a time to come."""
        return running + self._missed_s

    def handle(self, event: VanEvent, now: float) -> None:
        """Process an event of the van. Nothing that a peer sends raises an exception; an error of the machine
        does.
        """
        self.endpoint.handle(event, now)
        for instruction in self.machine.take_instructions():
            self._carry_out_one(
                instruction, now
            )  # the next event may be a Hello that names a rank just given

    def call(self, function: Callable[[float], T], now: float) -> T:
        """Call something that uses the machine, with the time."""
        return function(now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if now < self._judges_from:
            return
        self.endpoint.tick(now)
        if now >= self.machine.next_tick():
            self.machine.tick(now)

    def next_tick(self) -> float:
        """Return when `tick` has something to do; `math.inf`: never."""
        return max(min(self.machine.next_tick(), self.endpoint.next_tick()), self._judges_from)

    def flush(self, van: Transmitter, now: float) -> None:
        """Carry out all instructions of the machine, acknowledge, and hand messages over to the van."""
        self._carry_out(now)
        self.endpoint.flush(van, now)
        while self.endpoint.tell_disconnections(now):
            self._carry_out(now)
            self.endpoint.flush(van, now)

    def abort(self, error: Exception, now: float) -> None:
        """Fail everything that is outstanding, and call its callbacks; nothing is sent any more."""
        self.machine.abort(error, now)
        for instruction in self.machine.take_instructions():
            if isinstance(instruction, Call):
                instruction.function()

    def _carry_out(self, now: float) -> None:
        while instructions := self._instructions(now):
            for instruction in instructions:
                self._carry_out_one(instruction, now)

    def _instructions(self, now: float) -> list[Instruction]:
        instructions = self.machine.take_instructions()
        if instructions or self._dispatcher is None:
            return instructions
        if self._dispatcher.dispatch(self.endpoint.link_state, now):  # links have everything decided so far
            return self.machine.take_instructions()
        return []

    def _carry_out_one(self, instruction: Instruction, now: float) -> None:
        endpoint = self.endpoint
        if isinstance(instruction, Send):
            endpoint.send(instruction, now)
        elif isinstance(instruction, Call):
            instruction.function()
        elif isinstance(instruction, Connect):
            endpoint.connect(instruction, now)
        elif isinstance(instruction, Disconnect):
            endpoint.disconnect(instruction, now)
        elif isinstance(instruction, TakeBack):
            endpoint.take_back(instruction)
        elif isinstance(instruction, Inquire):
            endpoint.inquire(instruction, now)
        elif isinstance(instruction, Become):
            endpoint.process.rank = instruction.rank
