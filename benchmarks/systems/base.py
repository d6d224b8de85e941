"""What every system gives: the processes to start, and a node that reduces arrays in place."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from harness.pattern import Arrays
from systems.ports import loopback_port

__all__ = ["Case", "Launch", "Node", "Process", "System", "environment", "worker_command"]

BENCHMARKS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured."""

    nodes: int
    bytes: int
    """Of float32, all arrays together."""
    keys: int = 1
    """How many arrays of about equal size the bytes are in."""
    model: str = ""
    """The arrays are this model's tensors instead (`netstorm.topology.files`)."""
    hosts: tuple[str, ...] = ()
    """Address of each rank on an emulated network; empty: all are on 127.0.0.1."""
    free_port: Callable[[int], int] = loopback_port
    """Returns a TCP port that is free beside a rank."""

    @property
    def sizes(self) -> list[int]:
        """Elements of each array."""
        if self.model:
            from netstorm.topology.files import tensors_of  # noqa: PLC0415 - older checkouts have it elsewhere

            return [size // 4 for size in tensors_of(self.model)]
        each, more = divmod(self.bytes // 4, self.keys)
        return [each + (index < more) for index in range(self.keys)]

    def host(self, rank: int) -> str:
        """Return where others reach what runs beside `rank`."""
        return self.hosts[rank] if self.hosts else "127.0.0.1"

    def port(self, rank: int = 0) -> int:
        """Return a TCP port that nothing listens on beside `rank`, as far as can be known from here."""
        return self.free_port(rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process to start."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    rank: int = 0
    """Beside which rank it runs, where each has a place of its own."""
    told_places: int = 0
    """It starts things beside so many ranks itself, and has no place: BENCHMARK_PLACES tells it how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All processes of one system."""

    workers: list[Process]
    helpers: list[Process] = field(default_factory=list)

    def running(self, command: list[str]) -> Launch:
        """Return the same job with another program in its workers."""
        return replace(self, workers=[replace(worker, command=command) for worker in self.workers])

    def placed(self, place: Callable[[int, Sequence[str]], list[str]]) -> Launch:
        """Return the same job with each process where its rank is; `place` makes a command run there."""

        def at_its_place(process: Process) -> Process:
            if process.told_places:
                places = json.dumps([place(rank, []) for rank in range(process.told_places)])
                return replace(process, environment={**process.environment, "BENCHMARK_PLACES": places})
            return replace(process, command=place(process.rank, process.command))

        return Launch(
            workers=list(map(at_its_place, self.workers)), helpers=list(map(at_its_place, self.helpers))
        )


class Node(Arrays, Protocol):
    """A worker's part in a system."""

    rank: int
    nodes: int

    def settle(self) -> None:
        """Wait until what was written is in memory."""

    def allreduce(self) -> None:
        """Replace every array by the sum over all ranks; returns when it can be read."""


class System(Protocol):
    """One of the systems compared."""

    @property
    def name(self) -> str:
        """What the command line and the results call it."""

    @property
    def framework(self) -> str:
        """Whose arrays it reduces, `mxnet` or `torch`: what a node without a store needs memory for."""

    @property
    def settings(self) -> Mapping[str, str]:
        """What it was run with, for the reader of the results."""

    def launch(self, case: Case) -> Launch:
        """Return the processes of one group."""

    def memory(self, case: Case) -> int:
        """Return about how many bytes a group needs at its peak: a guard, measured, rounded up."""

    def join(self, case: Case) -> Node:
        """Join the group that this worker process was started for."""


def environment(**variables: object) -> dict[str, str]:
    """Return this process's environment without any job's variables, plus `variables`. Congestion control is
    that of the network, as its option says. Processes keep bytecode, as an installed package has it: without
    it each start compiles NetStorm anew, which takes 0.3 s of a processor.
    """
    foreign = ("DMLC_", "PS_", "NETSTORM_")
    base = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    base["NETSTORM_CONGESTION"] = "system"
    base.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**base, **{name: str(value) for name, value in variables.items()}}


def worker_command(system: str, case: Case) -> list[str]:
    """Return the command of one worker process."""
    numbers = [str(case.nodes), str(case.bytes), str(case.keys)]
    return [sys.executable, str(BENCHMARKS / "workers" / "allreduce.py"), system, *numbers, case.model]
