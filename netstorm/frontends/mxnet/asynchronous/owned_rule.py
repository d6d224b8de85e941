"""The update rule of a rank that owns blocks: MXNet's optimiser, applied to one block at a time.

It is a copy of the script's own optimiser, since several hands would spoil one: the script's may be set to
another learning rate at any time, while a gradient belongs to the rate that its rank had. So what scripts
change between steps (learning rate, gradient scale) travels with each push, and the rest is compared.
"""

from __future__ import annotations

import copy
from typing import Any, Final, NamedTuple

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.asynchronous.owned_states import Kept, encode, part_of
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import NDArray
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule

__all__ = ["OwnedRule", "Place", "with_counts"]

_BY_ELEMENT: Final = frozenset(
    getattr(mx.optimizer, name)
    for name in (
        "SGD",
        "Signum",
        "FTML",
        "DCASGD",
        "NAG",
        "SGLD",
        "ccSGD",
        "Adam",
        "AdaGrad",
        "RMSProp",
        "AdaDelta",
        "Ftrl",
        "Adamax",
    )
)
"""Optimisers that treat each element alone, so that a key may be updated in parts. LARS, LBSGD and LAMB take
norms, GroupAdaGrad looks at rows, and Nadam counts all updates of all keys; of a user's own class we do not
know.
"""

_LIVE: Final = ("lr", "rescale_grad")
"""What scripts change between steps."""

_SHARED: Final = ("param_dict", "lr_mult", "wd_mult", "idx2name")
"""What Trainer and Module may set later, and only ever read here."""


class Place(NamedTuple):
    """Which block of which key."""

    key: int | str
    """The user's."""
    block: int
    shape: tuple[int, ...]
    """Of the key."""
    start: int
    """The block's first element."""


class OwnedRule:
    """What happens to a block when a gradient arrives.

    Attributes:
        text: its fingerprint; all ranks must have the same.
        whole: it needs whole tensors.
    """

    def __init__(self, rule: UpdateRule) -> None:
        """Take the rule that the script has set."""
        self.text: Final = rule.fixed
        self._function: Final[Any] = None if rule.has_states else rule.updater
        self._script: Final[Any] = rule.updater.optimizer if rule.has_states else None
        self.whole: Final = type(self._script) not in _BY_ELEMENT
        self._own: Final[Any] = None if self._script is None else _copy(self._script)
        self._states: dict[tuple[int | str, int], Any] = {}
        self._begun: Final[dict[int | str, Any]] = dict(rule.updater.states) if rule.has_states else {}
        """Loaded from a file: of whole keys."""
        self._counts: Final[dict[int | str, int]] = dict(
            self._script._all_index_update_counts.get(0, {}) if self._script else {}  # noqa: SLF001 -- see _copy
        )
        """Updates before this job's, by key."""
        if self._own is not None:
            self._own._all_index_update_counts = {}  # noqa: SLF001 -- see _copy
        if self._own is not None:
            self._own._all_index_update_counts = {}  # noqa: SLF001 -- see _copy

    def live(self) -> tuple[float, ...]:
        """Return what the script has set at this moment."""
        return tuple(float(getattr(self._script, name)) for name in _LIVE) if self._script else ()

    def update(self, place: Place, gradient: NDArray, stored: NDArray, live: tuple[float, ...]) -> None:
        """Queue the update of a block, under what the pushing rank's script had set."""
        key = place.key
        if self._own is None:
            self._function(key, gradient, stored)
            return
        own = self._own
        if len(live) != len(_LIVE):
            raise UsageError(f"a push of {key!r} came with {live}; expected {' and '.join(_LIVE)}")
        for name, value in zip(_LIVE, live, strict=True):
            setattr(own, name, value)
        for name in _SHARED:
            setattr(own, name, getattr(self._script, name))
        state = self._state(place, stored)
        if own.aggregate_num > 0:
            own.update_multi_precision((key,), (stored,), (gradient,), [state])
        else:
            own.update_multi_precision(key, stored, gradient, state)

    def kept(self, place: Place, stored: NDArray) -> bytes:
        """Return what is kept of a block; waits until it has been computed."""
        begun = (place.key, place.block) in self._states or place.key in self._begun
        state, own = self._state(place, stored), self._own
        updates = own._index_update_count.get(place.key, 0)  # noqa: SLF001 -- see _copy
        return encode(Kept.of(state, begun=begun, updates=updates, all_updates=own.num_update))

    def _state(self, place: Place, stored: NDArray) -> Any:
        """Return a block's state, and let the optimiser count its updates."""
        own, key, block = self._own, place.key, place.block
        # MXNet counts updates by device, for keys that several devices update; blocks of one key are alike.
        own._all_index_update_counts.setdefault(block, dict(self._counts))  # noqa: SLF001 -- see _copy
        own._set_current_context(block)  # noqa: SLF001 -- its updater's
        if (key, block) not in self._states:
            if key in self._begun:
                found = part_of(self._begun[key], str(key), place.shape, place.start, tuple(stored.shape))
            else:
                found = own.create_state_multi_precision(key, stored)
            self._states[key, block] = found
        return self._states[key, block]


def with_counts(optimizer: Any, counts: dict[int | str, int], all_updates: int) -> Any:
    """Return a copy of an optimiser that goes on after so many updates, by key, as MXNet's own saves it."""
    own = _copy(optimizer)
    own._index_update_count.update(counts)  # noqa: SLF001 -- see _copy
    own.num_update = all_updates
    return own


def _copy(optimizer: Any) -> Any:
    """Return an optimiser that updates like this one and counts for itself."""
    own = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if isinstance(value, dict) and name not in _SHARED:
            setattr(own, name, dict(value))
    own.lr_scheduler = copy.deepcopy(optimizer.lr_scheduler)
    own._all_index_update_counts = {0: {}}  # noqa: SLF001 -- there is no other way to begin anew
    own._index_update_count = own._all_index_update_counts[0]  # noqa: SLF001
    return own
