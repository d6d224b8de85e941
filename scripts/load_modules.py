"""Loads modules into the kernel, each after what it depends on, where there is no kmod: FOLDER MODULE..."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

_FINIT_MODULE = 313  # x86-64; Python has no name for it


def main(folder: str, *names: str) -> None:
    """Load the modules of these names, of the files below a folder."""
    files = {path.stem.replace("-", "_"): path for path in Path(folder).rglob("*.ko")}
    loaded: set[str] = set()
    for name in names:
        _load(name, files, loaded)


def _load(name: str, files: dict[str, Path], loaded: set[str]) -> None:
    name = name.replace("-", "_")
    if name in loaded:
        return
    loaded.add(name)
    found = re.search(rb"\0depends=([^\0]*)\0", files[name].read_bytes())
    for other in found[1].decode().split(",") if found else ():
        if other:
            _load(other, files, loaded)
    libc = ctypes.CDLL(None, use_errno=True)
    with files[name].open("rb") as file:
        if libc.syscall(_FINIT_MODULE, file.fileno(), b"", 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(files[name]))


if __name__ == "__main__":
    main(*sys.argv[1:])
