"""Parts that came before what they refer to is known here: a key, a policy, or a moved chunk. Pure.

The paper's case 2 (arXiv 2404.11352 §VII-A): a contribution is never dropped because its policy is not known.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from netstorm.errors import ProtocolViolation
from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Part

__all__ = ["EarlyParts"]

_MOST: Final = 2**20
"""Parts of one sender: a rank that has registered no key yet gets a whole model."""

_EarlyPart: TypeAlias = tuple[Peer, Part, Buffer | None, int | None]
"""Sender, part, payload, and the payload's checksum, if it has one."""


class EarlyParts:
    """The early parts of one node, by key."""

    def __init__(self, counters: Counters) -> None:
        self._counters: Final = counters
        self._by_key: Final[dict[int, list[_EarlyPart]]] = {}
        self._of: Final[dict[Peer, int]] = {}
        """By sender: how many of its parts are kept."""

    def keep(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> None:
        """Keep a part until `take`.

        Raises:
            ProtocolViolation: more parts of its sender are kept than any job has.
        """
        count = self._of.get(peer, 0)
        if count >= _MOST:
            raise ProtocolViolation(
                f"{count} parts of rank {peer} wait here for what they refer to: too many"
            )
        self._of[peer] = count + 1
        self._by_key.setdefault(part.key, []).append((peer, part, payload, payload_crc))
        self._counters.add("parts_kept_early")

    def take(self, key: int) -> list[_EarlyPart]:
        """Return the parts of a key, once."""
        taken = self._by_key.pop(key, [])
        for peer, *_ in taken:
            self._of[peer] -= 1
        return taken

    def clear(self) -> None:
        """Drop all parts."""
        self._by_key.clear()
        self._of.clear()
