"""Runs the systems of one case side by side: all stay alive, rounds alternate, one is active at a time."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from harness.child import ChildError
from harness.group import Group
from harness.packing import pack, split_rounds
from harness.results import Row
from systems.alone import alone_launch
from systems.base import Case, Launch, System

__all__ = ["Comparison"]

_IDLE_S = 1.0


class Comparison:
    """The systems to compare and how often."""

    def __init__(
        self,
        systems: list[System],
        *,
        rounds: int | None,
        warmup: int,
        start_timeout_s: float,
        round_timeout_s: float,
        on_round: Callable[[str], None],
        place: Callable[[int, Sequence[str]], list[str]] | None = None,
        meter: Callable[[], Mapping[str, int]] | None = None,
        seconds: float | None = None,
        on_start: Callable[[], None] | None = None,
        on_step: Callable[[str], None] | None = None,
        logs: Path | None = None,
    ) -> None:
        """Begin.

        Args:
            rounds: of each system; None: as many as there is time for, which `seconds` then must say.
            on_round: told the system's name after each of its rounds that count.
            place: makes a command run beside a rank; None: they all run here.
            meter: returns bytes carried so far, by link.
            seconds: no round begins later than that after the first that counts, but every system has one.
            on_start: called before the first round that counts.
            on_step: told what comes next, in words.
            logs: folder for the error output of each process.
        """
        self._systems = systems
        self._rounds = rounds
        self._warmup = warmup
        self._start_timeout_s = start_timeout_s
        self._round_timeout_s = round_timeout_s
        self._on_round = on_round
        self._place = place
        self._meter = meter
        self._seconds = math.inf if seconds is None else seconds
        self._on_start = on_start
        self._logs = logs
        self._on_step = on_step or (lambda _: None)
        # The order of the systems changes from round to round: none always runs after the same other one.
        self._random = random.Random(1)

    def run(self, case: Case, rows: dict[str, Row], memory_limit: int) -> None:
        """Fill `rows`, one for each system; what fails is written there, and the others go on."""
        sets, too_large = pack({system.name: system.memory(case) for system in self._systems}, memory_limit)
        by_name = {system.name: system for system in self._systems}
        for name in too_large:
            need = by_name[name].memory(case)
            rows[name].error = f"needs about {need / 1e9:.1f} GB; {memory_limit / 1e9:.1f} GB may be used"
        most = sys.maxsize if self._rounds is None else self._rounds
        passes = 1 if len(sets) <= 1 else min(3, most)
        seconds = self._seconds / passes / max(1, len(sets))
        for number, rounds in enumerate(split_rounds(most, passes)):
            for together in sets[number % len(sets) :] + sets[: number % len(sets)]:
                able = [name for name in together if rows[name].error is None]
                for name in able:
                    rows[name].interleaved = "by round" if passes == 1 else f"in {passes} blocks"
                self._run_together(case, [by_name[name] for name in able], rows, rounds, seconds)

    def baseline(self, framework: str, case: Case) -> int:
        """Return the peak memory of a worker with the arrays of `case` and no store, in bytes."""
        with self._group(alone_launch(framework, case)) as group:
            for number in range(3):
                group.round(number)
            return group.peak_rss()[0]

    def _run_together(
        self, case: Case, systems: list[System], rows: dict[str, Row], rounds: int, seconds: float
    ) -> None:
        with ExitStack() as alive:
            groups: dict[str, Group] = {}
            for system in systems:
                self._on_step(f"starting {system.name}")
                try:
                    groups[system.name] = alive.enter_context(self._group(system.launch(case)))
                except ChildError as error:
                    rows[system.name].error = str(error)
            began = 0.0
            for number in range(self._warmup + rounds):
                if number == self._warmup:
                    began = time.monotonic()
                    if self._on_start is not None:
                        self._on_start()
                elif not groups or (number > self._warmup and time.monotonic() - began >= seconds):
                    break
                order = list(groups)
                self._random.shuffle(order)
                for name in order:
                    before = self._meter() if self._meter else {}
                    self._on_step(
                        f"{name}: round {number - self._warmup + 1}"
                        if number >= self._warmup
                        else f"{name} warms up"
                    )
                    try:
                        measured = groups[name].round(number)
                    except ChildError as error:
                        rows[name].error = str(error)
                        groups.pop(name).stop()
                        continue
                    if number >= self._warmup:
                        rows[name].rounds_s.append(measured.seconds)
                        rows[name].starts_s.append(measured.start - began)
                        rows[name].cpu_s.append(measured.cpu_s)
                        rows[name].machine_cpu_shares.append(measured.machine_cpu_share)
                        after = self._meter() if self._meter else {}
                        rows[name].link_bytes.append({link: after[link] - before[link] for link in after})
                        self._on_round(name)
            for name, group in groups.items():
                rows[name].idle_cpu_share = group.idle_cpu_share(_IDLE_S)
                worker, helper = group.peak_rss()
                rows[name].peak_rss = max(rows[name].peak_rss or 0, worker)
                rows[name].helper_peak_rss = max(rows[name].helper_peak_rss or 0, helper)

    def _group(self, launch: Launch) -> Group:
        if self._place is not None:
            launch = launch.placed(self._place)
        return Group(
            launch,
            start_timeout_s=self._start_timeout_s,
            round_timeout_s=self._round_timeout_s,
            logs=self._logs,
        )
