"""What happens to a stored value when a sum arrives, and its fingerprint: all ranks must do the same.

Replicas stay equal because every rank runs the same rule on the same bytes. The fingerprint goes with every
round, and the scheduler compares. So a different optimizer, or a learning rate that was changed on one rank
only, is an error that names both ranks, and not a model that drifts apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable
from typing import Final, TypeAlias

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays.gil_calls import KeepingLock
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import NDArray
from netstorm.frontends.mxnet.updates.captured import CapturedUpdate, UpdateCapture, can_be_captured
from netstorm.frontends.mxnet.updates.fingerprint import fingerprint_of
from netstorm.frontends.mxnet.updates.states import digest_of, restore_states, write_atomically

__all__ = ["OptimizerUpdater", "UpdateRule", "Updater"]

_log = logging.getLogger(__name__)

_HOST: Final = mx.cpu()

_READS_VALUES: Final = ("LARS", "LBSGD")
"""Optimizers whose update waits for a value (a norm)."""

_ONLY_QUEUE: Final = frozenset(
    kind
    for kind in mx.optimizer.Optimizer.opt_registry.values()
    if kind.__module__.startswith("mxnet.") and kind.__name__ not in _READS_VALUES
)
"""Optimizers whose update never waits for anything. Of a user's own class this is not known."""

Updater: TypeAlias = Callable[[int | str, NDArray, NDArray], object]
"""Called with key, sum and stored value; changes the stored value."""


class OptimizerUpdater(mx.optimizer.Updater):
    """MXNet's updater for one key at a time, which keeps Python's lock where it can (see `gil_calls`)."""

    def __call__(self, key: int | str, total: NDArray, stored: NDArray) -> None:
        """Update `stored` with `total`; both are staging buffers' arrays."""
        self.optimizer._set_current_context(_HOST.device_id)  # as MXNet's own updater does
        self.update_by(self.optimizer, key, total, stored)

    def update_by(
        self, optimizer: mx.optimizer.Optimizer, key: int | str, total: NDArray, stored: NDArray
    ) -> None:
        """Update by the optimizer, or by a copy of it."""
        if key not in self.states:
            self.states[key] = optimizer.create_state_multi_precision(key, stored)
            self.states_synced[key] = True
        elif not self.states_synced[key]:
            self.states[key] = self.sync_state_context(self.states[key], stored.context)
            self.states_synced[key] = True
        with KeepingLock() if type(self.optimizer) in _ONLY_QUEUE else contextlib.nullcontext():
            if self.aggregate_updates:
                optimizer.update_multi_precision((key,), (stored,), (total,), [self.states[key]])
            else:
                optimizer.update_multi_precision(key, stored, total, self.states[key])


class UpdateRule:
    """An updater and how to call it."""

    def __init__(self, updater: Updater, text: str, *, draws: bool = False) -> None:
        self.updater: Final = updater
        self.of_states: Final = updater if isinstance(updater, OptimizerUpdater) else None
        """The updater, if it has an optimizer, whose states can be saved."""
        self.origin = ""
        """Where its states come from, if not from updates alone: part of the fingerprint."""
        self._draws: Final = draws
        self._text = text
        self._capture: UpdateCapture | None = None

    @classmethod
    def of_optimizer(cls, optimizer: object) -> UpdateRule:
        """Return the rule of an `mx.optimizer.Optimizer`.

        Raises:
            UsageError: it is something else.
        """
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise UsageError(f"set_optimizer takes an mxnet Optimizer, not {type(optimizer).__name__}")
        name = type(optimizer).__name__
        if name in _READS_VALUES:
            _log.warning(
                "%s reads values in its update, so each key waits for its own round trip: "
                "with gluon.Trainer set update_on_kvstore=False, and all keys travel together",
                name,
            )
        draws = isinstance(optimizer, mx.optimizer.SGLD)  # MXNet's only one that does
        return cls(OptimizerUpdater(optimizer), fingerprint_of(optimizer), draws=draws)

    @classmethod
    def of_function(cls, updater: object) -> UpdateRule:
        """Return the rule of a user's own function (key, sum, stored).

        Raises:
            UsageError: it is no function.
        """
        if not callable(updater):
            raise UsageError(
                f"_set_updater takes a function (key, sum, stored), not {type(updater).__name__}"
            )
        own = getattr(updater, "__qualname__", type(updater).__qualname__)
        return cls(updater, f"updater {getattr(updater, '__module__', '?')}.{own}")

    @property
    def optimizer(self) -> mx.optimizer.Optimizer | None:
        """The optimizer; None if the rule is a user's own function."""
        return None if self.of_states is None else self.of_states.optimizer

    def update(self, key: int | str, total: NDArray, stored: NDArray, *, round: str, rank: int) -> None:
        """Queue the update of `stored` with `total`, at once and on the calling thread.

        Called later, it would read later learning rates.

        Args:
            key: the user's.
            total: the sum.
            stored: the value.
            round: names this round of this key, the same on all ranks.
            rank: of this node.
        """
        if not self._draws:
            self.updater(key, total, stored)
            return
        # Replicas must draw the same numbers here. The script's own draws (a dropout's) must differ after it.
        mx.random.seed(_seed(round), ctx=_HOST)
        try:
            self.updater(key, total, stored)
        finally:
            mx.random.seed(_seed(f"{round} of rank {rank}"), ctx=_HOST)

    def capture(self, key: int | str) -> CapturedUpdate | None:
        """Return an update of a key that another thread may queue later, with what it reads of the optimizer
        now; None if it must be queued at once.

        A key's first update is queued at once: it makes the state, and if the array does not suit the
        optimizer, the push raises that error.
        """
        updater = self.of_states
        if updater is None or key not in updater.states:
            return None
        optimizer = updater.optimizer
        if self._capture is None or self._capture.optimizer is not optimizer:
            if not can_be_captured(optimizer):
                return None
            self._capture = UpdateCapture(optimizer)
        return self._capture.update(key)

    def apply(self, captured: CapturedUpdate, total: NDArray, stored: NDArray) -> None:
        """Queue a captured update. One thread at a time; the updates of a key in their order."""
        assert self.of_states is not None
        self.of_states.update_by(captured.prepared_optimizer(), captured.key, total, stored)

    @property
    def fixed_fingerprint(self) -> str:
        """The fingerprint without what scripts change between steps."""
        return self._text

    def fingerprint(self) -> str:
        """Return the fingerprint at this moment, with what scripts change between steps."""
        if self.of_states is None:
            return self._text
        optimizer = self.of_states.optimizer
        return f"{self._text} lr={optimizer.lr!r} rescale_grad={optimizer.rescale_grad!r}"

    def save(self, path: str, *, dump_optimizer: bool) -> None:
        """Write the states, and the optimizer if asked for, to a file in MXNet's format."""
        assert self.of_states is not None
        write_atomically(path, self.of_states.get_states(dump_optimizer))

    def load(self, path: str) -> None:
        """Restore saved states, and the optimizer that was saved with them, if one was.

        From now on the states are in the fingerprint, too. A rank that has loaded others, or none, is then an
        error and not a model that drifts apart.
        """
        updater = self.of_states
        assert updater is not None
        restore_states(updater, path)
        self._set_origin(f"states {digest_of(updater.states)}")

    def restore(self, states: dict[int | str, object], origin: str) -> None:
        """Take over states, which `origin` names for the fingerprint: other ranks must have the same. Empty:
        they come from updates alone.
        """
        updater = self.of_states
        assert updater is not None
        updater.states = states
        updater.states_synced = dict.fromkeys(states, False)
        self._set_origin(origin)

    def _set_origin(self, origin: str) -> None:
        assert self.of_states is not None
        self.origin = origin
        fingerprint = fingerprint_of(self.of_states.optimizer)
        self._text = f"{fingerprint} from {origin}" if origin else fingerprint


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1  # MXNet's have 31 bits
