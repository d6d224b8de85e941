"""The states of an asynchronous store's optimiser, put together from their owners, as a file."""

from __future__ import annotations

from typing import Any

from netstorm.frontends.mxnet.asynchronous.owned_rule import with_counts
from netstorm.frontends.mxnet.asynchronous.owned_states import decode, joined
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.updates.states import write_atomically

__all__ = ["Collected"]


class Collected:
    """What has been collected so far."""

    def __init__(self) -> None:
        self._states: dict[int | str, Any] = {}
        self._counts: dict[int | str, int] = {}
        self._all_updates = 0

    def add(self, key: int | str, shape: tuple[int, ...], blocks: dict[int, bytes]) -> None:
        """Add a key's, of all of its blocks; nothing if it has never been updated."""
        parts = [decode(blocks[block]) for block in sorted(blocks)]
        if any(part.begun for part in parts):
            self._states[key] = joined([part.state for part in parts], shape)
            self._counts[key] = max(part.updates for part in parts)
            self._all_updates = max(self._all_updates, *(part.all_updates for part in parts))

    def save(self, path: str, optimizer: Any, *, dump_optimizer: bool) -> None:
        """Write a file in MXNet's format; `optimizer` is the script's, whose counts are not the owners'."""
        updater = mx.optimizer.Updater(with_counts(optimizer, self._counts, self._all_updates))
        updater.states = self._states
        write_atomically(path, updater.get_states(dump_optimizer))
