"""The look-ahead: which complete sums a rank withholds, so that no rank runs far ahead of the slowest.

If connections share a resource, those with little to send would take it from those with much, and only a few
would be busy at the end of a round. So a rank sends sums to its parents only within the look-ahead: so many
bytes beyond the first chunk, in the job's order of bytes, that has no result yet.

There is no deadlock. A chunk waits only for chunks before it, in an order that is the same at all ranks.
These count only if all ranks have begun their round, which a result shows, or if the round began here so
recently that the others may still begin it. After that time, the first chunk without a result whose round all
ranks have begun waits nowhere; when all ranks have its result, another chunk is the first. This holds for all
look-aheads and priorities, even if ranks disagree on them; a late rank only finds that the others have sent
everything.
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
    """One tensor of one round at one rank: its place in the order, its results, and its withheld chunks."""

    __slots__ = (
        "begun_by_all",
        "counts",
        "first",
        "look_ahead",
        "offsets",
        "owner",
        "priority",
        "results",
        "start",
        "withheld",
    )

    def __init__(self, owner: T, offsets: Sequence[int], look_ahead: int, *, priority: int = 0) -> None:
        """Begin without results.

        Args:
            owner: an identifier for the caller.
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
        """A result has arrived, which has the contributions of all ranks."""
        self.counts = False
        """Chunks may have to wait for this tensor's results."""
        self.results: Final = bytearray(len(offsets))
        self.withheld: Final[list[int]] = []
        """Heap of chunk numbers."""


class Withholding(Generic[T]):
    """The sums that one rank withholds, of all rounds with one number."""

    def __init__(self) -> None:
        self._open: Final[list[LookAheadSpan[T]]] = []
        """Spans that count, in order."""
        self._fronts: list[tuple[int, int, LookAheadSpan[T]]] = []
        """Heap of (offset up to which results must be here before the first withheld chunk may go, number,
        its span). An entry is stale if another chunk is the first by now.
        """
        self._entries = 0

    def begin(self, span: LookAheadSpan[T]) -> None:
        """Record that a tensor's round has begun here. After the look-ahead's time, call `expire`."""
        self._count(span)

    def withhold(self, span: LookAheadSpan[T], chunk: int) -> bool:
        """Return whether a complete sum must wait; if so, `record_result` or `expire` releases it later."""
        if not self._must_wait(span, chunk):
            return False
        heapq.heappush(span.withheld, chunk)
        if span.withheld[0] == chunk:
            self._enter(span)
        return True

    def record_result(self, span: LookAheadSpan[T], chunk: int) -> Iterator[tuple[T, int]]:
        """Record a result; return owners and chunks that are released. Exhaust the iterator."""
        span.results[chunk] = 1
        if not span.begun_by_all:
            span.begun_by_all = True
            self._count(span)
        if chunk != span.first:
            return iter(())
        span.first = span.results.find(0, chunk)
        if span.first < 0:
            self._count_no_more(span)
            return self._released(self._reached())
        return self._released(span.offsets[span.first])

    def expire(self, span: LookAheadSpan[T]) -> Iterator[tuple[T, int]]:
        """Let nothing wait for a tensor without a result; yield as `record_result`. Exhaust the iterator."""
        if not span.begun_by_all:
            self._count_no_more(span)
            yield from self._released(self._reached())

    def forget(self, span: LookAheadSpan[T]) -> Iterator[tuple[T, int]]:
        """Drop a tensor and its withheld chunks; yield as `record_result`. Exhaust the iterator."""
        span.withheld.clear()
        self._count_no_more(span)
        yield from self._released(self._reached())

    def is_empty(self) -> bool:
        """Return whether no tensor counts, and so nothing waits."""
        return not self._open

    def _count(self, span: LookAheadSpan[T]) -> None:
        if not span.counts and span.offsets:
            span.counts = True
            insort(self._open, span, key=_start)

    def _count_no_more(self, span: LookAheadSpan[T]) -> None:
        if span.counts:
            span.counts = False
            self._open.remove(span)

    def _enter(self, span: LookAheadSpan[T]) -> None:
        self._entries += 1
        edge = span.offsets[span.withheld[0]] - span.look_ahead
        heapq.heappush(self._fronts, (edge, self._entries, span))

    def _released(self, up_to: float) -> Iterator[tuple[T, int]]:
        """Yield the chunks that may go: a tensor has its results up to an offset, or does not count."""
        still: dict[LookAheadSpan[T], None] = {}
        fronts = self._fronts
        while fronts and fronts[0][0] <= up_to:
            edge, _, waiting = heapq.heappop(fronts)
            withheld = waiting.withheld
            if not withheld or waiting.offsets[withheld[0]] - waiting.look_ahead != edge:
                continue
            while withheld and not self._must_wait(waiting, withheld[0]):
                yield waiting.owner, heapq.heappop(withheld)
            if withheld:
                still[waiting] = None
        for waiting in still:
            self._enter(waiting)

    def _reached(self) -> float:
        """Return an offset beyond which all withheld chunks wait for the first of the open tensors."""
        if not self._open:
            return math.inf
        first = self._open[0]
        if any(waiting.priority > first.priority for _, _, waiting in self._fronts):
            return math.inf
        return first.offsets[first.first]

    def _must_wait(self, span: LookAheadSpan[T], chunk: int) -> bool:
        edge = span.offsets[chunk] - span.look_ahead
        for other in self._open:
            if other.start >= edge:
                return False
            if other.offsets[other.first] < edge and other.priority >= span.priority:
                return True
        return False


def _start(span: LookAheadSpan[T]) -> int:
    return span.start
