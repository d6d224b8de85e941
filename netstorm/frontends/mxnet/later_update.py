"""A round whose update is queued by another thread than the script's.

The script's thread queues one operation, *the round*: it holds the array of the sum and the stored value from
when the gradient is there until the value has been updated, so that whoever reads the value waits for it. The
other thread queues three, on aliases of the two arrays (the same memory under other variables), which are
ours alone while the round holds them:

1. one that ends when the sum has arrived,
2. the optimiser's own,
3. one that ends the round.

They are queued in the order of the script's calls, before or after the sum arrives; the engine does the rest.
"""

from __future__ import annotations

import logging
from typing import Final

from netstorm.errors import NetStormError
from netstorm.frontends.mxnet.captured import Captured
from netstorm.frontends.mxnet.engine import Completion, Operands, push_on
from netstorm.frontends.mxnet.private import PrivateArray
from netstorm.frontends.mxnet.update_rule import UpdateRule
from netstorm.kvstore.runtime import Runtime

__all__ = ["LaterUpdate", "UpdatedArrays"]

_log: Final = logging.getLogger(__name__)


class UpdatedArrays:
    """A key's two arrays, and what the other thread knows them by. Keep it as long as the key lives."""

    __slots__ = ("aliases", "operands", "stored", "total")

    def __init__(self, total: PrivateArray, stored: PrivateArray) -> None:
        self.operands: Final = Operands((), (total.array, stored.array))
        """Of the round."""
        self.total: Final = total.alias()
        self.stored: Final = stored.alias()
        self.aliases: Final = Operands((), (self.total, self.stored))


class LaterUpdate:
    """The update of one round of one key. Its methods are called by the threads that they name."""

    __slots__ = (
        "_arrays",
        "_arrived",
        "_captured",
        "_error",
        "_name",
        "_round",
        "_rule",
        "_runtime",
        "_sum",
    )

    def __init__(
        self, runtime: Runtime, rule: UpdateRule, captured: Captured, arrays: UpdatedArrays, name: str
    ) -> None:
        """Prepare it.

        Args:
            runtime: told if it fails.
            rule: whose updater keeps the key's state.
            captured: the update, by `rule`.
            arrays: the key's.
            name: of the round, for errors.
        """
        self._runtime: Final = runtime
        self._rule: Final = rule
        self._captured: Final = captured
        self._arrays: Final = arrays
        self._name: Final = name
        self._round: Completion | None = None
        self._sum: Completion | None = None
        self._arrived = False
        self._error: BaseException | None = None

    @property
    def operands(self) -> Operands:
        """What the round writes."""
        return self._arrays.operands

    def begin(self, completion: Completion) -> None:
        """The round has been started (a thread of the engine)."""
        self._round = completion
        if self._error is not None:
            completion.fail(self._error)

    def sum_arrived(self, error: BaseException | None) -> None:
        """Its sum is complete, or never will be (the I/O thread)."""
        if error is not None and self._round is not None:
            self._round.fail(error)
        self.release()

    def release(self) -> None:
        """Wait for the sum no more (any thread): it is there, or the round has ended without it."""
        self._arrived = True
        if self._sum is not None:
            self._sum.succeed()

    def give_up(self, error: BaseException) -> None:
        """Let whoever reads the value raise an error (any thread)."""
        self._error = error
        if self._round is not None:
            self._round.fail(error)
        self._runtime.fail(str(error))

    def queue(self) -> None:
        """Queue the update's operations (the other thread)."""
        arrays = self._arrays
        push_on(arrays.aliases, self._wait_for_sum, name="netstorm_sum", silent=True)
        try:
            self._rule.apply(self._captured, arrays.total, arrays.stored)
        except Exception as error:  # noqa: BLE001 -- an optimiser may fail in any way
            _log.exception("%s: the update failed", self._name)
            self.give_up(NetStormError(f"the update of {self._name} failed: {type(error).__name__}: {error}"))
        push_on(arrays.aliases, self._end, name="netstorm_updated", skipped=self._failed, silent=True)

    def _wait_for_sum(self, completion: Completion) -> None:
        self._sum = completion
        if self._arrived:
            completion.succeed()

    def _end(self, completion: Completion) -> None:
        completion.succeed()
        if self._round is not None:
            self._round.end(self._error)

    def _failed(self) -> None:
        self.give_up(
            NetStormError(f"the update of {self._name} failed in MXNet; mx.nd.waitall() raises the reason")
        )
