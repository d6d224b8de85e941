"""What a job costs its scheduler: processor time of its process, and of forming policies beside it.

    python benchmarks/studies/scheduler_load.py --nodes 9 --seconds 60 --json load.json

Real processes on loopback: the nodes sum ten keys so many times a second and measure their links, and the
scheduler follows what they measure. There rates say how busy the processors are, and waver.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.arguments import amount, number, writable
from netstorm.settings import child_environment
from netstorm.topology.files import dump_network
from netstorm.topology.network import Network

_NODE = """
import sys, time
import numpy as np
from netstorm.kvstore.process.runtime import runtime_of_this_process
from netstorm.kvstore.operations import Operation

size, every_s, until_s = int(sys.argv[1]) // 4, float(sys.argv[2]), float(sys.argv[3])
runtime = runtime_of_this_process()
keys = [runtime.register(0, f"w{n}", (size // 10,), "float32") for n in range(10)]
values = np.ones(size // 10, np.float32)
begin = time.monotonic()
rounds = int(until_s / every_s)
for round in range(rounds):
    for key in keys:
        total = np.empty_like(values)
        runtime.submit(
            Operation(
                key=key, round=key.take_round(), source=values, destination=total, done=lambda _: None
            )
        )
    time.sleep(max(0.0, begin + every_s * (round + 1) - time.monotonic()))
"""


def main() -> None:
    """Run a job, and print what it cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=number, default=9)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=float, default=5.0, help="of ten keys, a second")
    parser.add_argument("--size", type=amount, default=2_000_000, help="of a round, such as 2MB")
    parser.add_argument("--json", type=writable, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="netstorm-load-") as name:
        found = _measure(options, Path(name))
    print(
        f"{options.nodes} nodes, {options.rounds:g} rounds of 10 keys a second for {found['seconds']:.0f} s: "
        f"the scheduler took {found['scheduler']:.2%} of a core, forming {found['forming']:.2%}; "
        f"{found['formations_a_minute']:.1f} formations a minute of {found['formation_s']:.2f} s (median)"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    log = folder / "log"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        _start(options, folder, processes)
        found = _watch(processes[0], until=processes[1])
        if any(process.wait(60) for process in processes):
            raise SystemExit(f"a process has failed; the scheduler's log: {log.read_text(encoding='utf-8')}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    took_s = sorted(map(float, re.findall(r"formed in ([\d.]+) s", log.read_text(encoding="utf-8"))))
    return {
        "nodes": options.nodes,
        "rounds_a_second": options.rounds,
        **found,
        "formations_a_minute": 60 * len(took_s) / found["seconds"],
        "formation_s": took_s[len(took_s) // 2] if took_s else 0.0,
    }


def _start(options: argparse.Namespace, folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """Start a scheduler and its nodes, add each to `processes`, and wait until the job has begun."""
    ready, log, network = folder / "ready", folder / "log", folder / "network.yaml"
    network.write_text(dump_network(Network.uniform(options.nodes)), encoding="utf-8")
    common: dict[str, Any] = {
        "DMLC_NUM_WORKER": str(options.nodes),
        "NETSTORM_NETWORK": str(network),
        "NETSTORM_LOG": "info",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "netstorm", "scheduler", "--port", "0", "--ready-file", str(ready)]
    with log.open("wb") as out:
        environment = child_environment(**common, DMLC_PS_ROOT_URI="127.0.0.1")
        processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
    while not ready.exists() or not ready.read_text(encoding="utf-8").strip():
        time.sleep(0.05)
    host, port = ready.read_text(encoding="utf-8").strip().rsplit(":", 1)
    numbers = (str(options.size), str(1 / options.rounds), str(options.seconds))
    where: dict[str, Any] = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port}
    for _ in range(options.nodes):
        node = [sys.executable, "-c", _NODE, *numbers]
        processes.append(subprocess.Popen(node, env=child_environment(**common, **where)))
    while "all nodes are here" not in log.read_text(encoding="utf-8"):
        time.sleep(0.05)


def _watch(scheduler: subprocess.Popen[bytes], *, until: subprocess.Popen[bytes]) -> dict[str, float]:
    """Return the seconds until a process ends, and the shares of a core that a scheduler takes meanwhile."""
    watched = psutil.Process(scheduler.pid)
    begin, before = time.monotonic(), watched.cpu_times()
    forming: dict[int, float] = {}
    own = last = before.user + before.system
    seconds = 0.0
    while until.poll() is None:
        time.sleep(0.5)
        try:
            times = watched.cpu_times()
            for child in watched.children(recursive=True):
                took = child.cpu_times()
                forming[child.pid] = took.user + took.system
        except psutil.NoSuchProcess:
            break
        last, seconds = times.user + times.system, time.monotonic() - begin
    return {
        "seconds": seconds,
        "scheduler": (last - own) / seconds,
        "forming": sum(forming.values()) / seconds,
    }


if __name__ == "__main__":
    main()
