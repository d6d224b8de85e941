#!/usr/bin/env python3
"""What strangers at its ports cost a training job: idle connections, slow senders, claims of gigabytes, ...

    benchmarks/security/strangers.py [--seconds 60] [--nodes 3] [--plain] [--json FILE]

A real scheduler and real nodes sum on loopback. By turns they are attacked and left alone
(`attacks.py` says how), so what else the machine does happens to both. The attackers run at the
lowest priority, since strangers' computers are others. Exit code 1: rounds took 1.2 times as long, a process
grew by 50 MB or kept file descriptors, or a sum was wrong.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.arguments import amount, number, seconds, writable
from netstorm.pslite.keys import JobKey
from netstorm.settings import child_environment

_MOST_RATIO: Final = 1.2
_MOST_GROWTH: Final = 50_000_000
_MOST_DESCRIPTORS: Final = 5
"""Above what a process had before: a session may be opening a connection."""

_TURN_S: Final = 5.0
_SETTLE_S: Final = 15.0
"""Until connections that say nothing have been closed: the link time-out and some more."""
_SAMPLE_S: Final = 0.25

_NODE: Final = """
import sys, threading, time
import numpy as np
from netstorm.kvstore.operations import Operation
from netstorm.kvstore.process.runtime import runtime_of_this_process

size, every_s, nodes = int(sys.argv[1]) // 4, float(sys.argv[2]), int(sys.argv[3])
runtime = runtime_of_this_process()
keys = [runtime.register(0, f"w{n}", (size // 4,), "float32") for n in range(4)]
values = np.ones(size // 4, np.float32)
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
stop, least = threading.Event(), np.zeros(1, np.float32)
begin = time.monotonic()
for round in range(10**9):
    rest = begin + every_s * (round + 1) - time.monotonic()
    if rest > 0:
        time.sleep(rest)
    began = time.monotonic()
    totals, ended = [np.empty_like(values) for _ in keys], [threading.Event() for _ in keys]
    problems = []
    for key, total, event in zip(keys, totals, ended):
        def done(error, event=event):
            problems.append(error)
            event.set()
        runtime.submit(
            Operation(key=key, round=key.take_round(), source=values, destination=total, done=done)
        )
    for event in ended:
        event.wait(60.0)
    took = time.monotonic() - began
    if any(problems) or any((total != nodes).any() for total in totals):
        sys.exit(f"round {round} went wrong: {problems}")
    print(began, took, flush=True)
"""


def main() -> int:
    """Attack a job, and print what it has cost."""
    options = _arguments()
    with tempfile.TemporaryDirectory(prefix="netstorm-strangers-") as name:
        found = _measure(options, Path(name))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    worst = max(one["growth"] for one in found["processes"].values())
    kept = max(one["descriptors_after"] - one["descriptors_before"] for one in found["processes"].values())
    print(
        f"{found['rounds']} rounds on {options.nodes} nodes, {'plain' if options.plain else 'with a key'}: "
        f"{found['quiet_ms']:.1f} ms undisturbed, {found['attacked_ms']:.1f} ms under attack, ratio "
        f"{found['ratio']:.2f}; the job's processes took {found['cores']['quiet']:.2f} and "
        f"{found['cores']['attacked']:.2f} cores; a process grew by at most {worst / 1e6:.1f} MB and kept "
        f"{kept} descriptors"
    )
    print(", ".join(f"{count:,} {what}" for what, count in found["sent"].items()))
    if found["sent"]["claims of gigabytes"] < found["seconds"]:
        print("the attackers have hardly run: this machine is too busy for a measurement")
        return 1
    good = found["ratio"] < _MOST_RATIO and worst < _MOST_GROWTH and kept <= _MOST_DESCRIPTORS
    return 0 if good else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What strangers at its ports cost a training job.")
    parser.add_argument("--seconds", type=seconds, default=60.0, help="of attack; as long undisturbed")
    parser.add_argument("--turn", type=seconds, default=_TURN_S, help="seconds of a turn")
    parser.add_argument("--nodes", type=number, default=3)
    parser.add_argument("--size", type=amount, default=4_000_000, help="of a round, such as 4MB")
    parser.add_argument("--rounds", type=float, default=4.0, help="a second")
    parser.add_argument("--plain", action="store_true", help="without a key: strangers get further")
    parser.add_argument("--json", type=writable, metavar="FILE")
    return parser.parse_args()


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        _start(options, folder, processes)
        _wait_for_rounds(folder, processes, 8)
        ports = sorted({port for one in processes.values() for port in _ports(one.pid)})
        attack = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("attacks.py")), *map(str, ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        psutil.Process(attack.pid).nice(19)
        processes["attack"] = attack
        return {"ports": ports, **_take_turns(options, folder, processes, attack)}
    finally:
        for process in reversed(processes.values()):
            process.kill()
            process.wait()


def _start(options: argparse.Namespace, folder: Path, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    common: dict[str, Any] = {"DMLC_NUM_WORKER": str(options.nodes), "OMP_NUM_THREADS": "1"}
    if options.plain:
        common["NETSTORM_SECURITY"] = "off"
    else:
        key = folder / "job.key"
        key.touch(mode=0o600)
        key.write_text(JobKey.fresh().file_text(), encoding="utf-8")
        common["NETSTORM_KEY_FILE"] = str(key)
    ready = folder / "ready"
    command = [sys.executable, "-m", "netstorm", "scheduler", "--port", "0", "--ready-file", str(ready)]
    with (folder / "scheduler.log").open("wb") as log:
        environment = child_environment(**common, DMLC_PS_ROOT_URI="127.0.0.1")
        processes["scheduler"] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    deadline = time.monotonic() + 60.0
    while not ready.exists() or not ready.read_text(encoding="utf-8").strip():
        _check(folder, processes, deadline)
    port = ready.read_text(encoding="utf-8").strip().rpartition(":")[2]
    where: dict[str, Any] = {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NODE_HOST": "127.0.0.1",
    }
    for rank in range(options.nodes):
        numbers = (str(options.size), str(1 / options.rounds), str(options.nodes))
        with (folder / f"node{rank}.log").open("wb") as log, (folder / f"rounds{rank}").open("wb") as rounds:
            processes[f"node {rank}"] = subprocess.Popen(
                [sys.executable, "-c", _NODE, *numbers],
                env=child_environment(**common, **where),
                stdin=subprocess.PIPE,
                stdout=rounds,
                stderr=log,
            )


def _take_turns(
    options: argparse.Namespace,
    folder: Path,
    processes: dict[str, subprocess.Popen[bytes]],
    attack: subprocess.Popen[bytes],
) -> dict[str, Any]:
    watched = {name: psutil.Process(one.pid) for name, one in processes.items() if name != "attack"}
    before = {name: (one.memory_info().rss, one.num_fds()) for name, one in watched.items()}
    most = {name: rss for name, (rss, _) in before.items()}
    fds = {name: count for name, (_, count) in before.items()}
    turns: list[tuple[str, float, float]] = []
    cpu = {what: collections.Counter[str]() for what in ("quiet", "attacked")}
    sent: dict[str, int] = {}
    assert attack.stdout is not None
    for _ in range(max(1, round(options.seconds / options.turn))):
        for what in ("quiet", "attacked"):
            if what == "attacked":
                _tell(attack, b"on\n")
            began, used = time.monotonic(), _cpu_s(watched)
            while time.monotonic() < began + options.turn:
                _check(folder, processes, began + 10 * options.turn)
                for name, one in watched.items():
                    most[name] = max(most[name], one.memory_info().rss)
                    fds[name] = max(fds[name], one.num_fds())
            turns.append((what, began, time.monotonic()))
            cpu[what] += _cpu_s(watched) - used
            if what == "attacked":
                _tell(attack, b"off\n")
                for kind, count in json.loads(attack.stdout.readline()).items():
                    sent[kind] = sent.get(kind, 0) + count
                time.sleep(1.0)  # connections that are closing belong to neither turn
    time.sleep(_SETTLE_S)
    _check(folder, processes, time.monotonic() + 60.0)
    rounds = _rounds(folder)
    medians: dict[str, list[float]] = {"quiet": [], "attacked": []}
    for what, began, ended in turns:
        medians[what].append(statistics.median(took for at, took in rounds if began <= at < ended))
    pairs = zip(medians["attacked"], medians["quiet"], strict=True)
    return {
        "rounds": len(rounds),
        "seconds": sum(ended - began for what, began, ended in turns if what == "attacked"),
        "quiet_ms": statistics.median(medians["quiet"]) * 1e3,
        "attacked_ms": statistics.median(medians["attacked"]) * 1e3,
        "ratio": statistics.median(attacked / quiet for attacked, quiet in pairs),
        "turns_ms": {what: [round(one * 1e3, 2) for one in found] for what, found in medians.items()},
        "cores": {what: round(sum(used.values()) / options.seconds, 3) for what, used in cpu.items()},
        "cores_of": {
            what: {name: round(seconds / options.seconds, 3) for name, seconds in used.items()}
            for what, used in cpu.items()
        },
        "sent": sent,
        "processes": {
            name: _process(one, before[name], most[name], fds[name]) for name, one in watched.items()
        },
    }


def _process(process: psutil.Process, before: tuple[int, int], rss: int, fds: int) -> dict[str, Any]:
    """Return what a process took: `before` the attack, and at most."""
    return {
        "rss_before": before[0],
        "rss_most": rss,
        "growth": rss - before[0],
        "descriptors_before": before[1],
        "descriptors_most": fds,
        "descriptors_after": process.num_fds(),
        "connections_after": _connections(process),
    }


def _tell(attack: subprocess.Popen[bytes], line: bytes) -> None:
    assert attack.stdin is not None
    attack.stdin.write(line)
    attack.stdin.flush()


def _connections(process: psutil.Process) -> dict[str, int]:
    """Return the number of a process's TCP connections by own port and state."""
    names = [f"{one.laddr.port} {one.status}" for one in process.net_connections(kind="tcp")]
    return dict(collections.Counter(names))


def _cpu_s(processes: Mapping[str, psutil.Process]) -> collections.Counter[str]:
    """Return the processor seconds of each process so far."""
    found = collections.Counter[str]()
    for name, process in processes.items():
        times = process.cpu_times()
        found[name] = times.user + times.system  # type: ignore[assignment] # a counter adds any numbers
    return found


def _wait_for_rounds(folder: Path, processes: dict[str, subprocess.Popen[bytes]], rounds: int) -> None:
    deadline = time.monotonic() + 120.0
    while len(_rounds(folder)) < rounds:
        _check(folder, processes, deadline)


def _check(folder: Path, processes: dict[str, subprocess.Popen[bytes]], deadline: float) -> None:
    """Wait for a moment; end with an error if a process has ended, or it is too late."""
    time.sleep(_SAMPLE_S)
    ended = [name for name, one in processes.items() if one.poll() is not None]
    if ended or time.monotonic() > deadline:
        logs = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(folder.glob("*.log")))
        raise SystemExit(f"{', '.join(ended) or 'the job'} has {'ended' if ended else 'no progress'}\n{logs}")


def _rounds(folder: Path) -> list[tuple[float, float]]:
    """Return the begin and the duration of each round at rank 0."""
    path = folder / "rounds0"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [(float(began), float(took)) for began, took in (line.split() for line in lines if " " in line)]


def _ports(pid: int) -> list[int]:
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]


if __name__ == "__main__":
    sys.exit(main())
