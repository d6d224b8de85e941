"""A process that has imported the doctor, and forks doctors (`fork_server`) into namespaces of their own."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.fork_server import serve

IMPORTED = (
    "netstorm.cli.doctor.command",
    "netstorm.cli.doctor.hosts",
    "netstorm.cli.doctor.logs",
    "netstorm.cli.doctor.probes",
    "netstorm.cli.launch.hosts",
    "netstorm.cli.main",
    "netstorm.scheduler.process.scheduler_process",
)
NEW_MOUNTS, NEW_NAME, OF_NETWORK = 0x00020000, 0x04000000, 0x40000000
BIND = 4096

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Import everything, and serve."""
    for name in IMPORTED:
        importlib.import_module(name)
    serve(run)


def run(request: dict[str, Any]) -> None:
    """Be a doctor, or a scheduler, on the host that a request describes."""
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    network = os.open(Path("/run/netns", request["namespace"]), os.O_RDONLY | os.O_CLOEXEC)
    check(_libc.setns(network, OF_NETWORK))
    check(_libc.unshare(NEW_MOUNTS | NEW_NAME))
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    socket.sethostname(request["host"])
    for path, file in request["files"].items():
        check(_libc.mount(file.encode(), path.encode(), None, BIND, None))
    if request["shell"]:
        subprocess.run(["sh", "-ec", request["shell"]], check=True)
    exec(request["patch"], {})
    sys.argv = ["netstorm", *request["words"]]
    importlib.import_module("netstorm.cli.main").app(prog_name="netstorm")


def check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()
