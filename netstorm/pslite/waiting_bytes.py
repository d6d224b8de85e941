"""How many bytes of its peers a process keeps because they cannot be used yet: a bound for each, and one in
all. Pure.

What comes before something that it refers to is known has to wait: a part of a key that this rank's program
has not made yet, or a push of a later view. Correct peers may send as much of it as a model has. So nothing
is lost at the bound: the message is not taken, and its sender keeps it until it is asked for again, once
there is room, or once it need not wait any more (`Endpoint`). Meanwhile other messages pass it, so that what
it waits for can come. A peer that sends on and on gains nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from netstorm.errors import NoRoom
from netstorm.protocol.frames import Peer

__all__ = ["OF_MESSAGE", "Charge", "WaitingBytes"]

_OF_ONE: Final = 256 * 2**20
"""Bytes of one peer: four times what may be under way on its link (`session.window`), so that an early peer
does not notice the bound for as long as links take to be filled."""
_OF_ALL: Final = 1024 * 2**20

OF_MESSAGE: Final = 1024
"""What a message counts besides: a decoded one takes memory, too."""


class Charge:
    """What one message counts, until it is given back."""

    __slots__ = ("nbytes", "peer")

    def __init__(self, peer: Peer | None, nbytes: int) -> None:
        self.peer: Final = peer
        self.nbytes = nbytes


class WaitingBytes:
    """What waits in one process."""

    __slots__ = ("_again", "_may_refuse", "_of", "_of_all", "_of_one", "_refused", "_sender", "_total")

    def __init__(self, *, of_one: int = _OF_ONE, of_all: int = _OF_ALL) -> None:
        """`of_one`, `of_all`: most bytes of one peer, and of all. A single message may always wait."""
        self._of_one = of_one
        self._of_all: Final = of_all
        self._of: Final[dict[Peer | None, int]] = {}
        self._total = 0
        self._sender: Peer | None = None
        self._may_refuse = False
        self._refused: Final[set[Hashable]] = set()
        self._again: Final[set[Hashable]] = set()

    def begin(self, sender: Peer | None, *, again: bool = False) -> None:
        """Charge what is kept from now on to a peer. `again`: it has waited before, and is not refused: its
        sender has forgotten it.
        """
        self._sender, self._may_refuse = sender, not again

    def end(self) -> None:
        """Refuse nothing from now on: what is kept next comes from no session."""
        self._sender, self._may_refuse = None, False

    def take(self, nbytes: int, waits_for: Hashable, what: str) -> Charge:
        """Count a message that has to wait.

        Args:
            nbytes: of the message.
            waits_for: names what it waits for, see `ready`.
            what: the same, for a person.

        Raises:
            NoRoom: the bound is reached; the message must be left as if it had not come.
        """
        nbytes += OF_MESSAGE
        if self._may_refuse and nbytes > self.room(self._sender):
            self._refused.add(waits_for)
            raise NoRoom(
                f"{self._of[self._sender]} bytes from it wait here for {what}, and {self._total} in all: at "
                f"most {self._of_one} and {self._of_all} may; it is asked for the rest later",
                waits_for,
            )
        self._of[self._sender] = self._of.get(self._sender, 0) + nbytes
        self._total += nbytes
        return Charge(self._sender, nbytes)

    def give_back(self, charge: Charge) -> None:
        """Count a message no more: it is handled now, or dropped.

        A second time does nothing: what a job that fails drops may be about to be handled.
        """
        if not charge.nbytes:
            return
        left = self._of[charge.peer] - charge.nbytes
        self._total -= charge.nbytes
        charge.nbytes = 0
        if left:
            self._of[charge.peer] = left
        else:
            del self._of[charge.peer]

    def room(self, peer: Peer | None) -> float:
        """Return how many bytes of a peer may be kept besides those that are."""
        own = self._of.get(peer, 0)
        return min(self._of_one - own, self._of_all - self._total) if own else float("inf")

    def ready(self, waits_for: Hashable) -> None:
        """Record that what messages have waited for may be here: those that were refused are wanted now."""
        if waits_for in self._refused:
            self._refused.discard(waits_for)
            self._again.add(waits_for)

    def all_ready(self) -> None:
        """Record that anything may be here, or that nothing is kept any more."""
        self._again.update(self._refused)
        self._refused.clear()

    def take_ready(self) -> set[Hashable]:
        """Return what has become ready since the last call."""
        taken = set(self._again)
        self._again.clear()
        return taken
