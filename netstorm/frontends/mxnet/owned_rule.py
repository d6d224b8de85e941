"""The update rule of a rank that owns blocks: MXNet's optimiser, applied to one block at a time.

It is a copy of the script's own optimiser, since several hands would spoil one: the script's may be set to
another learning rate at any time, while a gradient belongs to the rate that its rank had. So what scripts
change between steps (learning rate, gradient scale) travels with each push, and the rest is compared.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine_binding import NDArray
from netstorm.frontends.mxnet.update_rule import UpdateRule

__all__ = ["OwnedRule"]

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

    def live(self) -> tuple[float, ...]:
        """Return what the script has set at this moment."""
        return tuple(float(getattr(self._script, name)) for name in _LIVE) if self._script else ()

    def update(
        self, key: int | str, block: int, gradient: NDArray, stored: NDArray, live: tuple[float, ...]
    ) -> None:
        """Queue the update of a block, under what the pushing rank's script had set."""
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
        # MXNet counts updates by device, for keys that several devices update; blocks of one key are alike.
        own._set_current_context(block)  # noqa: SLF001 -- its updater's
        if (key, block) not in self._states:
            self._states[key, block] = own.create_state_multi_precision(key, stored)
        state = self._states[key, block]
        if own.aggregate_num > 0:
            own.update_multi_precision((key,), (stored,), (gradient,), [state])
        else:
            own.update_multi_precision(key, stored, gradient, state)


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
