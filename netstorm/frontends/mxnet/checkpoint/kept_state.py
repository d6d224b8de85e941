"""Values and states that a store takes over, at once or when keys are initialised later.

They come from a checkpoint, or, in an elastic job that this node has joined later, from the other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from netstorm.errors import CheckpointError
from netstorm.frontends.mxnet.checkpoint.array_bytes import from_tree
from netstorm.frontends.mxnet.checkpoint.optimizer_values import optimizer_values, restore_optimizer_values
from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine import NDArray
from netstorm.frontends.mxnet.updates import CalledUpdater

__all__ = ["KeptEntry", "KeptState", "SavedEntry", "state_of_store"]

_log = logging.getLogger(__name__)


class SavedEntry(Protocol):
    """One key of a store as a checkpoint saves it."""

    @property
    def user_key(self) -> int | str:
        """The user's key."""

    @property
    def value(self) -> NDArray:
        """The value, as it is after all that was pushed before; not to be changed."""

    @property
    def residual(self) -> dict[str, NDArray] | None:
        """What gradient compression keeps of the key, by name; None: nothing."""

    @property
    def rounds(self) -> int:
        """The number of the last round, counted on from a checkpoint."""

    def wait_for_updates(self) -> None:
        """Wait until all updates are queued."""


class KeptEntry(SavedEntry, Protocol):
    """One key of a store."""

    def restore(self, value: NDArray | None, residual: dict[str, NDArray] | None, rounds: int) -> None:
        """Replace the value (None: leave it), the residual and the number of the last round."""


def state_of_store(
    entries: Sequence[SavedEntry],
    rule: CalledUpdater | None,
    extra: object,
    *,
    tree: Callable[[object], object],
) -> dict[str, Any]:
    """Return what a store keeps, as a tree.

    Args:
        entries: its keys.
        rule: its updates; None: the sum replaces the value.
        extra: the script's.
        tree: makes trees of dense arrays of arrays, and of tuples and lists of them.
    """
    states = None if rule is None else rule.of_states
    return {
        "keys": {entry.user_key: tree(entry.value) for entry in entries},
        "optimizer": None if states is None else optimizer_values(states.optimizer),
        "states": {} if states is None else {key: tree(state) for key, state in states.states.items()},
        "extra": extra,
    }


class KeptState:
    """What a store takes over."""

    def __init__(
        self,
        state: object,
        *,
        source: str,
        token: str,
        rounds: Mapping[str, int],
        residuals: Mapping[int | str, Any] | None = None,
        with_states: bool = True,
        partial: bool = False,
    ) -> None:
        """Keep a state until it is asked for.

        Args:
            state: a tree with the members `keys`, `optimizer`, `states` and `extra`.
            source: where it comes from, for messages.
            token: names it; all ranks that take it over have the same.
            rounds: the number of each key's last round, by name.
            residuals: what gradient compression has kept, by key.
            with_states: whether the optimizer gets its states.
            partial: the store may have keys that are not here.

        Raises:
            CheckpointError: it is no state of a store.
        """
        if not isinstance(state, dict) or not isinstance(state.get("keys"), dict):
            raise CheckpointError(f"{source} holds no keys of a store")
        self._source: Final = source
        self._rounds: Final = rounds
        self._keys: Final[dict[int | str, Any]] = state["keys"]
        self._residuals: Final[Mapping[int | str, Any]] = residuals or {}
        self._optimizer: object = state.get("optimizer") if with_states else None
        self._states: Final[dict[int | str, Any]] = state.get("states", {})
        self._token: Final = token
        self._partial: Final = partial
        self._unused: set[int | str] | None = set(self._keys)
        self.extra: Final = state.get("extra")

    def __contains__(self, user_key: int | str) -> bool:
        """Return whether there is a value of a key."""
        return user_key in self._keys

    def check(self, user_key: int | str, shape: tuple[int, ...], dtype: object) -> None:
        """Check that a key of the store has a value here, of its shape and type."""
        self._check_known(user_key)
        tree = self._keys[user_key]
        has_rows = isinstance(tree, dict)
        kept_shape = tuple(tree["shape"]) if has_rows else tuple(tree.shape)
        kept_dtype = tree["data"].dtype if has_rows else tree.dtype
        if kept_shape != shape or kept_dtype != dtype:
            raise CheckpointError(
                f"{self._source} has key {user_key!r} with shape {kept_shape} and type {kept_dtype}, and the "
                f"store has {shape}: it is of another model"
            )

    def _check_known(self, user_key: int | str) -> None:
        if user_key not in self._keys:
            known = ", ".join(repr(key) for key in list(self._keys)[:5])
            raise CheckpointError(
                f"{self._source} has no key {user_key!r}; it has {len(self._keys)} keys, such as {known}: it "
                "is of another model, or a script that names its keys otherwise"
            )

    def value(self, user_key: int | str) -> NDArray:
        """Return a key's value, a new array."""
        self._check_known(user_key)
        with mx.util.np_shape(True):
            return _array(self._keys[user_key])

    def initial_value(self, user_key: int | str, given: NDArray) -> NDArray:
        """Return the value that a new key begins with: the one kept here, or what was given.

        Raises:
            CheckpointError: there is none, or one of another shape or type.
        """
        if self._partial and user_key not in self:
            return given
        self.check(user_key, tuple(given.shape), given.dtype)
        return self.value(user_key)

    def restore(self, entry: KeptEntry, *, with_value: bool) -> None:
        """Give a key of the store what it had."""
        key = entry.user_key
        if self._partial and key not in self:
            return
        residual = self._residuals.get(key)
        entry.restore(
            self.value(key) if with_value else None,
            None if residual is None else {name: _array(kept) for name, kept in residual.items()},
            self._rounds.get(str(key), 0),
        )
        if self._unused is not None:
            self._unused.discard(key)

    def restore_rule(self, rule: CalledUpdater) -> None:
        """Give a store's optimizer its states and counts; once."""
        values, self._optimizer = self._optimizer, None
        if values is None:
            return
        if rule.of_states is None:
            raise CheckpointError(
                f"{self._source} has an optimizer's states, and this store has an updater of your own: use "
                "set_optimizer, or load_checkpoint(…, states=False) to load the values alone"
            )
        restore_optimizer_values(rule.of_states.optimizer, values)
        states = {key: from_tree(state) for key, state in self._states.items()}
        rule.restore(states, self._token)

    def warn_of_unused(self) -> None:
        """Warn, once, of keys that nobody has asked for."""
        if self._unused:
            _log.warning(
                "%s has %d keys that this store does not have, such as %r: they are ignored",
                self._source,
                len(self._unused),
                min(self._unused, key=str),
            )
        self._unused = None


def _array(tree: object) -> NDArray:
    made = from_tree(tree)
    if not isinstance(made, mx.nd.NDArray):
        raise CheckpointError(f"the checkpoint has a {type(tree).__name__} instead of an array")
    return made
