"""The numbers of processes: by incarnation, in the order in which they first connect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from netstorm.protocol.frames import Peer

__all__ = ["ProcessRegistry"]

_REMEMBERED: Final = 10_000
"""Processes without a rank. A number outlives its process, or a message that is still under way to that
process would reach another one. Only a flood of unknown processes makes the oldest be forgotten."""


@dataclass(frozen=True, slots=True)
class _Process:
    incarnation: int
    job: str
    user: str


class ProcessRegistry:
    """Gives every process a number; the same process always gets the same one."""

    def __init__(self) -> None:
        self._numbers: dict[int, Peer] = {}
        """By incarnation, of all processes that are remembered."""
        self._processes: dict[Peer, _Process] = {}
        """In order of arrival."""
        self._pinned: set[Peer] = set()
        self._arrived = 0

    def find(self, incarnation: int) -> Peer | None:
        """Return the number of a process; None if it is not known."""
        return self._numbers.get(incarnation)

    def register(self, incarnation: int, job: str, user: str = "") -> Peer:
        """Return the number of a process. A new one gets it now, and belongs to the `job` that it names, and
        to the `user` whose key it has (empty: the job has no key).
        """
        known = self._numbers.get(incarnation)
        if known is not None:
            return known
        peer = Peer(self._arrived)
        self._arrived += 1
        self._numbers[incarnation] = peer
        self._processes[peer] = _Process(incarnation, job, user)
        if len(self._processes) > _REMEMBERED + len(self._pinned):
            oldest = next(other for other in self._processes if other not in self._pinned)
            del self._numbers[self._processes.pop(oldest).incarnation]
        return peer

    def is_taken(self, incarnation: int, user: str) -> bool:
        """Return whether the process of that number has another key."""
        peer = self._numbers.get(incarnation)
        return peer is not None and self._processes[peer].user != user

    def pin(self, peer: Peer) -> None:
        """Never forget a process: it has a rank."""
        self._pinned.add(peer)

    def unpin(self, peer: Peer) -> None:
        """Allow a process to be forgotten: its job has ended."""
        self._pinned.discard(peer)

    def job_of(self, peer: Peer) -> str:
        """Return the job that a process belongs to, as it says."""
        return self._processes[peer].job

    def user_of(self, peer: Peer) -> str:
        """Return the text of the key that a process came with; empty: the job has none."""
        return self._processes[peer].user

    def incarnation_of(self, peer: Peer) -> int:
        """Return the random number by which a process is known."""
        return self._processes[peer].incarnation
