"""Texts of other processes, made fit for logs, errors and terminals. Pure.

A text that crosses the wire ends in somebody's log, error message or terminal. One with a line break could
look like several lines of the log, and one with an escape sequence could change what a terminal shows. So
whatever is not printable is written as in a Python string, once, where messages come in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import inspect

__all__ = ["clean", "printable"]

S = TypeVar("S", bound=msgspec.Struct)

_Cleaner: TypeAlias = Callable[[Any], Any]
"""Returns the same object if there is nothing to do."""

_AS_THEY_ARE: Final = frozenset({"channel", "dtype"})
"""Fields that are compared with texts of this process before they are shown, if they are. Without `dtype`
chunks have no text, and cost one look into a table."""


def printable(text: str) -> str:
    """Return a text without control characters, line breaks and marks of direction: each is escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def clean(struct: S) -> S:
    """Return a struct whose texts, at any depth, are printable: the same object if they were."""
    kind = type(struct)
    if kind not in _cleaners:
        _cleaners[kind] = _cleaner_of(inspect.type_info(kind))
    cleaner = _cleaners[kind]
    if cleaner is None:
        return struct
    cleaned: S = cleaner(struct)
    return cleaned


_cleaners: Final[dict[type, _Cleaner | None]] = {}
"""By class, once one has come; None: it has no texts."""


def _cleaner_of(kind: inspect.Type) -> _Cleaner | None:
    """Return what cleans values of a type, and visits only what may have a text; None: nothing has."""
    match kind:
        case inspect.StrType():
            return printable
        case inspect.StructType():
            return _of_struct(kind)
        case inspect.DictType():
            return _of_dict(_cleaner_of(kind.key_type), _cleaner_of(kind.value_type))
        case inspect.VarTupleType() | inspect.ListType():
            return _of_items(_cleaner_of(kind.item_type))
        case inspect.UnionType():
            found = [one for one in map(_cleaner_of, kind.types) if one is not None]
            if len(found) > 1:
                raise TypeError(f"{kind} has several parts with texts: say here how they are told apart")
            return None if not found else lambda value: None if value is None else found[0](value)
        case inspect.TupleType() if any(map(_cleaner_of, kind.item_types)):
            raise TypeError(f"{kind} has texts in a tuple of fixed length: say here how they are cleaned")
    return None


def _of_struct(kind: inspect.StructType) -> _Cleaner | None:
    cleaners = [
        (field.name, cleaner)
        for field in kind.fields
        if field.name not in _AS_THEY_ARE and (cleaner := _cleaner_of(field.type)) is not None
    ]

    def cleaned(struct: msgspec.Struct) -> msgspec.Struct:
        changed = {}
        for name, cleaner in cleaners:
            before = getattr(struct, name)
            after = cleaner(before)
            if after is not before:
                changed[name] = after
        return msgspec.structs.replace(struct, **changed) if changed else struct

    return cleaned if cleaners else None


def _of_items(cleaner: _Cleaner | None) -> _Cleaner | None:
    def cleaned(items: Any) -> Any:
        after = [one(item) for item in items]
        changed = any(new is not old for new, old in zip(after, items, strict=True))
        return type(items)(after) if changed else items

    if cleaner is None:
        return None
    one = cleaner
    return cleaned


def _of_dict(of_key: _Cleaner | None, of_value: _Cleaner | None) -> _Cleaner | None:
    def cleaned(items: dict[Any, Any]) -> dict[Any, Any]:
        return {
            of_key(key) if of_key else key: of_value(value) if of_value else value
            for key, value in items.items()
        }

    if of_key is None and of_value is None:
        return None
    # Rarely there, and small, so it is made anew if it has anything.
    return lambda items: cleaned(items) if items else items
