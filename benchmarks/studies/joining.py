#!/usr/bin/env python3
"""What does it cost the others when a node joins an elastic job? Their steps before, while and after.

    python benchmarks/studies/joining.py --nodes 3 --state 100MB --repetitions 5

The nodes run MXNet. Their state is large, and a step sums a small part of it, so that many steps fall into
the time of one transfer. Another node joins, fetches the state, takes part, is killed, and joins again. The
median of the others' steps while it fetches is compared with those of steps before, while it takes part, and
after. A further process shares the machine's processors, so steps are slower with it in any case.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import amount, number
from harness.lifeline import commands_from_stdin
from netstorm.cli.support import scratch_folder
from systems.base import environment
from systems.ports import loopback_port

_PUSHED: Final = 250_000
"""Elements that a step sums: 1 MB."""
_FROZEN: Final = 1_000_000
"""Elements of each of the other keys."""
_DEADLINE_S: Final = 120.0
_WITH_IT_S: Final = 2.0
"""How long the node that has joined takes part."""


def work(state_bytes: int) -> None:
    """Be one node, until standard input is closed."""
    commands = commands_from_stdin()
    import netstorm.frontends.mxnet  # noqa: F401, PLC0415 - registers the store
    from netstorm.frontends.mxnet.compat import mx  # noqa: PLC0415

    def say(**values: Any) -> None:
        print(json.dumps({"at": time.monotonic(), **values}), flush=True)

    kv = mx.kv.create("dist_sync_netstorm")
    place = {"step": 0}
    say(event="joined")
    kv.attach_state("place", lambda: place, place.update)
    say(event="has the state")
    kv.init("pushed", mx.nd.zeros((_PUSHED,)))
    for frozen in range(max(1, state_bytes // (4 * _FROZEN))):
        kv.init(f"frozen {frozen}", mx.nd.ones((_FROZEN,)))
    mx.nd.waitall()
    gradient, out = mx.nd.ones((_PUSHED,)), mx.nd.zeros((_PUSHED,))
    while commands.empty():
        kv.pushpull("pushed", gradient, out=out)
        out.wait_to_read()
        place["step"] += 1
        say(step=place["step"], ranks=len(kv.contributors("pushed")))
    os._exit(0)


class Nodes:
    """The nodes' processes, and what they have said."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder: Final = folder
        self._options: Final = options
        self._processes: Final[list[subprocess.Popen[bytes]]] = []
        self._job: Final = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": loopback_port(0),
            "DMLC_NUM_WORKER": options.nodes,
            "NETSTORM_ELASTIC": f"1:{options.nodes + 1}",
            "NETSTORM_SECURITY": "off",
            "OMP_NUM_THREADS": 1,
        }
        self._start("scheduler", [sys.executable, "-m", "netstorm", "scheduler"], DMLC_ROLE="scheduler")

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a node; what it said under this name before is dropped."""
        state = str(self._options.state)
        return self._start(name, [sys.executable, __file__, "--work", state], DMLC_ROLE="worker")

    def said(self, name: str) -> list[dict[str, Any]]:
        """Return what a node has said so far."""
        lines = (self._folder / name).read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def wait(self, name: str, **values: Any) -> float:
        """Return when a node said something with these values; wait for it."""
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            for line in self.said(name):
                if values.items() <= line.items():
                    return float(line["at"])
            time.sleep(0.05)
        raise TimeoutError(f"{name} never said {values}: {(self._folder / name).read_text()[-500:]}")

    def stop(self) -> None:
        """End everything."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, name: str, command: list[str], **variables: Any) -> subprocess.Popen[bytes]:
        path = os.pathsep.join((str(Path(__file__).parents[1]), str(Path(__file__).parents[2])))
        with (self._folder / name).open("wb") as out:
            process = subprocess.Popen(
                command,
                env=environment(**self._job, **variables, PYTHONPATH=path),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
            )
        self._processes.append(process)
        return process


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the medians of each repetition, in s."""
    found = []
    with scratch_folder() as folder, contextlib.ExitStack() as stack:
        nodes = Nodes(folder, options)
        stack.callback(nodes.stop)
        for rank in range(options.nodes):
            nodes.start(f"node {rank}")
        nodes.wait("node 0", step=50)
        for _ in range(options.repetitions):
            newcomer = nodes.start("newcomer")
            began = nodes.wait("newcomer", event="joined")
            ended = nodes.wait("newcomer", event="has the state")
            joined = nodes.wait("newcomer", ranks=options.nodes + 1)
            time.sleep(_WITH_IT_S)
            killed = time.monotonic()
            newcomer.kill()
            newcomer.wait()
            time.sleep(3 * (ended - began) + 1)
            times = [line["at"] for line in nodes.said("node 0") if "step" in line]
            steps = [(end, end - begin) for begin, end in itertools.pairwise(times)]
            meanwhile = [took for end, took in steps if began <= end <= ended]
            before = [took for end, took in steps if end < began][-max(20, len(meanwhile)) :]
            there = [took for end, took in steps if joined + 0.2 <= end <= killed]
            after = [took for _, took in steps][-max(20, len(meanwhile)) :]
            found.append(
                {
                    "fetch": ended - began,
                    "steps": len(meanwhile),
                    "before": statistics.median(before),
                    "while": statistics.median(meanwhile or [float("nan")]),
                    "there": statistics.median(there or [float("nan")]),
                    "after": statistics.median(after),
                }
            )
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--nodes", type=number, default=3, metavar="N", help="before another one joins; default 3")
    add("--state", type=amount, default=100_000_000, metavar="SIZE", help="default 100MB")
    add("--repetitions", type=number, default=5, metavar="N", help="default 5")
    add("--work", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    found = measure(options)
    print(" fetch   steps  before   while   there   after")
    for row in found:
        print(
            f"{row['fetch']:5.2f}s {row['steps']:7.0f} {1e3 * row['before']:5.1f}ms "
            f"{1e3 * row['while']:5.1f}ms {1e3 * row['there']:5.1f}ms {1e3 * row['after']:5.1f}ms"
        )
    for phase, text in (("while", "while a node fetches"), ("there", "while it takes part")):
        slower = statistics.median(row[phase] / row["before"] for row in found)
        print(f"{text}, the others' steps take {slower:.2f} times as long (median)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
