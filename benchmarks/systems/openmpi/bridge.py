"""Joins what started it, by standard input and output, with an MPI rank at the end of a Unix socket.

It ends when the rank does, or when its standard input is closed before a rank has come.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from pathlib import Path

_GRACE_S = 5.0


def main() -> int:
    """Carry bytes both ways until the rank has ended."""
    path = Path(sys.argv[1])
    with socket.socket(socket.AF_UNIX) as door:
        part = path.with_suffix(".part")
        door.bind(str(part))
        door.listen(1)
        part.rename(path)  # whoever finds it can connect
        while True:
            ready, _, _ = select.select([door.fileno(), 0], [], [])
            if door.fileno() in ready:
                break
            if not os.read(0, 65536):
                return 1
        rank, _ = door.accept()
    with rank:
        return _carry(rank)


def _carry(rank: socket.socket) -> int:
    inputs = [0, rank.fileno()]
    while True:
        ready, _, _ = select.select(inputs, [], [], None if len(inputs) > 1 else _GRACE_S)
        if not ready:
            return 1  # told to end, the rank has not
        if 0 in ready:
            got = os.read(0, 65536)
            if got:
                rank.sendall(got)
            else:
                inputs.remove(0)
                rank.shutdown(socket.SHUT_WR)
        if rank.fileno() in ready:
            got = rank.recv(65536)
            if not got:
                return 0
            os.write(1, got)


if __name__ == "__main__":
    sys.exit(main())
