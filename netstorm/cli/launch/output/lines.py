"""Splits the output of a process into lines."""

from __future__ import annotations

from typing import Final

__all__ = ["Lines"]

_LONGEST: Final = 2**20
"""Bytes after which an unfinished line is passed on as it is, so that a process cannot fill our memory."""


class Lines:
    """One output stream of one process.

    A carriage return restarts the line, as on a terminal: of a progress bar only the last state becomes a
    line, and `unfinished` is the state that a terminal would show now.
    """

    def __init__(self) -> None:
        """Begin at the start of a line."""
        self._shown = b""
        self._current = b""

    @property
    def unfinished(self) -> bytes:
        """The part of a line that has no end yet."""
        return self._current or self._shown

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without their ends."""
        *finished, last = data.split(b"\n")
        lines = []
        for piece in finished:
            self._write(piece)
            lines.append(self._take_line())
        self._write(last)
        if len(self._current) > _LONGEST:
            lines.append(self._take_line())
        return lines

    def end(self) -> list[bytes]:
        """Return the rest when the stream ends."""
        return [self._take_line()] if self.unfinished else []

    def _write(self, piece: bytes) -> None:
        first, *rest = piece.split(b"\r")
        self._current += first
        for state in rest:
            # Blanks between two returns clear the line; a bare return keeps it.
            if self._current:
                self._shown = self._current if self._current.strip() else b""
            self._current = state

    def _take_line(self) -> bytes:
        line = self.unfinished
        self._shown = self._current = b""
        return line
