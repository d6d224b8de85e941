"""Faults of a simulated cluster: crashes, cuts, delays and corruption. A new kind of fault belongs here.

`netstorm.testing.faults` has the same faults as values, for plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from netstorm.kvstore.node import GeneralNode
from netstorm.pslite.memory_network import MemoryNetwork
from netstorm.scheduler.machine import SchedulerMachine
from netstorm.simulation.process import SimulatedProcess
from netstorm.simulation.process_factory import host_of

__all__ = ["AnyProcess", "ClusterFaults"]

AnyProcess: TypeAlias = SimulatedProcess[SchedulerMachine] | SimulatedProcess[GeneralNode]


class ClusterFaults:
    """Makes things fail, at once. Ends are ranks, or `SCHEDULER`."""

    def __init__(self, network: MemoryNetwork, process_of: Callable[[int], AnyProcess]) -> None:
        """Begin without a fault.

        Args:
            network: between the processes.
            process_of: returns the process of a rank, or of the scheduler.
        """
        self._network: Final = network
        self._process_of: Final = process_of

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` at a virtual time, or now if that time has passed."""
        self._network.timeline.at(time, action)

    def crash(self, rank: int, *, silent: bool = False) -> None:
        """Kill a process; if `silent`, its host loses power, so that no connection is reset."""
        self._process_of(rank).die(silent=silent)

    def suspend(self, rank: int, seconds: float) -> None:
        """Stop a process for a while, as SIGSTOP and SIGCONT do, or C code that keeps the interpreter lock.
        Its host's kernel keeps its connections, and acknowledges what comes.
        """
        process = self._process_of(rank)
        process.suspend()
        self._network.timeline.after(seconds, process.go_on)

    def reset(self, source: int, target: int) -> None:
        """Break all connections between two processes, with what is in flight. They may connect again."""
        self._network.reset(host_of(source), host_of(target))

    def cut(self, source: int, target: int, *, one_way: bool = False) -> None:
        """Drop everything between two processes from now on."""
        self._network.cut(host_of(source), host_of(target), one_way=one_way)

    def heal(self, source: int, target: int) -> None:
        """End a cut."""
        self._network.heal(host_of(source), host_of(target))

    def delay(self, source: int, target: int, seconds: float) -> None:
        """Add a delay to everything from one process to another."""
        self._network.extra_delay_s[host_of(source), host_of(target)] = seconds

    def set_corruption(self, probability: float) -> None:
        """Change a bit of each payload with this probability."""
        self._network.corrupt_probability = probability

    def set_breaks(self, probability: float) -> None:
        """Break a connection instead of delivering a message, with this probability."""
        self._network.break_probability = probability
