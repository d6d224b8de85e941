"""What mpirun starts as each rank: a worker whose commands come through a bridge's socket."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from systems.openmpi.system import rank_of_this_process

_CONNECT_S = 30.0


def connected(path: Path) -> socket.socket:
    """Return a connection to the bridge, which may still be starting."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(str(path))
        except OSError:
            link.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return link


if __name__ == "__main__":
    link = connected(Path(sys.argv.pop(1)) / rank_of_this_process())
    os.dup2(link.fileno(), 0)
    os.dup2(link.fileno(), 1)
    link.close()
    from harness.serving import serve
    from workers.allreduce import join

    serve(join)
