"""Parts that came before what they refer to is known here: a key, a policy, or a moved chunk. Pure.

The paper's case 2 (arXiv 2404.11352 §VII-A): a contribution is never dropped because its policy is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from netstorm.observe.counters import Counters
from netstorm.protocol.frames import Buffer
from netstorm.protocol.ids import Peer
from netstorm.protocol.messages import Part
from netstorm.pslite.waiting_bytes import Charge, WaitingBytes

__all__ = ["EarlyPart", "EarlyParts"]


@dataclass(frozen=True, slots=True)
class EarlyPart:
    """A part that waits."""

    peer: Peer
    """Its sender, or the first rank of its path."""
    part: Part
    payload: Buffer | None
    payload_crc: int | None
    charge: Charge


class EarlyParts:
    """The early parts of one node, by key. Their bytes are bounded (`pslite.waiting_bytes`)."""

    def __init__(self, counters: Counters, waiting: WaitingBytes) -> None:
        self._counters: Final = counters
        self._waiting: Final = waiting
        self._by_key: Final[dict[int, list[EarlyPart]]] = {}

    def keep(self, peer: Peer, part: Part, payload: Buffer | None, payload_crc: int | None) -> None:
        """Keep a part until `take`.

        Raises:
            NoRoom: too much waits already.
        """
        size = 0 if payload is None else memoryview(payload).nbytes
        charge = self._waiting.take(size, part.key, f"keys that are new here, as {part.key} is, or a policy")
        self._by_key.setdefault(part.key, []).append(EarlyPart(peer, part, payload, payload_crc, charge))
        self._counters.add("parts_kept_early")

    def take(self, key: int) -> list[EarlyPart]:
        """Return the parts of a key, once. The caller handles each, after `begin_again`."""
        self._waiting.ready(key)
        taken = self._by_key.pop(key, [])
        for early in taken:
            self._waiting.give_back(early.charge)
        return taken

    def begin_again(self, early: EarlyPart) -> None:
        """Charge its sender for a part that has waited, if it has to wait again."""
        self._waiting.begin(early.charge.peer, again=True)

    def clear(self) -> None:
        """Drop all parts."""
        for key in list(self._by_key):
            self.take(key)
        self._waiting.all_ready()
