"""Keys of an asynchronous store as one rank of an elastic job saves them: with what their owners hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from netstorm.compression.rows import Rows
from netstorm.frontends.mxnet.arrays.row_memory import filled_rows
from netstorm.frontends.mxnet.asynchronous.collected_states import CollectedStates
from netstorm.frontends.mxnet.asynchronous.entry import AsyncEntry, AsyncRowEntry
from netstorm.frontends.mxnet.asynchronous.owner import Owner
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.process.owners_snapshot import collect_from_owners
from netstorm.kvstore.process.runtime import Runtime
from netstorm.kvstore.values.key import Array, Key
from netstorm.protocol.chunks import ROW_SPARSE

__all__ = ["SavedEntry", "collect_entries"]


class SavedEntry:
    """A key with the owners' values. See `netstorm.frontends.mxnet.checkpoint.SavedEntry`."""

    residual: Final = None
    """What compression has kept is each rank's own."""

    def __init__(self, user_key: int | str, value: NDArray, rounds: int) -> None:
        self.user_key: Final = user_key
        self.value: Final = value
        self.rounds: Final = rounds

    def wait_for_updates(self) -> None:
        """Do nothing: all values are here."""


def collect_entries(
    runtime: Runtime, entries: Sequence[AsyncEntry | AsyncRowEntry], owner: Owner, rule: UpdateRule
) -> tuple[list[SavedEntry], UpdateRule]:
    """Return the owners' values of keys, and a rule with the owners' states and counts.

    Args:
        runtime: of this process.
        entries: the keys. None of their operations is outstanding.
        owner: the store's, on this rank.
        rule: the script's.

    Raises:
        WaitTimeout: an owner does not answer.
        NetStormError: the job has failed.
    """
    keys = [(entry.key, entry.calls.pushes) for entry in entries]
    held = collect_from_owners(runtime, keys, whole=owner.rule.whole)
    saved = [
        SavedEntry(entry.user_key, _array(entry.key, one.values), entry.rounds)
        for entry, one in zip(entries, held, strict=True)
    ]
    if rule.optimizer is None:
        return saved, rule
    collected = CollectedStates()
    for entry, one in zip(entries, held, strict=True):
        collected.add(entry.user_key, entry.key.spec.shape, one.states)
    return saved, collected.rule(rule.optimizer)


def _array(key: Key, values: Array) -> NDArray:
    shape = key.spec.shape
    if key.spec.form == ROW_SPARSE:
        return filled_rows(shape, key.dtype, Rows(np.arange(shape[0]), values.reshape(shape[0], -1)))
    return mx.nd.array(values.reshape(shape), ctx=mx.cpu(), dtype=key.dtype)
