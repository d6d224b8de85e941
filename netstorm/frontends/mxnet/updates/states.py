"""Optimiser states on disk, in MXNet's own format, and what tells whether all ranks have the same.

The format is a pickle, as MXNet's is everywhere: load only files that you trust. Nothing of it crosses the
wire. Each rank reads the file itself, and since every rank has all states, a file that a job of four nodes
has written is read by one of two.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx

__all__ = ["digest_of", "take_up", "write_atomically"]


def take_up(updater: Any, path: str) -> None:
    """Give an `mx.optimizer.Updater` the states of a file, and its optimiser, if there is one in it.

    Raises:
        UsageError: the file is none of `save_optimizer_states`; the updater is as it was.
        OSError: it cannot be read.
    """
    data = Path(path).read_bytes()
    before = updater.states, updater.states_synced, updater.optimizer
    try:
        updater.set_states(data)
        good = isinstance(updater.states, dict) and isinstance(updater.optimizer, mx.optimizer.Optimizer)
        reason = f"it holds a {type(updater.states).__name__}"
    except Exception as error:  # noqa: BLE001 -- reading a pickle that is none may raise anything
        good, reason = False, f"{type(error).__name__}: {error}"
    if not good:
        updater.states, updater.states_synced, updater.optimizer = before
        raise UsageError(
            f"load_optimizer_states: {path} ({len(data)} bytes) is damaged, or not a file that "
            f"save_optimizer_states has written: {reason}"
        )


def digest_of(states: Any) -> str:
    """Return a short digest of states, the same on all ranks that have the same values."""
    digest = hashlib.sha256()
    _add(digest, states)
    return digest.hexdigest()[:8]


def _add(digest: Any, state: Any) -> None:
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            digest.update(f"{key!r}:".encode())
            _add(digest, state[key])
    elif isinstance(state, (list, tuple)):
        digest.update(f"{len(state)} of".encode())
        for one in state:
            _add(digest, one)
    elif isinstance(state, mx.nd.NDArray):
        digest.update(f"{state.shape} {state.dtype} ".encode() + state.asnumpy().tobytes())
    else:
        digest.update(type(state).__name__.encode())


def write_atomically(path: str, data: bytes) -> None:
    """Write a file so that a reader, or another rank that writes the same bytes, never sees half of it."""
    target = Path(path)
    descriptor, name = tempfile.mkstemp(dir=target.resolve().parent, prefix=target.name + ".")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
