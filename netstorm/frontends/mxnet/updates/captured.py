"""An optimizer's update in two halves: reading the optimizer now, and queueing the operations later.

On the script's thread we count the update, read the learning rate and the weight decay, and check whether a
hyper-parameter has changed since the last update: 2 us. Queueing the operations takes twenty times as long.
Another thread does that, with a copy of the optimizer that has the values that were read. So a learning rate
that is changed after a push counts from the next push on, as if the update had been queued at once.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Final, NamedTuple

from netstorm.frontends.mxnet.compat import mx

__all__ = ["CapturedUpdate", "UpdateCapture", "can_be_captured"]

_WAITS_OR_KEEPS: Final = ("LARS", "LBSGD", "DCASGD", "Nadam", "SGLD", "Test")
"""Optimizers whose update waits for a value (the first three), changes the optimizer, draws random numbers
or is not counted."""

_TYPES: Final = frozenset(
    kind
    for kind in mx.optimizer.Optimizer.opt_registry.values()
    if kind.__module__.startswith("mxnet.") and kind.__name__ not in _WAITS_OR_KEEPS
)
"""What the update of a user's own class does is not known."""

_READ_BY_METHODS: Final = frozenset(
    {
        "lr",
        "lr_mult",
        "lr_scheduler",
        "wd",
        "wd_mult",
        "param_dict",
        "idx2name",
        "sym_info",
        "begin_num_update",
        "num_update",
        "_index_update_count",
        "_all_index_update_counts",
    }
)
"""Attributes that only determine the learning rate, the weight decay and the number of updates."""


def can_be_captured(optimizer: mx.optimizer.Optimizer) -> bool:
    """Return whether an optimizer's update may be queued later, by another thread."""
    return type(optimizer) in _TYPES


class CapturedUpdate(NamedTuple):
    """One update of one key: the copy of the optimizer that makes it, and the values that it uses."""

    optimizer_copy: _OptimizerCopy
    key: int | str
    learning_rates: list[float]
    weight_decays: list[float]
    updates: int
    """Number of updates of this key, with this one."""
    others: dict[str, object]
    """The other hyper-parameters; the same object as long as none changes."""

    def prepared_optimizer(self) -> mx.optimizer.Optimizer:
        """Return the copy with these values. One thread calls this, and uses it before the next call."""
        self.optimizer_copy.load(self)
        return self.optimizer_copy


class UpdateCapture:
    """Captures the updates of one optimizer, on the script's thread."""

    __slots__ = ("_copy", "_last_values", "_names", "_others", "_read", "optimizer")

    def __init__(self, optimizer: mx.optimizer.Optimizer) -> None:
        self.optimizer: Final = optimizer
        self._copy: Final = _copy_of(optimizer)
        self._names: Final = sorted(vars(optimizer).keys() - _READ_BY_METHODS)
        self._read: Final = operator.attrgetter(*self._names)
        self._last_values: object = ()
        self._others: dict[str, object] = {}

    def update(self, key: int | str) -> CapturedUpdate:
        """Count an update of a key, and return it with the values that it is to use."""
        optimizer = self.optimizer
        optimizer._set_current_context(0)  # the calls of MXNet's own updater, all four
        optimizer._update_count(key)
        values = self._read(optimizer)
        if values != self._last_values:
            self._last_values, self._others = values, dict(zip(self._names, values, strict=True))
        return CapturedUpdate(
            self._copy,
            key,
            optimizer._get_lrs((key,)),
            optimizer._get_wds((key,)),
            optimizer._index_update_count[key],
            self._others,
        )


class _OptimizerCopy(mx.optimizer.Optimizer):
    """Base of the copies: the methods that would count and look up return what was captured."""

    _others: dict[str, object] | None = None

    def load(self, captured: CapturedUpdate) -> None:
        """Take over the values that the next update is to use."""
        if captured.others is not self._others:
            self._others = captured.others
            vars(self).update(captured.others)
        self._learning_rates, self._weight_decays = captured.learning_rates, captured.weight_decays
        self._index_update_count = {captured.key: captured.updates}

    def _update_count(self, index: int | str) -> None:
        """It has been counted."""

    def _get_lrs(self, indices: Sequence[int | str]) -> list[float]:
        return self._learning_rates

    def _get_wds(self, indices: Sequence[int | str]) -> list[float]:
        return self._weight_decays


def _copy_of(optimizer: mx.optimizer.Optimizer) -> _OptimizerCopy:
    kind = type(optimizer)
    made = copy.copy(optimizer)
    made.__class__ = type(kind.__name__, (_OptimizerCopy, kind), {})
    assert isinstance(made, _OptimizerCopy)
    return made
