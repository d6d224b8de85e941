"""What happens to a stored value when a sum arrives, and its fingerprint: all ranks must do the same.

Replicas stay equal because every rank runs the same rule on the same bytes. The fingerprint goes with every
round; the scheduler compares, so that a different optimiser, or a learning rate changed on one rank only, is
an error that names both and not a model that drifts apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable
from typing import Any, Final

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays.gil_calls import keeping_lock
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import NDArray
from netstorm.frontends.mxnet.updates.captured import Capture, Captured, can_be_captured
from netstorm.frontends.mxnet.updates.states import digest_of, take_up, write_atomically

__all__ = ["UpdateRule"]

_log = logging.getLogger(__name__)

_HOST: Final = mx.cpu()

_READS_VALUES: Final = ("LARS", "LBSGD")
"""Optimisers whose update waits for a value (a norm)."""

_ONLY_QUEUE: Final = frozenset(
    kind
    for kind in mx.optimizer.Optimizer.opt_registry.values()
    if kind.__module__.startswith("mxnet.") and kind.__name__ not in _READS_VALUES
)
"""Optimisers whose update never waits for anything; of a user's own class we do not know."""

_NOT_COMPARED: Final = frozenset(
    {"param_dict", "idx2name", "sym_info", "num_update", "begin_num_update", "lr", "rescale_grad"}
)
"""Attributes that may differ (names of parameters), change with every update, or are in the live part."""


class _Updater(mx.optimizer.Updater):  # type: ignore[name-defined]
    """MXNet's updater for one key at a time, which keeps Python's lock where it can (see `quick`)."""

    def __call__(self, key: int | str, total: NDArray, stored: NDArray) -> None:
        """Update `stored`, with `total`; both are private arrays."""
        self.optimizer._set_current_context(_HOST.device_id)  # noqa: SLF001 -- its updater's
        self.update_by(self.optimizer, key, total, stored)

    def update_by(self, optimizer: Any, key: int | str, total: NDArray, stored: NDArray) -> None:
        """Update by the optimiser, or by a twin of it."""
        if key not in self.states:
            self.states[key] = optimizer.create_state_multi_precision(key, stored)
            self.states_synced[key] = True
        elif not self.states_synced[key]:
            self.states[key] = self.sync_state_context(self.states[key], stored.context)
            self.states_synced[key] = True
        with keeping_lock() if type(self.optimizer) in _ONLY_QUEUE else contextlib.nullcontext():
            if self.aggregate_updates:
                optimizer.update_multi_precision((key,), (stored,), (total,), [self.states[key]])
            else:
                optimizer.update_multi_precision(key, stored, total, self.states[key])


class UpdateRule:
    """An updater and what to call it."""

    def __init__(
        self, updater: Callable[..., Any], text: str, *, has_states: bool, draws: bool = False
    ) -> None:
        self.updater: Final[Any] = updater
        self.has_states: Final = has_states
        """There is an optimiser, whose states can be saved."""
        self._draws: Final = draws
        self._text = text
        self._capture: Capture | None = None

    @classmethod
    def of_optimizer(cls, optimizer: Any) -> UpdateRule:
        """Return the rule of an `mx.optimizer.Optimizer`."""
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
        return cls(_Updater(optimizer), _fingerprint(optimizer), has_states=True, draws=draws)

    @classmethod
    def of_function(cls, updater: Any) -> UpdateRule:
        """Return the rule of a user's own function (key, sum, stored)."""
        if not callable(updater):
            raise UsageError(
                f"_set_updater takes a function (key, sum, stored), not {type(updater).__name__}"
            )
        own = getattr(updater, "__qualname__", type(updater).__qualname__)
        name = f"{getattr(updater, '__module__', '?')}.{own}"
        return cls(updater, f"updater {name}", has_states=False)

    def update(self, key: int | str, total: NDArray, stored: NDArray, *, round: str, rank: int) -> None:
        """Queue the update of `stored` with `total`, on the calling thread and at once: called later, it
        would read later learning rates.

        Args:
            round: names this round of this key, the same on all ranks.
            rank: of this node.
        """
        if not self._draws:
            self.updater(key, total, stored)
            return
        # Replicas must draw the same numbers here, and the scripts' own (a dropout's) must differ after it.
        mx.random.seed(_seed(round), ctx=_HOST)
        try:
            self.updater(key, total, stored)
        finally:
            mx.random.seed(_seed(f"{round} of rank {rank}"), ctx=_HOST)

    def capture(self, key: int | str) -> Captured | None:
        """Return an update of a key that may be queued later, by another thread, with what it is to read of
        the optimiser now; None if it must be queued at once.

        A key's first is: it makes the state, and what does not fit an optimiser shows there, in the push.
        """
        if not self.has_states or key not in self.updater.states:
            return None
        optimizer = self.updater.optimizer
        if self._capture is None or self._capture.optimizer is not optimizer:
            if not can_be_captured(optimizer):
                return None
            self._capture = Capture(optimizer)
        return self._capture.update(key)

    def apply(self, captured: Captured, total: NDArray, stored: NDArray) -> None:
        """Queue an update that has been captured. One thread at a time; a key's in order."""
        self.updater.update_by(captured.prepared(), captured.key, total, stored)

    @property
    def fixed(self) -> str:
        """The fingerprint without what scripts change between steps."""
        return self._text

    def now(self) -> str:
        """Return the fingerprint at this moment: with what scripts change between steps."""
        if not self.has_states:
            return self._text
        optimizer = self.updater.optimizer
        return f"{self._text} lr={optimizer.lr!r} rescale_grad={optimizer.rescale_grad!r}"

    def save(self, path: str, *, dump_optimizer: bool) -> None:
        """Write the states, and if asked for the optimiser, to a file in MXNet's format."""
        write_atomically(path, self.updater.get_states(dump_optimizer))

    def load(self, path: str) -> None:
        """Take up saved states, and the optimiser that was saved with them, if one was. From now on the
        fingerprint tells them, too: a rank that has loaded others, or none, is an error and not a drift.
        """
        take_up(self.updater, path)
        self._text = f"{_fingerprint(self.updater.optimizer)} from states {digest_of(self.updater.states)}"


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1  # MXNet's are of 31 bits


def _fingerprint(optimizer: Any) -> str:
    """Return what must be the same on all ranks, but for what `UpdateRule.now` adds."""
    name = type(optimizer).__name__
    details = ", ".join(
        f"{attribute}={_plain(value)}"
        for attribute, value in sorted(vars(optimizer).items())
        if not attribute.startswith("_") and attribute not in _NOT_COMPARED
    )
    _log.info("update rule: %s(%s)", name, details)
    return f"{name}#{hashlib.sha256(details.encode()).hexdigest()[:8]}"


def _plain(value: Any) -> str:
    """Return a value as text that is the same on all ranks for the same settings."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_plain(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_plain, value)) + "]"
    settings = (
        {name: inner for name, inner in vars(value).items() if not name.startswith("_")}
        if hasattr(value, "__dict__")
        else {}
    )
    return type(value).__name__ + (_plain(settings) if settings else "")
