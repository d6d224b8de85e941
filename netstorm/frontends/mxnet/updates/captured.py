"""An optimiser's update in two halves: what it reads of the optimiser now, and the operations, later.

The script's thread counts the update, asks for learning rate and weight decay and looks whether a
hyper-parameter has been changed since the last time: 2 us. To queue the operations takes twenty times as
long, and is done by another thread, with a twin of the optimiser that has what was read. So a learning rate
that is changed after a push counts from the next push on, as if the update had been queued at once.
"""

from __future__ import annotations

import copy
import operator
from typing import Any, Final, NamedTuple

from netstorm.frontends.mxnet.compat import mx

__all__ = ["Capture", "Captured", "can_be_captured"]

_WAITS_OR_KEEPS: Final = ("LARS", "LBSGD", "DCASGD", "Nadam", "SGLD", "Test")
"""Optimisers whose update waits for a value (the first three), changes the optimiser, draws random numbers
or is not counted."""

_TYPES: Final = frozenset(
    kind
    for kind in mx.optimizer.Optimizer.opt_registry.values()
    if kind.__module__.startswith("mxnet.") and kind.__name__ not in _WAITS_OR_KEEPS
)
"""Of a user's own class we do not know what its update does."""

_ASKED_FOR: Final = frozenset(
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
"""Attributes that only tell the learning rate, the weight decay and the number of updates."""


def can_be_captured(optimizer: Any) -> bool:
    """Return whether an optimiser's update may be queued later, and by another thread."""
    return type(optimizer) in _TYPES


class Captured(NamedTuple):
    """One update of one key: the twin that makes it, and what it is to use."""

    twin: Any
    key: int | str
    learning_rates: list[float]
    weight_decays: list[float]
    updates: int
    """Of this key, with this one."""
    others: dict[str, Any]
    """The other hyper-parameters; one object as long as none changes."""

    def prepared(self) -> Any:
        """Return the twin, with all this. One thread at a time, which uses it before the next."""
        self.twin.use(self)
        return self.twin


class Capture:
    """Captures the updates of one optimiser, on the script's thread."""

    __slots__ = ("_look", "_names", "_others", "_seen", "_twin", "optimizer")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer: Final = optimizer
        self._twin: Final = _twin_of(optimizer)
        self._names: Final = sorted(vars(optimizer).keys() - _ASKED_FOR)
        self._look: Final = operator.attrgetter(*self._names)
        self._seen: tuple[Any, ...] = ()
        self._others: dict[str, Any] = {}

    def update(self, key: int | str) -> Captured:
        """Count an update of a key, and return what it is to use."""
        optimizer = self.optimizer
        optimizer._set_current_context(0)  # noqa: SLF001 -- its updater's, all four
        optimizer._update_count(key)  # noqa: SLF001
        seen = self._look(optimizer)
        if seen != self._seen:
            self._seen, self._others = seen, dict(zip(self._names, seen, strict=True))
        return Captured(
            self._twin,
            key,
            optimizer._get_lrs((key,)),  # noqa: SLF001
            optimizer._get_wds((key,)),  # noqa: SLF001
            optimizer._index_update_count[key],  # noqa: SLF001
            self._others,
        )


class _Twin:
    """What a twin has instead of an optimiser's own."""

    _others: dict[str, Any] | None = None

    def use(self, captured: Captured) -> None:
        """Take what the next update is to use."""
        if captured.others is not self._others:
            self._others = captured.others
            vars(self).update(captured.others)
        self._learning_rates, self._weight_decays = captured.learning_rates, captured.weight_decays
        self._index_update_count = {captured.key: captured.updates}

    def _update_count(self, _index: Any) -> None:
        """It has been counted."""

    def _get_lrs(self, _indices: Any) -> list[float]:
        return self._learning_rates

    def _get_wds(self, _indices: Any) -> list[float]:
        return self._weight_decays


def _twin_of(optimizer: Any) -> Any:
    kind = type(optimizer)
    twin = copy.copy(optimizer)
    twin.__class__ = type(kind.__name__, (_Twin, kind), {})
    return twin
