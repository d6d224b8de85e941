"""A set of bounded size that forgets its oldest members. Pure."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

__all__ = ["RecentSet"]

T = TypeVar("T")


class RecentSet(Generic[T]):
    """At most `size` members; adding one more forgets the one that was added first."""

    def __init__(self, size: int) -> None:
        self._size: Final = size
        self._members: dict[T, None] = {}

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def add(self, member: T) -> None:
        """Add a member as the newest."""
        self._members.pop(member, None)
        self._members[member] = None
        if len(self._members) > self._size:
            del self._members[next(iter(self._members))]
