"""A round whose update is queued by another thread than the script's, when its sum has arrived.

The script's thread queues one operation, *the round*. It holds the array of the sum and the stored value from
when the gradient is there until the value has been updated, so whoever reads the value waits for the update.
When the sum has arrived, the other thread queues the optimizer's operations on aliases of the two arrays (the
same memory under other variables), which no one else uses while the round holds them. Behind them it queues
one operation that ends the rounds of all sums that came together. The rounds of one key follow one another,
and so do its updates; those of different keys come in the order of their sums.
"""

from __future__ import annotations

import logging
from typing import Final

from netstorm.errors import NetStormError
from netstorm.frontends.mxnet.arrays.staging import StagingBuffer
from netstorm.frontends.mxnet.engine.batches import Batches
from netstorm.frontends.mxnet.engine.operations import Completion, Operands, push_on
from netstorm.frontends.mxnet.updates.captured import CapturedUpdate
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule
from netstorm.kvstore.process.runtime import Runtime

__all__ = ["DeferredUpdate", "UpdatedArrays"]

_log = logging.getLogger(__name__)


class UpdatedArrays:
    """A key's two arrays and their aliases for the other thread. Keep it as long as the key lives."""

    __slots__ = ("operands", "stored", "total")

    def __init__(self, total: StagingBuffer, stored: StagingBuffer) -> None:
        self.operands: Final = Operands((), (total.array, stored.array))
        """What the round writes."""
        self.total: Final = total.alias()
        self.stored: Final = stored.alias()


class DeferredUpdate:
    """The update of one round of one key."""

    __slots__ = ("_captured", "_round", "_rule", "_runtime", "arrays", "name")

    def __init__(
        self, runtime: Runtime, rule: UpdateRule, captured: CapturedUpdate, arrays: UpdatedArrays, name: str
    ) -> None:
        """Prepare it.

        Args:
            runtime: of this process; an update that fails, fails the job.
            rule: its updater keeps the key's state.
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
        """Take the round's completion: the round has started. Called before `sum_arrived`."""
        self._round = completion

    def sum_arrived(self, error: BaseException | None) -> None:
        """Queue the update with the sum, or end the round with an error; from any thread."""
        if error is None:
            _batches.add(self)
        else:
            self.end_round(error)

    def apply(self) -> bool:
        """Queue the optimizer's operations; return whether it raised no error."""
        try:
            self._rule.apply(self._captured, self.arrays.total, self.arrays.stored)
        except Exception as error:  # noqa: BLE001 -- an optimizer may fail in any way
            _log.exception("the update of %s failed", self.name)
            self.fail(f"{type(error).__name__}: {error}")
            return False
        return True

    def fail(self, reason: str) -> None:
        """Fail the round, which whoever reads the value hears of, and the job."""
        error = NetStormError(f"the update of {self.name} failed: {reason}")
        self.end_round(error)
        self._runtime.fail(str(error))

    def end_round(self, error: BaseException | None) -> None:
        """End the round: those who wait for the value go on, or get the error."""
        assert self._round is not None
        self._round.end(error)


def _queue_updates(updates: list[DeferredUpdate]) -> None:
    """Queue updates, each of another key, and one operation that ends their rounds."""
    queued = [update for update in updates if update.apply()]

    def updated(completion: Completion) -> None:
        completion.succeed()
        for update in queued:
            update.end_round(None)

    def failed() -> None:
        names = ", ".join(update.name for update in queued)
        for update in queued:
            update.fail(f"an operation of the updates of {names} failed; mx.nd.waitall() raises the reason")

    if queued:
        written = [array for update in queued for array in (update.arrays.total, update.arrays.stored)]
        push_on(Operands((), written), updated, name="netstorm_updated", skipped=failed, silent=True)


_batches: Final = Batches(_queue_updates)
