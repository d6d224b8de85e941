"""MXNet's own scheduler, servers and workers, as real processes: what NetStorm is compared with."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from tests.integration.forking import ForkedProcess
from tests.integration.jobs import PYTHONPATH, Job

ROLE = "from mxnet.kvstore import kvstore_server\nkvstore_server._init_kvstore_server_module()\n"
"""What importing MXNet does with DMLC_ROLE=scheduler or server; the process has been forked from one that had
imported it."""

END = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"
"""MXNet's own end hangs at times, and aborts in a process that was forked."""


def run_with_servers(
    folder: Path, nodes: int, script: str, *, servers: int = 2, timeout_s: float = 240, **settings: object
) -> list[str]:
    """Run a script with MXNet's own store on `nodes` workers; return what each of them has printed."""
    assert Job.mxnet_forker is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "PYTHONPATH": PYTHONPATH,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(nodes),
        "DMLC_NUM_SERVER": str(servers),
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in settings.items()},
    }
    sources = {"worker": script + END, "server": ROLE, "scheduler": ROLE}
    for role, source in sources.items():
        (folder / f"{role}.py").write_text(source)
    processes: list[ForkedProcess] = []
    try:
        for number, role in enumerate([*["worker"] * nodes, *["server"] * servers, "scheduler"]):
            processes.append(
                ForkedProcess(
                    Job.mxnet_forker,
                    words=[str(folder / f"{role}.py")],
                    environment={**os.environ, **variables, "DMLC_ROLE": role},
                    out=str(folder / f"theirs{number}.out"),
                    err=str(folder / f"theirs{number}.err"),
                )
            )
        codes = [worker.wait(timeout_s) for worker in processes[:nodes]]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    outs, errs = (
        [(folder / f"theirs{number}.{name}").read_text() for number in range(nodes)]
        for name in ("out", "err")
    )
    assert codes == [0] * nodes, errs
    return outs
