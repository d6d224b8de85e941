"""Where a node looks for a scheduler: that of the job, standbys, and those that take the job over. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["SchedulerAddresses"]

_MOST_RECOVERING: Final = 4
"""Schedulers that take over, of which a node remembers the addresses. One is enough; more come if several are
started at once, or one after the other."""


class SchedulerAddresses:
    """The addresses of one node, in the order in which it tries them.

    A scheduler is *recovering* if it was started to take the job over, and has told this node its address.
    """

    def __init__(self, first: tuple[str, int], standbys: Sequence[tuple[str, int]]) -> None:
        """Begin with the scheduler of the job."""
        self._standbys: Final = tuple(standbys)
        self._known: list[tuple[str, int]] = [first, *standbys]
        self._recovering: list[tuple[str, int]] = []
        self._at = 0

    @property
    def present(self) -> tuple[str, int]:
        """The one that this node talks to, or tries to."""
        return self._known[self._at]

    @property
    def several(self) -> bool:
        """Whether there is another one to try."""
        return len(self._known) > 1

    @property
    def is_recovering(self) -> bool:
        """Whether the present one takes the job over."""
        return self.present in self._recovering

    def try_next(self) -> None:
        """Go on to the next one, and behind the last one to the first again."""
        self._at = (self._at + 1) % len(self._known)

    def go_over(self, address: tuple[str, int]) -> None:
        """Go over to a recovering scheduler."""
        self.remember(address)
        self._at = self._known.index(address)

    def remember(self, address: tuple[str, int]) -> None:
        """Remember the address of a recovering scheduler, to try it later."""
        present = self.present
        if address not in self._recovering:
            self._recovering.append(address)
        if address not in self._known:
            self._known.append(address)
        if len(self._recovering) > _MOST_RECOVERING:
            oldest = next(one for one in self._recovering if one not in (present, address))
            self._recovering.remove(oldest)
            self._known.remove(oldest)
        self._at = self._known.index(present)

    def forget_earlier(self) -> None:
        """Never go back: the present scheduler has taken the job over, and one before it may come back."""
        present = self.present
        self._known = [present, *(one for one in self._standbys if one != present)]
        self._recovering.clear()
        self._at = 0

    def forget_all_but_recovering(self) -> None:
        """Never go back to a scheduler that does not take the job over."""
        present = self.present
        self._known = list(self._recovering)
        self._at = self._known.index(present)
