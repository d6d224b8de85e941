"""The keys of one store: which there are, and whether the keys and arrays of a call fit them."""

from __future__ import annotations

from typing import Final, TypeAlias

from netstorm.errors import UsageError
from netstorm.frontends.mxnet.arrays.arguments import Group, check_fits
from netstorm.frontends.mxnet.arrays.gil_calls import Kind, kind_of
from netstorm.frontends.mxnet.engine.operations import NDArray
from netstorm.frontends.mxnet.store.entry import Entry
from netstorm.frontends.mxnet.store.gradient_compression import GradientCompression
from netstorm.frontends.mxnet.store.row_arrays import check_rows
from netstorm.frontends.mxnet.store.row_entry import RowEntry
from netstorm.kvstore.forms import Key
from netstorm.kvstore.process.runtime import Runtime

__all__ = ["AnyEntry", "Given", "KeyTable"]

AnyEntry: TypeAlias = Entry | RowEntry

Given: TypeAlias = list[tuple[AnyEntry, list[NDArray]]]
"""The entries of a call's keys, with the arrays that were given for each."""


class KeyTable:
    """A store's entries, by the user's key."""

    def __init__(self, runtime: Runtime, namespace: int) -> None:
        """Begin with no keys; `namespace` is the store's."""
        self._runtime: Final = runtime
        self._namespace: Final = namespace
        self._entries: Final[dict[int | str, AnyEntry]] = {}

    def entries(self) -> list[AnyEntry]:
        """Return all entries, in the order in which their keys were initialised."""
        return list(self._entries.values())

    def add(self, entry: AnyEntry) -> None:
        """Add a key's entry; `check_new` has accepted the key."""
        self._entries[entry.user_key] = entry

    def find(self, groups: list[Group], what: str) -> Given:
        """Return the entries of keys, after checking the arrays.

        Args:
            groups: the keys and arrays of a call.
            what: the method, for error messages.

        Raises:
            UsageError: a key has not been initialised, or an array does not fit its key.
        """
        found: Given = []
        for user_key, arrays in groups:
            entry = self._entries.get(user_key)
            if entry is None:
                raise self._unknown(user_key, what)
            if not entry.last.have(arrays):
                check_fits(arrays, entry.key, what)
            found.append((entry, arrays))
        return found

    def check_new(
        self, user_key: int | str, values: list[NDArray], compression: GradientCompression | None, name: str
    ) -> Kind:
        """Return the kind of a new key's initial value, after checking key and value.

        Raises:
            UsageError: the key exists, is of another type than the others, or cannot have this value.
        """
        if user_key in self._entries:
            raise UsageError(
                f"key {user_key!r} has been initialised before; each key is initialised once a store"
            )
        self._check_type(user_key, "init")
        if len(values) > 1:
            raise UsageError(f"init of key {user_key!r} with {len(values)} arrays; give it one array")
        kind = kind_of(values[0])
        key = Key(self._namespace, str(user_key), kind.shape, kind.dtype.name)
        check_fits(values, key, "init")
        if compression is not None:
            compression.check_key(key, "init", name)
        if not kind.dense:
            check_rows(self._runtime, key.name, kind.shape)
        return kind

    def _unknown(self, user_key: int | str, what: str) -> UsageError:
        self._check_type(user_key, what)
        known = ", ".join(map(str, list(self._entries)[:5])) or "none"
        return UsageError(
            f"{what} of key {user_key!r}, which has not been initialised; init it first (keys: {known})"
        )

    def _check_type(self, user_key: int | str, what: str) -> None:
        """Check that a key is of the type of the others: to MXNet's users 3 and "3" are the same."""
        other = next(
            (known for known in self._entries if isinstance(known, str) != isinstance(user_key, str)), None
        )
        if other is not None:
            raise UsageError(
                f"{what} of key {user_key!r}: this store has {type(other).__name__} keys, such as {other!r}; "
                "keys must be all int or all str"
            )
