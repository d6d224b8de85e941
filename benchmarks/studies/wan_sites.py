"""One job of many sites: a process each, every one in a network namespace of its own, over an emulated WAN.

    python benchmarks/studies/wan_sites.py --nodes 64 --rate-scale 0.1 --rounds 10 --json sites.json   # root

The nodes are forked from this process, which has imported NetStorm, so that a machine of few processors
spends its time on the job and not on 64 interpreters; real sites have a processor each. The scheduler is
started as anybody starts it, beside rank 0. It measures:

* start-up: from the scheduler's start, and the forks as soon as it listens, until the last node has joined,
  and until all have summed once;
* whether every element of every sum is right: values are whole numbers that float32 sums exactly;
* the scheduler's processor time, as a share of a core, while rounds go on, without the process that forms
  policies, whose time stands beside it;
* a round's time over a bound that no all-reduce is below (`topology.lower_bound`; the optimum's rate is from
  above, within 2 %), and the processor time of a node.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import psutil

import netstorm.frontends.numpy.group  # what nodes need, before they are forked
from harness.arguments import number, writable
from harness.machine import describe_machine
from netstorm.errors import NetStormError
from netstorm.lab.emulation.namespaces import inside
from netstorm.lab.emulation.wan import Wan
from netstorm.settings import child_environment
from netstorm.topology.lower_bound import lower_bound
from netstorm.topology.network import FAMILIES, Network, generate
from netstorm.topology.resources import optimum
from netstorm.units import parse_bytes

_PORT: Final = 21_000
_START_S: Final = 240.0
_LEAVE: Final = "leave"
_GAP: Final = 0.02
"""Of the optimum's rate, which is from above: of 64 nodes that takes 7 s of a processor."""


class Node:
    """One node's process, forked from this one. It sums when it is told to, and answers in lines of JSON."""

    def __init__(self, wan: Wan, rank: int, options: argparse.Namespace, log: IO[bytes]) -> None:
        """Fork it."""
        self.rank: Final = rank
        order, self._orders = os.pipe()
        self._answers, answer = os.pipe()
        self.pid: Final = os.fork()
        if self.pid == 0:
            os.close(self._orders)
            os.close(self._answers)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            code = 1
            try:
                with inside(wan.namespace(rank)), os.fdopen(order) as orders:
                    _be_a_node(wan, rank, options, orders, lambda found: _write(answer, found))
                    atexit._run_exitfuncs()  # noqa: SLF001 -- as an interpreter does: it forwards until all leave
                code = 0
            except Exception:  # noqa: BLE001 -- the log is to say why
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(order)
        os.close(answer)
        self._file: Final = os.fdopen(self._answers)

    def tell(self, order: str) -> None:
        """Tell it what to do next."""
        os.write(self._orders, order.encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """Return its next answer."""
        line = self._file.readline()
        if not line:
            raise SystemExit(f"the node of rank {self.rank} has ended: its log says why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self, limit_s: float) -> None:
        """Wait until it has left the job, as it was told to, or kill it."""
        deadline = time.monotonic() + limit_s
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(self.pid, 9)
                os.waitpid(self.pid, 0)
                break
            time.sleep(0.02)
        os.close(self._orders)
        self._file.close()


def _write(descriptor: int, found: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(found).encode() + b"\n")


def _be_a_node(
    wan: Wan,
    rank: int,
    options: argparse.Namespace,
    orders: IO[str],
    answer: Callable[[dict[str, Any]], None],
) -> None:
    os.environ |= {
        "NETSTORM_SECURITY": "off",
        "DMLC_NODE_HOST": wan.address(rank),
        "NETSTORM_WAIT_TIMEOUT": str(int(_START_S)),
    }
    scheduler = f"{wan.address(0)}:{_PORT}"
    with netstorm.frontends.numpy.group.Group(scheduler=scheduler, rank=rank, size=options.nodes) as group:
        answer({"joined": time.monotonic()})
        places = np.arange(options.size // 4, dtype=np.int64) % 1000
        total = sum(range(1, options.nodes + 1))
        for line in iter(orders.readline, _LEAVE + "\n"):
            round = int(line)
            values = ((places + round) * (rank + 1)).astype(np.float32)
            used, began = time.process_time(), time.monotonic()
            result = group.allreduce(values)
            ended, used = time.monotonic(), time.process_time() - used
            exact = bool(np.array_equal(result, ((places + round) * total).astype(np.float32)))
            answer({"began": began, "ended": ended, "cpu_s": used, "exact": exact})


@contextmanager
def _scheduler(
    wan: Wan, options: argparse.Namespace, log: IO[bytes], ready: Path
) -> Iterator[psutil.Process]:
    """Run a scheduler beside rank 0, until all nodes have left; begin when it listens."""
    command = [sys.executable, "-m", "netstorm", "scheduler", "--host", wan.address(0)]
    command += ["--port", str(_PORT), "--ready-file", str(ready)]
    environment = child_environment(
        DMLC_NUM_WORKER=str(options.nodes),
        DMLC_PS_ROOT_URI=wan.address(0),
        NETSTORM_SECURITY="off",
        NETSTORM_TOPOLOGY=options.topology,
        NETSTORM_LOG="info",
        NETSTORM_WAIT_TIMEOUT=str(int(_START_S)),
        NETSTORM_MODEL=f"{options.size}B",
        NETSTORM_NETWORK=str(options.file or ""),
        OMP_NUM_THREADS="1",
    )
    process = subprocess.Popen(wan.command(0, command), env=environment, stdout=log, stderr=log)
    try:
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit("the scheduler has ended: its log says why")
            time.sleep(0.05)
        yield psutil.Process(process.pid)
    finally:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(20)


def _used(process: psutil.Process) -> tuple[float, float]:
    """Return the processor time of a process, and that of its children, in s."""
    times = process.cpu_times()
    others = [child.cpu_times() for child in process.children(recursive=True)]
    return times.user + times.system, sum(one.user + one.system for one in others)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the job, and return what was measured."""
    network, machine = _network(options), describe_machine()
    bound = lower_bound(
        network,
        optimum(network, options.size, gap=_GAP),
        [options.size],
        payload_share=1460 / 1500,
    )
    up = time.monotonic()
    with Wan.up(network, backend=options.backend) as wan, (folder / "log").open("wb") as log:
        up = time.monotonic() - up
        if options.known:
            from netstorm.topology.files import dump_network  # noqa: PLC0415 - only for this option

            options.file = folder / "network.yaml"
            options.file.write_text(dump_network(network), encoding="utf-8")
        began = time.monotonic()
        with _scheduler(wan, options, log, folder / "ready") as scheduler:
            listens = time.monotonic() - began
            gc.freeze()
            nodes = [Node(wan, rank, options, log) for rank in range(options.nodes)]
            try:
                joined = max(node.hear()["joined"] for node in nodes) - began
                rounds, first, before, window = [], joined, _used(scheduler), time.monotonic()
                for round in range(options.rounds):
                    for node in nodes:
                        node.tell(str(round))
                    found = [node.hear() for node in nodes]
                    rounds.append(found)
                    if not round:
                        first = max(one["ended"] for one in found) - began
                        before, window = _used(scheduler), time.monotonic()
                window = time.monotonic() - window
                after = _used(scheduler)
            finally:
                for node in nodes:
                    node.tell(_LEAVE)
                for node in nodes:
                    node.end(20.0)
    took = [max(one["ended"] for one in each) - max(one["began"] for one in each) for each in rounds]
    median = statistics.median(took[options.warmup :] or took)
    return {
        "nodes": options.nodes,
        "family": options.family,
        "rate_scale": options.rate_scale,
        "bytes": options.size,
        "topology": options.topology,
        "backend": wan.backend,
        "started": "forked from one process that had imported NetStorm",
        "network_up_s": up,
        "scheduler_listens_s": listens,
        "joined_s": joined,
        "first_sum_s": first,
        "rounds_s": took,
        "exact": [all(one["exact"] for one in each) for each in rounds],
        "median_s": median,
        "bound_s": bound.seconds,
        "bound_by": bound.reason,
        "time_over_bound": median / bound.seconds,
        "node_cpu_s_a_round": statistics.median(one["cpu_s"] for each in rounds for one in each),
        "scheduler_share_of_a_core": (after[0] - before[0]) / window if options.rounds > 1 else None,
        "scheduler_start_cpu_s": before[0],
        "forming_cpu_s": after[1],
        "machine": machine,
    }


def _network(options: argparse.Namespace) -> Network:
    network = generate(options.family, options.nodes, options.seed)
    return replace(network.scaled(options.rate_scale), changes=())


def main() -> None:
    """Run it, print what was measured, write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--nodes", type=number, default=64)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="internet2")
    parser.add_argument("--seed", type=number, default=1)
    parser.add_argument("--rate-scale", type=float, default=0.1, help="of the family's 20 to 155 Mbit/s")
    parser.add_argument("--size", type=parse_bytes, default=1_000_000, help="of the tensor, such as 1MB")
    parser.add_argument("--rounds", type=number, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that the median leaves out")
    parser.add_argument("--topology", default="auto")
    parser.add_argument("--known", action="store_true", help="the scheduler has the network file")
    parser.add_argument("--backend", default="auto", help="of the emulator")
    parser.add_argument("--logs", type=Path, help="folder that keeps the processes' log")
    parser.add_argument("--json", type=writable, metavar="FILE")
    options = parser.parse_args()
    options.file = None
    with tempfile.TemporaryDirectory(prefix="netstorm-sites-") as name:
        folder = options.logs or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = run(options, folder)
        except NetStormError as error:
            raise SystemExit(f"error: {error}") from None
    print(
        f"{found['nodes']} nodes: joined in {found['joined_s']:.1f} s, first sum after "
        f"{found['first_sum_s']:.1f} s; {sum(found['exact'])} of {len(found['exact'])} sums exact; a round "
        f"{found['median_s']:.2f} s (median), {found['time_over_bound']:.2f} times the bound; the scheduler "
        f"took {found['scheduler_share_of_a_core'] or 0:.1%} of a core, a node "
        f"{found['node_cpu_s_a_round']:.3f} s of a processor a round"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
