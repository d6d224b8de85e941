"""MXNet's own scheduler, servers and workers, as real processes: what NetStorm is compared with."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROLE = "import netstorm.frontends.mxnet.compat"
"""With DMLC_ROLE=scheduler or server, importing MXNet is all that it takes to be one."""


def run_with_servers(
    folder: Path, nodes: int, script: str, *, servers: int = 2, timeout_s: float = 240, **settings: object
) -> list[str]:
    """Run a script with MXNet's own store on `nodes` workers; return what each of them has printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = folder / "theirs.py"
    path.write_text(script)
    variables = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(nodes),
        "DMLC_NUM_SERVER": str(servers),
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in settings.items()},
    }
    with contextlib.ExitStack() as processes:
        for role in ["scheduler", *["server"] * servers]:
            processes.enter_context(_process([sys.executable, "-c", ROLE], {**variables, "DMLC_ROLE": role}))
        workers = [
            processes.enter_context(
                _process([sys.executable, str(path)], {**variables, "DMLC_ROLE": "worker"})
            )
            for _ in range(nodes)
        ]
        printed = [worker.communicate(timeout=timeout_s) for worker in workers]
        assert [worker.returncode for worker in workers] == [0] * nodes, printed
    return [out for out, _ in printed]


@contextlib.contextmanager
def _process(command: list[str], variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
