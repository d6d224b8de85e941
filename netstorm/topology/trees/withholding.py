"""Which sums a rank holds back, so that nobody runs far ahead of the slowest: the look-ahead.

Where connections share something, those that need little would take it from those that need much, and the end
of a round would be left to a few. So a rank sends sums to its parents only within the look-ahead: so many
bytes beyond the first chunk, in the job's order of bytes, whose result it lacks.

Nothing waits for ever. A chunk waits only for chunks before it in an order that is the same at all ranks, and
these only count if all ranks are known to have begun their round, because a result of it is here, or if it
has begun here so short a time ago that they may still. When that time is over, the first chunk of those that
some rank lacks and whose round everybody has begun waits nowhere; when all ranks have its result, another one
is the first. For that it does not matter what look-aheads and priorities are, nor whether ranks agree on
them; and a rank that is late only finds that the others have sent everything.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar

__all__ = ["LookAheadSpan", "Withholding"]

T = TypeVar("T")


class LookAheadSpan(Generic[T]):
    """One tensor of one round at one rank: its place in the order, which results are here, what is held."""

    __slots__ = (
        "begun_by_all",
        "counts",
        "first",
        "held",
        "look_ahead",
        "offsets",
        "owner",
        "priority",
        "results",
        "start",
    )

    def __init__(self, owner: T, offsets: Sequence[int], look_ahead: int, *, priority: int = 0) -> None:
        """Begin without results.

        Args:
            owner: whatever the caller wants to find here again.
            offsets: of its chunks in the job, in bytes: rising, and no other tensor's are between them.
            look_ahead: bytes.
            priority: the larger, the more urgent.
        """
        self.owner: Final = owner
        self.offsets: Final = offsets
        self.look_ahead: Final = look_ahead
        self.priority = priority
        self.first = 0
        """Number of the first chunk without a result."""
        self.start: Final = offsets[0] if offsets else 0
        self.begun_by_all = False
        """A result has come, and in a result is everybody's contribution."""
        self.counts = False
        """Chunks wait for this tensor's."""
        self.results: Final = bytearray(len(offsets))
        self.held: Final[list[int]] = []
        """Heap of chunk numbers."""


class Withholding(Generic[T]):
    """What one rank holds back of all rounds with one number."""

    def __init__(self) -> None:
        self._open: Final[list[LookAheadSpan[T]]] = []
        """Those that count, in order."""
        self._fronts: list[tuple[int, int, LookAheadSpan[T]]] = []
        """Heap of (what must have results before the first chunk that is held may go, number, its tensor).
        An entry whose chunk is not that any more is of no consequence.
        """
        self._entries = 0

    def begin(self, stretch: LookAheadSpan[T]) -> None:
        """Note that a tensor's round has begun here. `doubt` it when that is long ago."""
        self._count(stretch)

    def hold(self, stretch: LookAheadSpan[T], chunk: int) -> bool:
        """Return whether a sum that is complete must wait; if so, `result` or `doubt` will say until when."""
        if not self._must_wait(stretch, chunk):
            return False
        heapq.heappush(stretch.held, chunk)
        if stretch.held[0] == chunk:
            self._enter(stretch)
        return True

    def result(self, stretch: LookAheadSpan[T], chunk: int) -> Iterator[tuple[T, int]]:
        """Note a result; return owners and chunks that need not wait any more. Exhaust it."""
        stretch.results[chunk] = 1
        if not stretch.begun_by_all:
            stretch.begun_by_all = True
            self._count(stretch)
        if chunk != stretch.first:
            return iter(())
        stretch.first = stretch.results.find(0, chunk)
        if stretch.first < 0:
            self._count_no_more(stretch)
            return self._released(self._reached())
        return self._released(stretch.offsets[stretch.first])

    def doubt(self, stretch: LookAheadSpan[T]) -> Iterator[tuple[T, int]]:
        """Let nothing wait for a tensor of which no result has come; yield as `result`. Exhaust it."""
        if not stretch.begun_by_all:
            self._count_no_more(stretch)
            yield from self._released(self._reached())

    def forget(self, stretch: LookAheadSpan[T]) -> Iterator[tuple[T, int]]:
        """Drop what is held of a tensor, and let nothing wait for it; yield as `result`. Exhaust it."""
        stretch.held.clear()
        self._count_no_more(stretch)
        yield from self._released(self._reached())

    def idle(self) -> bool:
        """Return whether there is nothing that could be waited for, and so nothing that waits."""
        return not self._open

    def _count(self, stretch: LookAheadSpan[T]) -> None:
        if not stretch.counts and stretch.offsets:
            stretch.counts = True
            insort(self._open, stretch, key=_start)

    def _count_no_more(self, stretch: LookAheadSpan[T]) -> None:
        if stretch.counts:
            stretch.counts = False
            self._open.remove(stretch)

    def _enter(self, stretch: LookAheadSpan[T]) -> None:
        self._entries += 1
        edge = stretch.offsets[stretch.held[0]] - stretch.look_ahead
        heapq.heappush(self._fronts, (edge, self._entries, stretch))

    def _released(self, up_to: float) -> Iterator[tuple[T, int]]:
        """Yield what may go, now that a tensor has its results up to there or is not waited for any more."""
        still: dict[LookAheadSpan[T], None] = {}
        fronts = self._fronts
        while fronts and fronts[0][0] <= up_to:
            edge, _, waiting = heapq.heappop(fronts)
            held = waiting.held
            if not held or waiting.offsets[held[0]] - waiting.look_ahead != edge:
                continue
            while held and not self._must_wait(waiting, held[0]):
                yield waiting.owner, heapq.heappop(held)
            if held:
                still[waiting] = None
        for waiting in still:
            self._enter(waiting)

    def _reached(self) -> float:
        """Return a place beyond which everything that is held waits for the first of the open tensors."""
        if not self._open:
            return math.inf
        first = self._open[0]
        if any(waiting.priority > first.priority for _, _, waiting in self._fronts):
            return math.inf
        return first.offsets[first.first]

    def _must_wait(self, stretch: LookAheadSpan[T], chunk: int) -> bool:
        edge = stretch.offsets[chunk] - stretch.look_ahead
        for other in self._open:
            if other.start >= edge:
                return False
            if other.offsets[other.first] < edge and other.priority >= stretch.priority:
                return True
        return False


def _start(stretch: LookAheadSpan[T]) -> int:
    return stretch.start
