"""What is kept of a simulated cluster's messages: a digest of all of them, and the last ones as text."""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from typing import Final

from netstorm.errors import FrameError
from netstorm.protocol.frames import open_frames
from netstorm.pslite.memory_network import Timeline

__all__ = ["MessageLog"]

_LAST_MESSAGES: Final = 40
"""Number of messages that `last` returns."""


class MessageLog:
    """Records every message of one network."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline: Final = timeline
        self._digest = hashlib.blake2b(digest_size=16)
        self._last: deque[tuple[float, str, str, bytes]] = deque(maxlen=_LAST_MESSAGES)

    def record(self, source: str, target: str, header: bytes) -> None:
        """Record a message that is delivered now. Its header holds the payload's checksum."""
        self._digest.update(struct.pack("<d", self._timeline.now))
        self._digest.update(f"{source}>{target}".encode())
        self._digest.update(header)
        self._last.append((self._timeline.now, source, target, header))

    def digest(self) -> str:
        """Return a digest of all messages so far: time, source, target and content of each."""
        return self._digest.hexdigest()

    def last(self) -> list[str]:
        """Return the last messages, one line each."""
        return [
            f"{time:.6f} {source} > {target}: {_readable(header)}"
            for time, source, target, header in self._last
        ]


def _readable(header: bytes) -> str:
    for frames in (1, 2):
        try:
            opened = open_frames(header, frames)
        except FrameError:
            continue
        number = f" #{opened.sequence}" if opened.sequence else ""
        return f"{opened.message!r}{number}"
    return f"{len(header)} bytes that are no frame"
