"""A round whose update is queued by another thread than the script's, when its sum is there.

The script's thread queues one operation, *the round*: it holds the array of the sum and the stored value
from when the gradient is there until the value has been updated, so that whoever reads the value waits for
it. When the sum has arrived the other thread queues the optimiser's operations, on aliases of the two arrays
(the same memory under other variables), which are ours alone while the round holds them, and behind them one
that ends the round; one for all rounds whose sums come together. A key's rounds follow one another, so its
updates do; those of different keys come as their sums do.
"""

from __future__ import annotations

import logging
from typing import Final

from netstorm.errors import NetStormError
from netstorm.frontends.mxnet.arrays.staging import StagingBuffer
from netstorm.frontends.mxnet.engine.batches import Batches
from netstorm.frontends.mxnet.engine.operations import Completion, Operands, push_on
from netstorm.frontends.mxnet.updates.captured import Captured
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.process.runtime import Runtime

__all__ = ["DeferredUpdate", "UpdatedArrays"]

_log: Final = logging.getLogger(__name__)


class UpdatedArrays:
    """A key's two arrays, and what the other thread knows them by. Keep it as long as the key lives."""

    __slots__ = ("operands", "stored", "total")

    def __init__(self, total: StagingBuffer, stored: StagingBuffer) -> None:
        self.operands: Final = Operands((), (total.array, stored.array))
        """Of the round."""
        self.total: Final = total.alias()
        self.stored: Final = stored.alias()


class DeferredUpdate:
    """The update of one round of one key."""

    __slots__ = ("_captured", "_round", "_rule", "_runtime", "arrays", "name")

    def __init__(
        self, runtime: Runtime, rule: UpdateRule, captured: Captured, arrays: UpdatedArrays, name: str
    ) -> None:
        """Prepare it.

        Args:
            runtime: told if it fails.
            rule: whose updater keeps the key's state.
            captured: the update, by `rule`.
            arrays: the key's.
            name: of the key, for errors.
        """
        self._runtime: Final = runtime
        self._rule: Final = rule
        self._captured: Final = captured
        self.arrays: Final = arrays
        self.name: Final = name
        self._round: Completion | None = None

    @property
    def operands(self) -> Operands:
        """What the round writes."""
        return self.arrays.operands

    def begin(self, completion: Completion) -> None:
        """Hold the round, which has been started; before `sum_arrived`."""
        self._round = completion

    def sum_arrived(self, error: BaseException | None) -> None:
        """Go on with the sum, or without one; from any thread."""
        if error is None:
            _batches.add(self)
        else:
            self.end_round(error)

    def apply(self) -> bool:
        """Queue the optimiser's operations; return whether it had nothing against it."""
        try:
            self._rule.apply(self._captured, self.arrays.total, self.arrays.stored)
        except Exception as error:  # noqa: BLE001 -- an optimiser may fail in any way
            _log.exception("the update of %s failed", self.name)
            self.give_up(f"{type(error).__name__}: {error}")
            return False
        return True

    def give_up(self, reason: str) -> None:
        """Let whoever reads the value hear of it, and all ranks."""
        error = NetStormError(f"the update of {self.name} failed: {reason}")
        self.end_round(error)
        self._runtime.fail(str(error))

    def end_round(self, error: BaseException | None) -> None:
        """Let those who wait for the value go on."""
        assert self._round is not None
        self._round.end(error)


def _queue(updates: list[DeferredUpdate]) -> None:
    """Queue updates, each of another key, and one operation that ends their rounds."""
    queued = [update for update in updates if update.apply()]

    def updated(completion: Completion) -> None:
        completion.succeed()
        for update in queued:
            update.end_round(None)

    def failed() -> None:
        names = ", ".join(update.name for update in queued)
        for update in queued:
            update.give_up(f"an operation of those of {names} did; mx.nd.waitall() raises the reason")

    if queued:
        written = [array for update in queued for array in (update.arrays.total, update.arrays.stored)]
        push_on(Operands((), written), updated, name="netstorm_updated", skipped=failed, silent=True)


_batches: Final = Batches(_queue)
