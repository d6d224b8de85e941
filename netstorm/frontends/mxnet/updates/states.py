"""Optimizer states on disk, in MXNet's own format, and a digest that tells whether all ranks have the same.

The format is a pickle, as everywhere in MXNet: load only files that you trust. It is never sent. Each rank
reads the file itself. Since every rank has all states, a job of two nodes can read what one of four has
written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx

__all__ = ["digest_of", "restore_states", "write_atomically"]


def restore_states(updater: mx.optimizer.Updater, path: str) -> None:
    """Give an updater the states of a file, and the optimizer of the file, if it has one.

    Raises:
        UsageError: `save_optimizer_states` has not written the file; the updater is as it was.
        OSError: it cannot be read.
    """
    data = Path(path).read_bytes()
    before = updater.states, updater.states_synced, updater.optimizer
    try:
        updater.set_states(data)
        states: object = updater.states  # whatever the pickle had
        good = isinstance(states, dict) and isinstance(updater.optimizer, mx.optimizer.Optimizer)
        reason = f"it holds a {type(states).__name__}"
    except Exception as error:  # noqa: BLE001 -- reading something that is no pickle may raise anything
        good, reason = False, f"{type(error).__name__}: {error}"
    if not good:
        updater.states, updater.states_synced, updater.optimizer = before
        raise UsageError(
            f"load_optimizer_states: {path} ({len(data)} bytes) is damaged, or not a file that "
            f"save_optimizer_states has written: {reason}"
        )


def digest_of(states: object) -> str:
    """Return a short digest of states, the same on all ranks that have the same values."""
    digest = hashlib.sha256()
    _add(digest, states)
    return digest.hexdigest()[:8]


def _add(digest: hashlib._Hash, state: object) -> None:
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            digest.update(f"{key!r}:".encode())
            _add(digest, state[key])
    elif isinstance(state, (list, tuple)):
        digest.update(f"{len(state)} of".encode())
        for part in state:
            _add(digest, part)
    elif isinstance(state, mx.nd.NDArray):
        digest.update(f"{state.shape} {state.dtype} ".encode() + state.asnumpy().tobytes())
    else:
        digest.update(type(state).__name__.encode())


def write_atomically(path: str, data: bytes) -> None:
    """Write a file at once: no reader, and no other rank that writes the same bytes, ever sees half of it."""
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
