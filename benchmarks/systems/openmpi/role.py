"""Runs mpirun beside rank 0, with an agent that starts its daemons beside all; ends with the benchmark."""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_SETTINGS = (("pml", "ob1"), ("btl", "tcp,self"), ("mpi_yield_when_idle", "1"))
_POLL_S = 0.1
_GRACE_S = 3.0


def main() -> int:
    """Run mpirun until it ends, or standard input is closed; return its exit code."""
    folder, nodes, *command = sys.argv[1:]
    places = json.loads(os.environ.pop("BENCHMARK_PLACES"))
    job = mpirun_command(os.environ["BENCHMARK_MPIRUN"], Path(folder), int(nodes), places, command)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    running = subprocess.Popen(job, stdin=subprocess.DEVNULL)
    try:
        while running.poll() is None:
            ready, _, _ = select.select([0], [], [], _POLL_S)
            if ready and not os.read(0, 4096):
                break
        return running.wait(_GRACE_S)  # its ranks are told to end, too
    except subprocess.TimeoutExpired:
        return 1
    finally:
        if running.poll() is None:
            running.terminate()
            try:
                running.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
        shutil.rmtree(folder, ignore_errors=True)


def mpirun_command(
    mpirun: str, folder: Path, nodes: int, places: list[list[str]], command: list[str]
) -> list[str]:
    """Return the command that runs `command` on all ranks.

    Args:
        places: what makes a command run beside each rank; nothing: all are here.
    """
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    settings = [word for name, value in _SETTINGS for word in ("--mca", name, value)]
    job = [mpirun, *root, "-n", str(nodes), "--bind-to", "none", *settings]
    if not any(places):
        return [*job, "--oversubscribe", *command]
    agent = folder / "agent"
    agent.write_text(agent_script(places), encoding="utf-8")
    agent.chmod(0o700)
    hosts = ",".join(f"r{rank}:1" for rank in range(nodes))
    far = ["--host", hosts, "--map-by", "node", "--prtemca", "plm_ssh_agent", str(agent)]
    named = ["unshare", "--uts", "sh", "-c", 'hostname r0; exec "$@"', "sh"]
    return [*places[0], *named, *job, *far, "--leave-session-attached", *command]


def agent_script(places: list[list[str]]) -> str:
    """Return a script that is called as ssh is, HOST COMMAND..., and runs the command beside that rank."""
    cases = [
        f'r{rank}) exec {shlex.join([*place, "unshare", "--uts", "sh", "-c"])} "hostname r{rank}; $*" ;;'
        for rank, place in enumerate(places)
    ]
    return "\n".join(["#!/bin/sh", "host=$1", "shift", 'case "$host" in', *cases, "esac", ""])


if __name__ == "__main__":
    sys.exit(main())
