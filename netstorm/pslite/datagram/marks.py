"""How important each packet is, as a code point that queues understand. Pure.

MLT (Wang et al., NSDI 2024, section 4.2) marks packets by layer, for strict priorities, and by magnitude, for
selective dropping. Assured forwarding (RFC 2597) has a code point for each pair: its four classes are
quarters of the layers, and of each class packets of small values are dropped first.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from netstorm.protocol.codecs import Element, Signature
from netstorm.protocol.frames import Buffer
from netstorm.protocol.messages import Part
from netstorm.pslite.datagram.packets import FRAGMENT

__all__ = ["Marks", "assured_forwarding"]

_CLASSES: Final = 4
_SAMPLE: Final = 20
"""Every so many blocks are sampled: MLT's 5 %."""

_MOST: Final = 4096
"""Priorities and keys that are remembered."""

_FLOATS: Final[dict[Element, np.dtype[Any]]] = {
    Element.FLOAT16: np.dtype(np.float16),
    Element.FLOAT32: np.dtype(np.float32),
    Element.FLOAT64: np.dtype(np.float64),
}


def assured_forwarding(queue: int, *, important: bool) -> int:
    """Return the code point of a class, 4 (first) to 1, with the lowest or the highest drop precedence."""
    return 8 * queue + (2 if important else 6)


class Marks:
    """The code points of the packets of one process."""

    def __init__(self, *, block: int = FRAGMENT, newest: float = 0.3) -> None:
        """Begin without any knowledge.

        Args:
            block: bytes of values that are marked alike (DGT_BLOCK_SIZE); at least those of a packet.
            newest: weight of the newest sample in a key's median (DGT_CONTRIBUTION_ALPHA).
        """
        self._packets: Final = max(1, block // FRAGMENT)
        """Of a block."""
        self._newest: Final = newest
        self._priorities: Final[list[int]] = []
        """Ascending; each that keys have had."""
        self._medians: Final[dict[int, float]] = {}
        """By key: of its blocks' mean absolute values."""

    def of(self, part: Part, payload: Buffer) -> tuple[list[int], list[int]]:
        """Return the code points of a part's packets, of its head and of each fragment; and the places of all
        of these, the most important ones first.
        """
        queue = self._queue(part.priority)
        fragments = -(-memoryview(payload).nbytes // FRAGMENT)
        first, last = (assured_forwarding(queue, important=important) for important in (True, False))
        means = self._means(part, payload)
        if means is None:
            return [first] * (1 + fragments), list(range(1 + fragments))
        unimportant = np.repeat(means < self._median(part.key, means), self._packets)[:fragments]
        dscps = np.where(unimportant, last, first).tolist()
        order = (1 + np.argsort(unimportant, kind="stable")).tolist()
        return [first, *dscps], [0, *order]

    def _queue(self, priority: int) -> int:
        """Return the class of a priority: a quarter of the layers each, the front ones first."""
        priorities = self._priorities
        place = bisect.bisect_left(priorities, priority)
        if (place == len(priorities) or priorities[place] != priority) and len(priorities) < _MOST:
            priorities.insert(place, priority)
        behind = len(priorities) - 1 - min(place, len(priorities) - 1)
        return _CLASSES - behind * _CLASSES // len(priorities)

    def _means(self, part: Part, payload: Buffer) -> npt.NDArray[np.float64] | None:
        """Return the mean absolute value of each block; None: these are no floats."""
        signature = Signature.of_codec(part.codec)
        if signature is not None:
            dtype = _FLOATS.get(signature.element)
        else:
            dtype = next((one for one in _FLOATS.values() if one.name == part.dtype and not part.codec), None)
        if dtype is None:
            return None
        values = np.frombuffer(payload, dtype)
        length = self._packets * FRAGMENT // dtype.itemsize
        starts: Sequence[int] = range(0, len(values), length)
        if not starts:
            return None
        with np.errstate(all="ignore"):
            sums = np.add.reduceat(np.abs(values), starts, dtype=np.float64)
        lengths = np.full(len(starts), length, np.float64)
        lengths[-1] = len(values) - starts[-1]
        means: npt.NDArray[np.float64] = sums / lengths
        return means

    def _median(self, key: int, means: npt.NDArray[np.float64]) -> float:
        sampled = float(np.median(means[::_SAMPLE]))
        known = self._medians.get(key, sampled)
        median = (1 - self._newest) * known + self._newest * sampled
        if math.isfinite(median) and (key in self._medians or len(self._medians) < _MOST):
            self._medians[key] = median
        return median
