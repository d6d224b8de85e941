"""The states of an asynchronous store's optimizer, joined from what their owners sent, to be saved."""

from __future__ import annotations

from netstorm.errors import ProtocolViolation
from netstorm.frontends.mxnet.asynchronous.owned_rule import with_counts
from netstorm.frontends.mxnet.asynchronous.owned_states import decode, joined
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.updates.states import write_atomically
from netstorm.frontends.mxnet.updates.update_rule import OptimizerUpdater, UpdateRule

__all__ = ["CollectedStates"]


class CollectedStates:
    """The states that have come so far."""

    def __init__(self) -> None:
        self._states: dict[int | str, object] = {}
        self._counts: dict[int | str, int] = {}
        self._all_updates = 0

    def add(self, key: int | str, shape: tuple[int, ...], blocks: dict[int, bytes]) -> None:
        """Add the states of all blocks of a key; nothing if the key has never been updated.

        Raises:
            ProtocolViolation: what an owner has sent is no state.
        """
        try:
            parts = [decode(blocks[block]) for block in sorted(blocks)]
            if any(part.begun for part in parts):
                self._states[key] = joined([part.state for part in parts], shape)
        except (ProtocolViolation, ValueError, TypeError) as error:
            raise ProtocolViolation(f"key {key!r}: an owner has sent as a block's state {error}") from error
        if any(part.begun for part in parts):
            self._counts[key] = max(part.updates for part in parts)
            self._all_updates = max(self._all_updates, *(part.all_updates for part in parts))

    def rule(self, optimizer: mx.optimizer.Optimizer) -> UpdateRule:
        """Return a rule that has the states, and the script's `optimizer` with the owners' counts."""
        return UpdateRule(self._updater(optimizer), "collected from owners")

    def _updater(self, optimizer: mx.optimizer.Optimizer) -> OptimizerUpdater:
        updater = OptimizerUpdater(with_counts(optimizer, self._counts, self._all_updates))
        updater.states = self._states
        return updater

    def save(self, path: str, optimizer: mx.optimizer.Optimizer, *, dump_optimizer: bool) -> None:
        """Write a file in MXNet's format. It has the script's `optimizer` with the owners' counts."""
        updater = self._updater(optimizer)
        write_atomically(path, updater.get_states(dump_optimizer))
