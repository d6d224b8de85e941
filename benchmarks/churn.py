#!/usr/bin/env python3
"""Does a job of general nodes go on through everything, and is every sum right? Faults all the time.

    netstorm bench churn --nodes 8 --minutes 10
    netstorm bench churn --nodes 4 --minutes 1 --seed 7 --json churn.json
    netstorm bench churn --nodes 8 --minutes 2 --faults kill --every 5
    netstorm bench churn --minutes 0.7 --faults kill --every 5 --systems netstorm,torchft,restart-50
    netstorm bench churn --wan examples/networks/internet2.yaml --minutes 10

Every 0.5 to 2 s, or so (`--every`), something fails, as drawn in advance from the seed: a node is killed and
started again, a node is stopped (SIGSTOP) for up to 4 s, a connection is cut, the scheduler is killed and
started again. Every element of
every sum is checked on every rank against those whom the sum names, and the state that all sums make is
compared between ranks after every step. A rank that makes no step for a minute hangs.

A rank that dies may have completed a step alone, with a result that has reached nobody else; only its last
step may differ. The recovery time of a fault is the time until every rank that it has not hit has completed a
step that began after it. Goodput is the steps a second while things fail, over those without faults, before
and after; at most 1 minus the time in which some rank was stopped, since all wait for it. What is lost is
shared out over what was the matter at the time. On one machine, ranks that start again take processors from
those that train. Exit code 1: an error or a hang.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from harness.arguments import number, seconds, writable
from harness.churn_job import ChurnJob
from harness.churn_torch import TorchftJob, TorchrunJob
from harness.emulated import emulated, on_loopback
from harness.faults import KINDS, LostTime, PlannedFault, Span, longest_gaps, lost_time, plan_faults
from harness.machine import describe_machine
from harness.stopping import stop_on_sigterm
from netstorm.cli.support import scratch_folder
from netstorm.errors import NetStormError
from netstorm.topology.files import load_network

_HANG_S: Final = 60.0
_START_S: Final = 120.0
_HEALTHY: Final = 2
"""Ranks that a fault leaves: somebody has the state."""
_UNDISTURBED_S: Final = 10.0
"""Before the first fault, and once all have come back from the last one."""
_RESTART: Final = "restart-"
"""Of the name of a system, before the number of steps from one checkpoint to the next."""
_LONGEST: Final = 12
"""Times without a step that the report lists."""


@dataclass(slots=True)
class Fault:
    """One fault, and when all others had recovered."""

    kind: str
    rank: int
    """-1: the scheduler."""
    at: float
    step: int
    """The last step that any rank had completed."""
    recovered_s: float | None = None
    until: float | None = None
    """When a stopped process went on, or the scheduler that was started again was ready."""


class Churn:
    """Faults in a job, until the time is over."""

    def __init__(self, job: ChurnJob) -> None:
        self.job: Final = job
        self.faults: Final[list[Fault]] = []
        self.left_out = 0
        """Faults that nobody could be hit by before the next one: too few ranks took part."""
        self.hangs: Final[list[str]] = []
        self._later: Final[list[tuple[float, Callable[[], None]]]] = []

    def start(self) -> None:
        """Start the job, and wait until all ranks have completed a step."""
        self.job.start_scheduler()
        for rank in range(self.job.nodes):
            self.job.start(rank, time.monotonic())
        deadline = time.monotonic() + _START_S
        while not all(member.runs for member in self.job.members.values()):
            self.job.read(0.05)
            if time.monotonic() > deadline or self.job.errors:
                raise NetStormError(f"the job does not begin: {self.job.errors or self._texts()}")
        self.job.comings.clear()

    def run(self, faults: Sequence[PlannedFault], duration_s: float) -> None:
        """Make faults for so long."""
        begin = time.monotonic()
        coming = list(faults)
        while time.monotonic() < begin + duration_s and not self.hangs:
            self.job.read(0.02)
            now = time.monotonic()
            self._do_what_is_due(now)
            self._look_for_recoveries(now)
            self._look_for_hangs(now)
            while len(coming) > 1 and now >= begin + coming[1].at:
                del coming[0]
                self.left_out += 1
            if coming and now >= begin + coming[0].at and self._fail(coming[0], now):
                del coming[0]

    def undisturbed(self, duration_s: float) -> float:
        """Return the steps a second while nothing fails."""
        begin, first = time.monotonic(), self.job.steps
        while time.monotonic() < begin + duration_s:
            self.job.read(0.02)
        return (self.job.steps - first) / (time.monotonic() - begin)

    def come_back(self) -> None:
        """Let everybody come back."""
        deadline = time.monotonic() + _HANG_S
        target = math.inf  # far enough ahead: who is out of the job does not get there
        while not (self.hangs or all(one.runs and one.step >= target for one in self.job.members.values())):
            self.job.read(0.02)
            now = time.monotonic()
            if not self._later and target == math.inf:
                target = self.job.steps + 10
            self._do_what_is_due(now)
            self._look_for_recoveries(now)
            if now > deadline:
                self.hangs.append(f"not all ranks come back: {self._texts()}")

    def end(self) -> None:
        """Have all ranks end after the same step."""
        for rank in self.job.members:
            self.job.tell(rank, "end")
        deadline = time.monotonic() + _HANG_S
        while not all(one.ended for one in self.job.members.values()) and not self.hangs:
            self.job.read(0.02)
            if time.monotonic() > deadline:
                self.hangs.append(f"the ranks do not end: {self._texts()}")
        self.job.check_states()

    # ------------------------------------------------------------------------------------------------ faults

    def _fail(self, planned: PlannedFault, now: float) -> bool:
        healthy = [one.rank for one in self.job.members.values() if one.runs]
        kind = planned.kind
        if kind == "scheduler":
            last = next((one for one in reversed(self.faults) if one.kind == kind), None)
            if last is not None and (last.recovered_s is None or last.until is None):
                return False  # it is not back yet
            self.faults.append(Fault(kind, -1, now, self.job.steps))
            self.job.kill_scheduler()
            self._at(now + planned.lasts_s, self.job.start_scheduler)
            return True
        if len(healthy) <= (_HEALTHY if kind != "cut" else 0):
            return False
        rank = healthy[int(planned.who * len(healthy))]
        fault = Fault(kind, rank, now, self.job.steps)
        self.faults.append(fault)
        if kind == "kill":
            self.job.kill(rank, now + planned.lasts_s)
        elif kind == "cut":
            self.job.tell(rank, "cut")
        else:
            pid = self.job.members[rank].pid
            self.job.send(rank, signal.SIGSTOP)

            def go_on() -> None:
                fault.until = time.monotonic()
                if self.job.members[rank].pid == pid:
                    self.job.send(rank, signal.SIGCONT)

            self._at(now + planned.lasts_s, go_on)
        return True

    def _at(self, when: float, function: Callable[[], None]) -> None:
        self._later.append((when, function))

    def _do_what_is_due(self, now: float) -> None:
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            entry[1]()

    # ------------------------------------------------------------------------------------- what becomes of it

    def _look_for_recoveries(self, now: float) -> None:
        for fault in self.faults[-20:]:
            if fault.recovered_s is not None:
                continue
            others = [one for one in self.job.members.values() if one.runs and one.rank != fault.rank]
            if others and all(one.step >= fault.step + 2 for one in others):
                fault.recovered_s = max(0.0, now - fault.at)
        last = next((one for one in reversed(self.faults) if one.kind == "scheduler"), None)
        if last is not None and last.until is None and self.job.scheduler_ready():
            last.until = now

    def spans(self, end: float) -> list[Span]:
        """Return what was the matter when, until `end` at the latest."""
        spans = []
        for fault in self.faults:
            recovered = end if fault.recovered_s is None else fault.at + fault.recovered_s
            until = end if fault.until is None else fault.until
            if fault.kind in ("kill", "cut"):
                spans.append(Span(fault.kind, fault.at, recovered))
            else:
                spans.append(Span(fault.kind, fault.at, until))
                if recovered > until:
                    spans.append(Span(f"after a {fault.kind}", until, recovered))
        spans += [Span("coming back", *times) for times in self.job.comings]
        spans += [
            Span("coming back", one.started_at, end)
            for one in self.job.members.values()
            if not (one.contributes or one.ended)
        ]
        return spans

    def _look_for_hangs(self, now: float) -> None:
        for one in self.job.members.values():
            since = max(one.completed_at, one.started_at)
            if not (one.stopped or one.killed or one.ended) and now - since > _HANG_S:
                self.job.send(one.rank, signal.SIGUSR1)
                self._later.clear()
                time.sleep(1.0)
                self.hangs.append(
                    f"rank {one.rank} has made no step for {now - since:.0f} s: {self._texts()}"
                )
                return

    def _texts(self) -> str:
        return "\n".join(
            f"rank {one.rank}: step {one.step}, {'runs' if one.runs else 'does not run'}: "
            f"{self.job.log_of(one)[-300:]}"
            for one in self.job.members.values()
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, report, and return the exit code: 1 for errors and hangs, 2 if a job cannot begin."""
    options = _options(arguments)
    stop_on_sigterm()
    console = Console(stderr=True)
    reports: dict[str, dict[str, Any]] = {}
    try:
        for system in options.systems:
            missing = _why_not(system, options)
            if missing:
                console.print(f"{system}: {missing}", markup=False)
            else:
                reports[system] = _run(system, options, console)
    except KeyboardInterrupt:
        console.print("interrupted: the report is of the time so far")
    except (NetStormError, OSError) as error:
        console.print(f"churn: {error}", markup=False)
        return 2
    if options.json is not None:
        alone = (
            next(iter(reports.values())) if len(options.systems) == 1 and reports else {"systems": reports}
        )
        options.json.write_text(json.dumps(alone, indent=1))
    for system, report in reports.items():
        _print(system, report)
    if len(reports) > 1:
        _compare(reports)
    return int(any(report["errors"] or report["hangs"] for report in reports.values()))


def _why_not(system: str, options: argparse.Namespace) -> str:
    if system == "netstorm":
        return ""
    if options.wan is not None:
        return "on loopback only"
    needed = "torchft" if system == "torchft" else "torch"
    return "" if importlib.util.find_spec(needed) else f"{needed} not installed (pip install {needed})"


def _run(system: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        network = None if options.wan is None else load_network(options.wan)
        nodes = options.nodes if network is None else network.size
        place = stack.enter_context(on_loopback() if network is None else emulated(network, options))
        folder = stack.enter_context(scratch_folder())
        job = _job(system, nodes, folder, place, options)
        stack.callback(job.stop)
        churn = Churn(job)
        duration_s = 60 * options.minutes
        # Others draw the same, and leave out what they cannot have.
        planned = plan_faults(options.seed, options.faults, options.every, duration_s)
        churn.start()
        without = [churn.undisturbed(_UNDISTURBED_S)]
        began, first = time.monotonic(), job.steps
        try:
            churn.run([fault for fault in planned if fault.kind in job.kinds], duration_s)
        except KeyboardInterrupt:
            console.print("interrupted: the report is of the time so far")
        ended = time.monotonic()
        took, steps = ended - began, job.steps - first
        spans = churn.spans(ended)
        gaps = longest_gaps(job.completed_at(), began, ended, spans, _LONGEST)
        churn.come_back()
        without.append(churn.undisturbed(_UNDISTURBED_S))
        churn.end()
        if job.errors or churn.hangs:
            console.print(f"logs: {_keep_logs(folder, options.logs)}")
        usual_s = 1 / statistics.mean(without) if all(without) else math.inf
        lost = lost_time(job.completed_at(), began, ended, usual_s, spans)
        report = _report(churn, took, steps, without, options)
        return report | _lost(lost, took) | {"longest_gaps": gaps}


def _job(system: str, nodes: int, folder: Path, place: Any, options: argparse.Namespace) -> ChurnJob:
    host, port = place.hosts[0] if place.hosts else "127.0.0.1", place.free_port(0)
    if system == "torchft":
        variables = {
            "BENCHMARK_LIGHTHOUSE": f"http://{host}:{port}",
            "BENCHMARK_LEAST": str(nodes // 2 + 1),  # so that no two parts of the job go on
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        worker = "churn_torchft.py"
        return TorchftJob(
            nodes, folder, variables, place.command, worker=worker, heartbeat_s=options.heartbeat_timeout
        )
    if system.startswith(_RESTART):
        every = int(system.removeprefix(_RESTART))
        return TorchrunJob(nodes, folder, {}, place.command, checkpoint_every=every)
    variables = {
        "DMLC_PS_ROOT_URI": host,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(nodes),
        "NETSTORM_ELASTIC": f"1:{nodes}",
        "NETSTORM_SECURITY": "off",
        "PS_HEARTBEAT_INTERVAL": "0.5",
        "PS_HEARTBEAT_TIMEOUT": str(options.heartbeat_timeout),
        "NETSTORM_LINK_TIMEOUT": str(options.heartbeat_timeout),
    }
    if options.wait_timeout is not None:
        variables["NETSTORM_WAIT_TIMEOUT"] = str(options.wait_timeout)
    if len(options.systems) > 1:  # so that a process takes as long to start as in the other rows
        variables |= {"BENCHMARK_IMPORTS": "torch", "OMP_NUM_THREADS": "1"}
    return ChurnJob(nodes, folder, variables, place.command, place.hosts)


def _keep_logs(folder: Path, kept: Path | None) -> str:
    if kept is None:
        return "given up; --logs DIR keeps them"
    kept.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.log"):
        (kept / path.name).write_bytes(path.read_bytes())
    return str(kept)


def _report(
    churn: Churn, took: float, steps: int, without: Sequence[float], options: argparse.Namespace
) -> dict[str, Any]:
    kinds = {}
    for kind in (kind for kind in options.faults if kind in churn.job.kinds):
        times = [fault.recovered_s for fault in churn.faults if fault.kind == kind]
        known = [one for one in times if one is not None]
        kinds[kind] = {
            "faults": len(times),
            "median_s": round(statistics.median(known), 3) if known else None,
            "worst_s": round(max(known), 3) if known else None,
            "not_recovered": len(times) - len(known),
        }
    returns = [end - begin for begin, end in churn.job.comings]
    return {
        "nodes": churn.job.nodes,
        "seconds": round(took, 1),
        "seed": options.seed,
        "every_s": options.every,
        "steps": steps,
        "steps_a_second_undisturbed": [round(one, 2) for one in without],
        "goodput": round(steps / took / statistics.mean(without), 3) if all(without) else None,
        "steps_per_minute": round(60 * steps / took, 1),
        "recovery": kinds,
        "returns": {
            "count": len(returns),
            "median_s": round(statistics.median(returns), 3) if returns else None,
            "worst_s": round(max(returns), 3) if returns else None,
        },
        "left_out": churn.left_out,
        "removed_after_a_stop": churn.job.removed,
        "errors": churn.job.errors,
        "hangs": churn.hangs,
        "machine": describe_machine(),
    }


def _lost(lost: LostTime, took: float) -> dict[str, Any]:
    return {
        "stopped_s": round(lost.held_s, 2),
        "goodput_at_most": round(1 - lost.held_s / took, 3),
        "lost_s": round(lost.lost_s, 2),
        "lost_to_s": {what: round(seconds, 2) for what, seconds in lost.by.items()},
    }


def _compare(reports: dict[str, dict[str, Any]]) -> None:
    table = Table("system", "steps", "a second, undisturbed", "goodput", "kills", "recovery: median", "worst")
    for system, report in reports.items():
        kills = report["recovery"].get("kill", {"faults": 0, "median_s": None, "worst_s": None})
        table.add_row(
            system,
            str(report["steps"]),
            " and ".join(f"{one:.1f}" for one in report["steps_a_second_undisturbed"]),
            str(report["goodput"]),
            str(kills["faults"]),
            _s(kills["median_s"]),
            _s(kills["worst_s"]),
        )
    Console().print(table)


def _print(system: str, report: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{system}: {report['nodes']} nodes, {report['seconds']:.0f} s, seed {report['seed']}: "
        f"{report['steps']} steps, {report['steps_per_minute']:.0f} a minute, goodput {report['goodput']} "
        f"(at most {report['goodput_at_most']}: a rank was stopped for {report['stopped_s']:.0f} s); "
        f"{len(report['errors'])} errors, {len(report['hangs'])} hangs"
    )
    table = Table("fault", "times", "recovery: median", "worst")
    for kind, row in report["recovery"].items():
        table.add_row(kind, str(row["faults"]), _s(row["median_s"]), _s(row["worst_s"]))
    table.add_row(
        "(back again)",
        str(report["returns"]["count"]),
        *(_s(report["returns"][one]) for one in ("median_s", "worst_s")),
    )
    console.print(table)
    table = Table("lost to", "seconds")
    for what, lost_s in report["lost_to_s"].items():
        table.add_row(what, f"{lost_s:.1f}")
    console.print(table)
    for text in [*report["errors"][:10], *report["hangs"]]:
        console.print(text, markup=False)


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _systems(text: str) -> list[str]:
    found = text.split(",")
    for one in found:
        steps = one.removeprefix(_RESTART)
        if one not in ("netstorm", "torchft") and (steps == one or not steps.isdigit() or int(steps) < 1):
            raise argparse.ArgumentTypeError(f"{one!r}: expected netstorm, torchft or restart-STEPS")
    return found


def _kinds(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {', '.join(KINDS)}")
    return found


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="churn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--nodes", type=number, default=8, metavar="N", help="default 8")
    add("--minutes", type=float, default=10.0, metavar="M", help="default 10")
    add("--seed", type=int, default=1, metavar="N", help="of the faults; default 1")
    add(
        "--faults",
        type=_kinds,
        default=list(KINDS),
        metavar="KIND,...",
        help="default: all of " + ", ".join(KINDS),
    )
    add(
        "--systems",
        type=_systems,
        default=["netstorm"],
        metavar="NAME,...",
        help="what sums: netstorm, torchft (its Manager and Gloo), restart-N (torchrun and Gloo; all begin "
        "again from a checkpoint of every N steps). The others have kills and stops only; all rows import "
        "PyTorch. Default netstorm",
    )
    add("--every", type=seconds, default=1.25, metavar="S", help="mean time between faults; default 1.25")
    add("--wan", type=Path, metavar="FILE", help="a network to emulate, with a node for each of its ranks")
    add("--heartbeat-timeout", type=seconds, default=3.0, metavar="S", help="default 3")
    add("--wait-timeout", type=seconds, metavar="S", help="go on without a rank that is stopped for so long")
    add("--json", type=writable, metavar="FILE", help="write the report here, too")
    add("--logs", type=Path, metavar="DIR", help="keep the processes' logs here if something is wrong")
    add("--congestion", default="bbr", metavar="NAME", help="TCP's congestion control of --wan; default bbr")
    add("--backend", default="auto", metavar="NAME", help="of the emulation; default auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
