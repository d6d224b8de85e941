"""Parts that came before what they refer to is known here: a key, a policy, or a moved chunk. Pure.

The paper's case 2 (arXiv 2404.11352 §VII-A): a contribution is never dropped because its policy is not known.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Part

__all__ = ["EarlyParts"]

_EarlyPart: TypeAlias = tuple[Peer, Part, Buffer | None, int]
"""Sender, part, payload, and the payload's checksum."""


class EarlyParts:
    """The early parts of one node, by key."""

    def __init__(self, counters: Counters) -> None:
        self._counters: Final = counters
        self._by_key: Final[dict[int, list[_EarlyPart]]] = {}

    def keep(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int) -> None:
        """Keep a part until `take`."""
        self._by_key.setdefault(part.key, []).append((peer, part, payload, payload_crc))
        self._counters.add("parts_kept_early")

    def take(self, key: int) -> list[_EarlyPart]:
        """Return the parts of a key, once."""
        return self._by_key.pop(key, [])

    def clear(self) -> None:
        """Drop all parts."""
        self._by_key.clear()
