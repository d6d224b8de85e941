#!/usr/bin/env python3
"""How far a reader has to go to follow an operation: calls, files, and calls into another file.

    python benchmarks/studies/call_path.py                          # seconds; prints JSON
    python benchmarks/studies/call_path.py --path --frontend torch  # also runs a real job of two processes

On the simulated cluster, which is the same in each run. Three operations of chunks of 1,000 elements, each
after five rounds:

submit: what one node, a leaf of two, does from an all-reduce's submission until its instructions are taken.
allreduce: an all-reduce of one chunk at two nodes and the scheduler, until both have the sum.
crash: one of four nodes of an elastic job is killed; its survivors push, until all have the sum without it.

Counted are calls of functions of netstorm, with those of lambdas and those that go on with a generator.
Comprehensions, the methods that dataclasses generate, and C code are not. Nor is what only the simulation
needs: its own folders, and all files that only these import, such as the van in memory. A call `changes` the
file if its caller is in another one, or is the simulation; the caller is the nearest function up the stack
that is counted, too.

With --path, `path` has the lines of every file that an all-reduce of one chunk touches on its way from a
script over the wire into the sum and back: those of `allreduce`, and those of the calls in all threads of the
ranks of a real job of a frontend, from one all-reduce's call until its script has the result. What falls due
meanwhile, such as a question to a clock, is among them; messages, whose code is msgspec's, are not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.house import ROOT, import_graph, modules

SIMULATION: Final = ("simulation", "testing", "lab")
"""Folders of netstorm that are not part of a job."""

WARM: Final = 5
"""Rounds before the one that counts: keys are known, and sessions open."""

ELEMENTS: Final = 1000


class Trace:
    """The calls of functions of some files, in order: the caller's file, and that of the function."""

    def __init__(self, files: Collection[str]) -> None:
        self.calls: Final[list[tuple[str | None, str]]] = []
        self._files: Final = frozenset(files)

    def record(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note a call; a function for `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or code.co_filename not in self._files:
            return
        if code.co_name.startswith("<") and code.co_name != "<lambda>":  # Python 3.12 has no frames for most
            return
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename not in self._files:
            caller = caller.f_back
        self.calls.append((None if caller is None else caller.f_code.co_filename, code.co_filename))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of this thread."""
        sys.setprofile(self.record)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def files(self) -> set[str]:
        """The files of the functions."""
        return {file for _, file in self.calls}

    def counts(self) -> dict[str, int]:
        """Return how many calls, files, and calls that change the file there are."""
        changes = sum(caller != file for caller, file in self.calls)
        return {"calls": len(self.calls), "files": len(self.files), "changes": changes}


def job_files() -> set[str]:
    """Return the files of netstorm without those that only its simulation needs."""
    graph, paths = import_graph(), modules()
    simulation = {name for name in paths if name.split(".")[1:2] and name.split(".")[1] in SIMULATION}
    while more := {
        name
        for name in graph.nodes - simulation
        if graph.in_degree(name) and simulation.issuperset(graph.predecessors(name))
    }:
        simulation |= more
    return {str(path) for name, path in paths.items() if name not in simulation}


def submit(trace: Trace) -> None:
    """Record what a leaf does with an all-reduce before its instructions are taken."""
    leaf = _warm_cluster(2).nodes[1]

    def call(function: Callable[[float], None]) -> None:
        now = leaf.process.now()
        with trace.recording():
            function(now)
            leaf.process.machine.take_instructions()

    leaf.process.call = call
    leaf.push("w", _ones())


def allreduce(trace: Trace) -> None:
    """Record an all-reduce of one chunk at two nodes and the scheduler."""
    cluster = _warm_cluster(2)
    with trace.recording():
        cluster.allreduce("w", [_ones()] * 2)


def crash(trace: Trace) -> None:
    """Record how an elastic job goes on without a node."""
    cluster = _warm_cluster(4, elastic="1:4")
    with trace.recording():
        cluster.faults.crash(3)
        pending = [node.push("w", _ones()) for node in cluster.living]
        cluster.run_until_ended(pending)
    for one in pending:
        assert (one.result() == len(pending)).all(), "a sum is not that of the survivors"


OPERATIONS: Final = {"submit": submit, "allreduce": allreduce, "crash": crash}


def _ones() -> npt.NDArray[np.float32]:
    return np.ones(ELEMENTS, np.float32)


def _warm_cluster(nodes: int, **settings: object) -> Any:
    """Return a job that has summed a key a few times; its class is found by name, wherever its module is."""
    own = re.compile(r"^class SimulatedCluster\b", re.MULTILINE)
    [name] = [name for name, path in modules().items() if own.search(path.read_text())]
    cluster = importlib.import_module(name).SimulatedCluster(nodes, seed=1, **settings)
    for _ in range(WARM):
        cluster.allreduce("w", [_ones()] * nodes)
    return cluster


def measured() -> dict[str, Trace]:
    """Return the calls of each operation."""
    files = job_files()
    traces = {name: Trace(files) for name in OPERATIONS}
    for name, operation in OPERATIONS.items():
        operation(traces[name])
    return traces


def touched(frontend: str, files: Collection[str]) -> set[str]:
    """Return the files that an all-reduce touches in the two processes of a real job."""
    with tempfile.TemporaryDirectory(prefix="netstorm-call-path-") as folder:
        launch = [sys.executable, "-m", "netstorm", "launch", "-n", "2", "--", sys.executable, __file__]
        subprocess.run([*launch, "--worker", frontend, folder], check=True, stdout=sys.stderr, cwd=ROOT)
        answers = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    assert len(answers) == 2, f"{len(answers)} of 2 ranks have answered"
    return {file for answer in answers for file in answer} & set(files)


def worker(frontend: str, folder: Path) -> None:
    """Be a rank of that job, and write which files the last of its all-reduces has touched."""
    trace, on = Trace(job_files()), threading.Event()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if on.is_set():
            trace.record(frame, event, argument)

    threading.setprofile(record)
    sys.setprofile(record)
    allreduce_once, finish = FRONTENDS[frontend]()
    for _ in range(WARM):
        allreduce_once()
    on.set()
    allreduce_once()
    on.clear()
    finish()
    (folder / f"{os.getpid()}.json").write_text(json.dumps(sorted(trace.files)))


def _torch() -> tuple[Callable[[], None], Callable[[], None]]:
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    distributed.init_process_group("netstorm")
    values = torch.ones(ELEMENTS)
    return lambda: distributed.all_reduce(values), distributed.destroy_process_group


def _mxnet() -> tuple[Callable[[], None], Callable[[], None]]:
    importlib.import_module("netstorm.frontends.mxnet")
    mxnet = importlib.import_module("mxnet")
    store = mxnet.kv.create("netstorm")
    values = mxnet.nd.ones(ELEMENTS)
    store.init("w", values)

    def allreduce_once() -> None:
        store.pushpull("w", values, out=values)
        values.wait_to_read()

    return allreduce_once, lambda: None


FRONTENDS: Final = {"torch": _torch, "mxnet": _mxnet}


def path_report(frontend: str, traces: dict[str, Trace]) -> dict[str, Any]:
    """Return the lines of each file on the way from a script into the sum and back, and all of them."""
    files = traces["allreduce"].files | touched(frontend, job_files())
    lines = {
        Path(file).relative_to(ROOT).as_posix(): Path(file).read_text().count("\n") for file in sorted(files)
    }
    return {"frontend": frontend, "files": len(lines), "lines": sum(lines.values()), "lines_of": lines}


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", action="store_true", help="list the files on the way, with their lines")
    parser.add_argument("--frontend", choices=FRONTENDS, default="torch", help="of --path (default: torch)")
    parser.add_argument("--worker", nargs=2, metavar=("FRONTEND", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.worker[0], Path(options.worker[1]))
        return 0
    traces = measured()
    report: dict[str, Any] = {name: trace.counts() for name, trace in traces.items()}
    if options.path:
        report["path"] = path_report(options.frontend, traces)
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    logging.disable()  # of the crash
    sys.exit(main())
