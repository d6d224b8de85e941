"""The update rule of a rank that owns blocks: MXNet's optimizer, applied to one block at a time.

It uses a copy of the script's optimizer. The script may set its own to another learning rate at any time,
while a gradient belongs to the rate of the rank that pushed it. So what scripts change between steps
(learning rate, gradient scale) is sent with each push, and the rest is compared.
"""

from __future__ import annotations

import copy
from typing import Final, NamedTuple

from netstorm.errors import ProtocolViolation, UsageError
from netstorm.frontends.mxnet.asynchronous.delay_compensation import compensated_update
from netstorm.frontends.mxnet.asynchronous.owned_states import (
    BlockState,
    decode,
    encode,
    joined,
    part_of,
    problem_of,
)
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import NDArray
from netstorm.frontends.mxnet.updates.update_rule import UpdateRule

__all__ = ["BlockPlace", "OwnedRule", "with_counts"]

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
"""Optimizers that treat each element alone, so that a key may be updated in parts. LARS, LBSGD and LAMB take
norms, GroupAdaGrad needs whole rows, and Nadam counts the updates of all keys. What a user's own class does
is not known.
"""

_LIVE: Final = ("lr", "rescale_grad")
"""What scripts change between steps."""

_SHARED: Final = ("param_dict", "lr_mult", "wd_mult", "idx2name")
"""What Trainer and Module may set later. It is only read here."""


class BlockPlace(NamedTuple):
    """The place of a block in its key."""

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
        fingerprint: of the rule; all ranks must have the same.
        whole: it needs whole tensors.
        compensates: it asks on which value a gradient was computed: call `update_compensated`.
    """

    def __init__(self, rule: UpdateRule, *, elastic: bool = False) -> None:
        """Make it of the rule that the script has set. In an elastic job ranks that join later have loaded no
        states, so where these come from is not compared.
        """
        origin = f" from {rule.origin}" if elastic else ""
        self.fingerprint: Final = rule.fixed_fingerprint.removesuffix(origin)
        self._updater: Final = rule.updater
        self._script: Final = rule.optimizer
        """The script's optimizer; None: the rule is a function."""
        self.whole: Final = type(self._script) not in _BY_ELEMENT
        self.compensates: Final = type(self._script) is mx.optimizer.DCASGD
        self._own: Final = None if self._script is None else _copy(self._script)
        self._states: dict[tuple[int | str, int], object] = {}
        self._loaded: Final[dict[int | str, object]] = dict(rule.of_states.states) if rule.of_states else {}
        """The states of whole keys that a file had."""
        self._counts: Final[dict[int | str, int]] = dict(
            self._script._all_index_update_counts.get(0, {}) if self._script else {}
        )
        """Updates before this job's, by key."""
        if self._own is not None:
            self._own._all_index_update_counts = {}

    @property
    def begins_with_states(self) -> bool:
        """Whether there are states or counts of an earlier job."""
        return bool(self._loaded or self._counts)

    def live(self) -> tuple[float, ...]:
        """Return what the script has set at this moment: learning rate and gradient scale."""
        return tuple(float(getattr(self._script, name)) for name in _LIVE) if self._script else ()

    def update(self, place: BlockPlace, gradient: NDArray, stored: NDArray, live: tuple[float, ...]) -> None:
        """Queue the update of a block. `live` is what the script of the pushing rank had set."""
        key = place.key
        if self._own is None:
            self._updater(key, gradient, stored)
            return
        own = self._own
        state = self._prepare(own, place, stored, live)
        if own.aggregate_num > 0:
            own.update_multi_precision((key,), (stored,), (gradient,), [state])
        else:
            own.update_multi_precision(key, stored, gradient, state)

    def update_compensated(
        self, place: BlockPlace, gradient: NDArray, stored: NDArray, live: tuple[float, ...], base: NDArray
    ) -> None:
        """Queue the update of a block with a gradient that was computed on the value `base`."""
        own = self._own
        assert own is not None
        state = self._prepare(own, place, stored, live)
        compensated_update(own, place.key, stored, gradient, state, base=base)

    def _prepare(
        self, own: mx.optimizer.Optimizer, place: BlockPlace, stored: NDArray, live: tuple[float, ...]
    ) -> object:
        """Set the optimizer to what the pushing rank had set; return the block's state."""
        if len(live) != len(_LIVE):
            raise UsageError(f"a push of {place.key!r} came with {live}; expected {' and '.join(_LIVE)}")
        for name, value in zip(_LIVE, live, strict=True):
            setattr(own, name, value)
        for name in _SHARED:
            setattr(own, name, getattr(self._script, name))
        return self._state(own, place, stored)

    def encoded_state(self, place: BlockPlace, stored: NDArray) -> bytes:
        """Return the encoded `BlockState` of a block; waits until it has been computed. Nothing is known of
        the state of a function.
        """
        own = self._own
        if own is None:
            return b""
        begun = (place.key, place.block) in self._states or place.key in self._loaded
        state = self._state(own, place, stored)
        if not begun:
            del self._states[place.key, place.block]  # whoever asks next gets the same answer
        updates = own._index_update_count.get(place.key, 0)
        return encode(BlockState.of(state, begun=begun, updates=updates, all_updates=own.num_update))

    def problem_of(self, place: BlockPlace, like: NDArray, encoded: bytes) -> str:
        """Return why `take_state` could not take these bytes, for a person; empty: it can.

        Args:
            place: of the block.
            like: an array of the block's shape and type.
            encoded: as another rank has sent it.
        """
        own = self._own
        if own is None:
            return f"{len(encoded)} bytes: expected none of {self.fingerprint}" if encoded else ""
        try:
            found = decode(encoded)
        except ProtocolViolation as error:
            return str(error)
        if not found.begun:
            return ""
        problem = problem_of(found.state, own.create_state_multi_precision(place.key, like))
        if problem and place.key in self._loaded and not problem_of(found.state, self._begun(place, like)):
            return ""
        return f"{problem} of {self.fingerprint}" if problem else ""

    def take_state(self, place: BlockPlace, stored: NDArray, encoded: bytes) -> None:
        """Go on with a block from what another rank's `encoded_state` has given; empty: from its begin."""
        own = self._own
        if own is None:
            return
        self.drop_state(place)
        if encoded:
            found = decode(encoded)
            self._counts_of(own, place.block)[place.key] = found.updates
            own.num_update = max(own.num_update, found.all_updates)
            if found.begun:
                self._states[place.key, place.block] = joined([found.state], tuple(stored.shape))

    def drop_state(self, place: BlockPlace) -> None:
        """Forget a block's state, and its count of updates."""
        self._states.pop((place.key, place.block), None)
        if self._own is not None:
            counts = self._counts_of(self._own, place.block)
            counts.pop(place.key, None)
            if place.key in self._counts:
                counts[place.key] = self._counts[place.key]

    def _counts_of(self, own: mx.optimizer.Optimizer, block: int) -> dict[int | str, int]:
        """Return the counts of updates of the blocks with a number, by key."""
        # MXNet counts updates by device, since several devices may update a key. Here a block is a "device".
        found: dict[int | str, int] = own._all_index_update_counts.setdefault(block, dict(self._counts))
        return found

    def _state(self, own: mx.optimizer.Optimizer, place: BlockPlace, stored: NDArray) -> object:
        """Return a block's state, and have the optimizer count this block's updates from here on."""
        key, block = place.key, place.block
        self._counts_of(own, block)
        own._set_current_context(block)
        if (key, block) not in self._states:
            in_file = key in self._loaded
            self._states[key, block] = (
                self._begun(place, stored) if in_file else own.create_state_multi_precision(key, stored)
            )
        return self._states[key, block]

    def _begun(self, place: BlockPlace, stored: NDArray) -> object:
        """Return a block's part of the state that a file had of its key."""
        return part_of(self._loaded[place.key], str(place.key), place.shape, place.start, tuple(stored.shape))


def with_counts(
    optimizer: mx.optimizer.Optimizer, counts: dict[int | str, int], all_updates: int
) -> mx.optimizer.Optimizer:
    """Return a copy of an optimizer with other counts of updates, by key, for a file in MXNet's format."""
    own = _copy(optimizer)
    own._index_update_count.update(counts)
    own.num_update = all_updates
    return own


def _copy(optimizer: mx.optimizer.Optimizer) -> mx.optimizer.Optimizer:
    """Return a copy of an optimizer that has counts of its own."""
    own = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if isinstance(value, dict) and name not in _SHARED:
            setattr(own, name, dict(value))
    own.lr_scheduler = copy.deepcopy(optimizer.lr_scheduler)
    own._all_index_update_counts = {0: {}}  # there is no other way to begin anew
    own._index_update_count = own._all_index_update_counts[0]
    return own
