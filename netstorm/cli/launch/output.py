"""The launcher's own output: whole lines of many processes, in order, without ever blocking the launcher."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

__all__ = ["Console", "Lines", "Stream", "open_standard_streams", "plain"]


class Stream(IntEnum):
    """Where output goes; the value is the file descriptor."""

    OUT = 1
    ERR = 2


_FULL: Final = 2**20
"""Queued bytes above which the processes' output is not read, so that they wait for a slow reader too."""

_FULL_DISK: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors after which nothing more is printed, but the job goes on: a training is worth more than its output.
"""

_LAUNCHER: Final = "launch"
_BOLD: Final = b"1"
_COLOURS: Final = (
    b"36",
    b"32",
    b"33",
    b"35",
    b"34",
    b"96",
    b"92",
    b"93",
    b"95",
    b"94",
)  # no red: not an error
_ESCAPES: Final = re.compile(
    rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[@-Z\\^_])|[\x00-\x08\x0a-\x1f]"
)
"""Terminal control sequences (ECMA-48 §5.4) and control characters, which would break a status line."""


def plain(text: bytes) -> bytes:
    """Return a line without what only a terminal understands."""
    return _ESCAPES.sub(b"", text)


def open_standard_streams() -> None:
    """Open those of descriptors 0 to 2 that are closed, or the next pipe would become our standard output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


class Console:
    """Lines to standard output and error, and on a terminal one status line below them.

    Both streams share one queue, so that lines stay whole even if the streams are the same file.
    """

    def __init__(self, *, prefixes: bool, environment: Mapping[str, str]) -> None:
        """Find out whether standard output and error are terminals.

        Args:
            prefixes: whether each line begins with the name of its process.
            environment: NO_COLOR (https://no-color.org) and TERM are read.
        """
        self._prefixes: Final = prefixes
        dumb = environment.get("TERM", "dumb") == "dumb"
        self._coloured: Final = {
            stream: not dumb and not environment.get("NO_COLOR") and os.isatty(stream) for stream in Stream
        }
        self._has_status: Final = not dumb and os.isatty(Stream.ERR)
        self._queue: deque[tuple[Stream, bytearray]] = deque()
        self._size = 0
        self._closed: set[Stream] = set()
        self._full_disk = False
        self._status = b""
        self._labels: dict[str, bytes] = {}

    @property
    def wanted(self) -> Stream | None:
        """The stream that `write` will write to next; None: there is nothing to write."""
        return self._queue[0][0] if self._queue else None

    @property
    def is_full(self) -> bool:
        """Whether so much waits that no more should come."""
        return self._size > _FULL

    @property
    def is_closed(self) -> bool:
        """Whether nobody reads standard output any more, as behind `| head`; not whether a disk is full."""
        return Stream.OUT in self._closed and not self._full_disk

    def line(self, stream: Stream, label: str, text: bytes) -> None:
        """Queue one line of a process."""
        self._erase_status()
        prefix = self._prefix(stream, label) if self._prefixes or label == _LAUNCHER else b""
        # Without a reset, the colours of a line would continue in the next one.
        reset = b"\x1b[0m" if self._coloured[stream] and b"\x1b[" in text else b""
        self._put(stream, prefix + text + reset + b"\n")

    def report(self, text: str) -> None:
        """Queue a line of the launcher itself, on standard error."""
        self.line(Stream.ERR, _LAUNCHER, text.encode(errors="replace"))

    def show(self, label: str, text: bytes) -> None:
        """Show an unfinished line of a process below all others, if standard error is a terminal."""
        if not self._has_status:
            return
        status = _cut(b"[%b] %b" % (label.encode(), plain(text)) if text else b"")
        if status != self._status:
            self._erase_status()
            self._put(Stream.ERR, status)
            self._status = status

    def write(self) -> None:
        """Write a piece of what is queued: one that cannot block once poll(2) has said that there is room."""
        stream, data = self._queue[0]
        if stream not in self._closed:
            try:
                written = os.write(stream, data[: select.PIPE_BUF])
            except BlockingIOError:  # another program has made our terminal non-blocking
                return
            except OSError as error:
                written = len(data)
                self._closed.add(stream)
                self._full_disk = self._full_disk or error.errno in _FULL_DISK
        else:
            written = len(data)
        del data[:written]
        self._size -= written
        if not data:
            self._queue.popleft()

    def flush(self, stalled_ms: int | None) -> None:
        """Write all that is queued; give up when nothing moves for `stalled_ms` (None: never)."""
        self._erase_status()
        while self.wanted is not None:
            poller = select.poll()
            poller.register(self.wanted, select.POLLOUT)
            if not poller.poll(stalled_ms):
                return
            self.write()

    def _prefix(self, stream: Stream, label: str) -> bytes:
        plain = b"[%b] " % label.encode()
        if not self._coloured[stream]:
            return plain
        if label not in self._labels:
            colour = _COLOURS[int(label) % len(_COLOURS)] if label.isdigit() else _BOLD
            self._labels[label] = b"\x1b[%bm%b\x1b[0m" % (colour, plain)
        return self._labels[label]

    def _erase_status(self) -> None:
        if self._status:
            self._put(Stream.ERR, b"\r\x1b[K")
            self._status = b""

    def _put(self, stream: Stream, data: bytes) -> None:
        if stream in self._closed or not data:
            return
        self._size += len(data)
        if self._queue and self._queue[-1][0] is stream:
            self._queue[-1][1].extend(data)
        else:
            self._queue.append((stream, bytearray(data)))


def _cut(text: bytes) -> bytes:
    """Return what of a status line fits the terminal: one that wraps cannot be erased."""
    from rich.cells import set_cell_size

    columns = 80
    with contextlib.suppress(OSError):
        columns = os.get_terminal_size(Stream.ERR).columns or columns
    whole = text.decode(errors="replace")
    return set_cell_size(whole, columns - 1).rstrip().encode(errors="replace")


# Splits the output of a process into lines.

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
