"""Who comes to the door: processes by incarnation, numbered in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from netstorm.protocol.ids import Peer

__all__ = ["ProcessRegistry"]

_REMEMBERED: Final = 10_000
"""Processes without a rank. A number must outlive its process's leaving, or what is still under way to it
would be taken for somebody else's; only a flood of strangers gets the oldest forgotten."""


@dataclass(frozen=True, slots=True)
class _Process:
    incarnation: int
    job: str


class ProcessRegistry:
    """Gives every process a number; the same process again has the same one."""

    def __init__(self) -> None:
        self._numbers: dict[int, Peer] = {}
        """By incarnation, of all that are remembered."""
        self._guests: dict[Peer, _Process] = {}
        """In order of arrival."""
        self._kept: set[Peer] = set()
        self._arrived = 0

    def known(self, incarnation: int) -> Peer | None:
        """Return the number of a process that has been here, if it has."""
        return self._numbers.get(incarnation)

    def enter(self, incarnation: int, job: str) -> Peer:
        """Return the number of a process; a new one gets it now, and belongs to the `job` that it says."""
        known = self._numbers.get(incarnation)
        if known is not None:
            return known
        peer = Peer(self._arrived)
        self._arrived += 1
        self._numbers[incarnation] = peer
        self._guests[peer] = _Process(incarnation, job)
        if len(self._guests) > _REMEMBERED + len(self._kept):
            oldest = next(one for one in self._guests if one not in self._kept)
            del self._numbers[self._guests.pop(oldest).incarnation]
        return peer

    def keep(self, peer: Peer) -> None:
        """Never forget a process: it has a rank."""
        self._kept.add(peer)

    def release(self, peer: Peer) -> None:
        """Let a process be forgotten some day: its job has ended for it."""
        self._kept.discard(peer)

    def job_of(self, peer: Peer) -> str:
        """Return the job that a process says it belongs to."""
        return self._guests[peer].job

    def incarnation_of(self, peer: Peer) -> int:
        """Return the random number of a process."""
        return self._guests[peer].incarnation
