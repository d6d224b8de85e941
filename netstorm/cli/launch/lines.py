"""Whole lines out of the pieces in which a process writes them."""

from __future__ import annotations

from typing import Final

__all__ = ["Lines"]

_LONGEST: Final = 2**20
"""Bytes after which an unfinished line is passed on as it is: memory is not for a child to fill."""


class Lines:
    """One stream of one process.

    A carriage return begins the line anew, as on a terminal, so of a progress bar only the last state becomes
    a line, and `unfinished` is what a terminal would show of it now.
    """

    def __init__(self) -> None:
        """Begin at the start of a line."""
        self._shown = b""
        self._current = b""

    @property
    def unfinished(self) -> bytes:
        """What has been written of a line that has no end yet."""
        return self._current or self._shown

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` has finished, without their ends."""
        *finished, last = data.split(b"\n")
        lines = []
        for piece in finished:
            self._write(piece)
            lines.append(self._take())
        self._write(last)
        if len(self._current) > _LONGEST:
            lines.append(self._take())
        return lines

    def end(self) -> list[bytes]:
        """Return what is left when the stream ends."""
        return [self._take()] if self.unfinished else []

    def _write(self, piece: bytes) -> None:
        first, *rest = piece.split(b"\r")
        self._current += first
        for state in rest:
            # Blanks between two returns wipe a bar away, and a bare return leaves what is there.
            if self._current:
                self._shown = self._current if self._current.strip() else b""
            self._current = state

    def _take(self) -> bytes:
        line = self.unfinished
        self._shown = self._current = b""
        return line
