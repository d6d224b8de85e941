"""The processes of one system: workers that do a round on command, and helpers (servers, scheduler)."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.child import Child, ChildError
from systems.base import Launch, Process

__all__ = ["Group", "Round", "busy_share"]

_HELPER_GRACE_S = 5.0
_WORKER_GRACE_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One all-reduce of all workers."""

    seconds: float
    """From the first worker's start to the last one's end, on the clock that a machine's processes share."""
    start: float
    """The first worker's start on that clock."""
    cpu_s: float
    """Processor time of all processes of the group, helpers included."""
    machine_cpu_share: float
    """Of all cores, whatever used them: emulated links and strangers too. From 0 to 1."""


class Group:
    """Use as a context manager: no process outlives the block."""

    def __init__(
        self, launch: Launch, *, start_timeout_s: float, round_timeout_s: float, logs: Path | None = None
    ) -> None:
        """Start all processes; their error output goes into the folder `logs`, if there is one."""
        self._round_timeout_s = round_timeout_s
        self._helpers: list[Child] = []
        self._workers: list[Child] = []
        self._broken = False
        try:
            for process in launch.helpers:
                self._helpers.append(_child(process, logs))
            for process in launch.workers:
                self._workers.append(_child(process, logs))
            joined = self._answers("to join", start_timeout_s)
            for child, answer in zip(self._workers, joined, strict=True):
                if "pids" in answer:
                    child.observe(answer["pids"])
        except BaseException:
            self._broken = True
            self.stop()
            raise

    def round(self, number: int) -> Round:
        """Run one round, and check its sum on every worker.

        Raises:
            ChildError: a worker or helper ended, was wrong or too slow; the group can then only be stopped.
        """
        self._ask({"do": "prepare", "round": number})
        before, machine = self.cpu_s(), psutil.cpu_times()
        times = self._ask({"do": "allreduce", "round": number})
        used, share = self.cpu_s() - before, busy_share(machine, psutil.cpu_times())
        self._ask({"do": "check", "round": number})
        first = min(answer["start"] for answer in times)
        seconds = max(answer["finish"] for answer in times) - first
        return Round(seconds=seconds, start=first, cpu_s=used, machine_cpu_share=share)

    def ask(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send `command` to every worker and return the answers, in the order of the workers."""
        return self._ask(command)

    def idle_cpu_share(self, seconds: float) -> float:
        """Return the share of one core that the group uses while nothing is asked of it."""
        before = self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - before) / seconds

    def peak_rss(self) -> tuple[int, int]:
        """Return the largest memory of a worker and of a helper so far, in bytes."""
        return (
            max(child.peak_rss() for child in self._workers),
            max((child.peak_rss() for child in self._helpers), default=0),
        )

    def stop(self) -> None:
        """End all processes; twice does no harm."""
        workers, self._workers = self._workers, []
        helpers, self._helpers = self._helpers, []
        # Workers first and together: MXNet's wait for each other at the end, and their servers end with them.
        for child in workers:
            child.close_input()
        for child in workers:
            child.stop(0.0 if self._broken else _WORKER_GRACE_S)
        if self._broken:
            for child in helpers:
                child.close_input()
        deadline = time.monotonic() + _HELPER_GRACE_S
        while not self._broken and any(child.alive() for child in helpers) and time.monotonic() < deadline:
            time.sleep(0.01)
        for child in helpers:
            child.stop(1.0)

    def __enter__(self) -> Group:  # noqa: PYI034 - Self is from Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        self._broken = self._broken or kind is not None
        self.stop()

    def _ask(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            for child in self._workers:
                child.send(command)
            return self._answers(f"to {command['do']}", self._round_timeout_s)
        except ChildError:
            self._broken = True
            raise

    def _answers(self, what: str, timeout_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        answers: dict[Child, dict[str, Any]] = {}
        waiting = list(self._workers)
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChildError(waiting[0].describe(f"took longer than {timeout_s:g} s {what}"))
            select.select(waiting, [], [], min(left, 0.5))
            for child in list(waiting):
                answer = child.try_answer()
                if answer is not None:
                    answers[child] = answer
                    waiting.remove(child)
            for helper in self._helpers:
                if not helper.alive():
                    raise ChildError(helper.describe("ended while its workers needed it"))
        return [answers[child] for child in self._workers]

    def cpu_s(self) -> float:
        """Return the processor time of all processes so far, helpers included."""
        return sum(child.cpu_s() for child in (*self._workers, *self._helpers))


def _child(process: Process, logs: Path | None) -> Child:
    log = None if logs is None else logs / f"{process.name}.log"
    return Child(process.name, process.command, process.environment, log)


def busy_share(before: Any, after: Any) -> float:
    """Return the part of the cores' time that was not idle between two readings of `psutil.cpu_times`."""
    names = [name for name in before._fields if not name.startswith("guest")]  # those are part of user
    spent = {name: getattr(after, name) - getattr(before, name) for name in names}
    total = sum(spent.values())
    return 0.0 if total <= 0 else 1 - (spent["idle"] + spent.get("iowait", 0.0)) / total
