"""Bounds on what sends and receives keep in memory. Pure."""

from __future__ import annotations

from typing import Final

__all__ = [
    "MOST_TEXT",
    "MOST_WAITING",
    "PIECE_BYTES",
    "WAITING_BYTES",
    "WINDOW_PIECES",
    "charge",
    "piece_extent",
    "pieces_in",
]

PIECE_BYTES: Final = 256 * 1024
"""Size of a piece, and of the largest message that goes without an offer: about a chunk of a gradient."""

WAITING_BYTES: Final = 1024 * 1024
"""Most bytes of one sender that wait at a receiver for its program. Messages beyond it are offered."""

WINDOW_PIECES: Final = 32
"""Most pieces of a message that are under way, 8 MiB: what nodes between may have to store. It fills a link
of 1 Gbit/s with a round trip of 60 ms.
"""

MOST_WAITING: Final = 65_536
"""Most messages of one sender that a receiver keeps for its program, offers included."""

MOST_TEXT: Final = 256
"""Most characters of a channel's name and of a description."""

_LEAST_CHARGE: Final = 1024
"""What a waiting message counts at least: an empty one takes memory, too."""


def charge(nbytes: int) -> int:
    """Return what a small message counts towards `WAITING_BYTES`."""
    return max(nbytes, _LEAST_CHARGE)


def pieces_in(nbytes: int) -> int:
    """Return the number of pieces of a message."""
    return -(-nbytes // PIECE_BYTES)


def piece_extent(piece: int, nbytes: int) -> tuple[int, int]:
    """Return where a piece begins and ends in its message."""
    return piece * PIECE_BYTES, min(nbytes, (piece + 1) * PIECE_BYTES)
