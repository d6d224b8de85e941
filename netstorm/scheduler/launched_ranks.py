"""What the launcher says of the processes that it has started for ranks: which have ended, and how. Pure.

The launcher is the parent of these processes: it knows at once and for certain what nodes can only infer from
silence. It tells the scheduler, which it has started, too; and the scheduler tells all ranks.
"""

from __future__ import annotations

import math
from typing import Annotated, Final

import msgspec

from netstorm.errors import PeerError
from netstorm.protocol.frames import printable

__all__ = ["LONGEST_LINE", "LaunchedRanks", "RankEnded", "read_rank_ended", "shortened"]

LONGEST_LINE: Final = 2000
"""Bytes of a line of the launcher. Less than PIPE_BUF, so that pipes pass it on whole."""

_MOST_CHARACTERS: Final = 300
"""Of a rank's last line. Six bytes each at most in JSON."""

_MESSAGE_S: Final = 0.2
"""After a process's end: what it had sent itself, such as the exception that ended it, says more."""

_ORDERLY_S: Final = 2.0
"""The same for a member, after exit code 0. Its message that it has left must not be overlooked, however busy
this machine is: that would fail a job that ended well."""


class RankEnded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process of one rank has ended, with all that it had started."""

    rank: Annotated[int, msgspec.Meta(ge=0, le=999_999)]
    code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    """Its exit code, or 128 + the signal that killed it."""
    how: Annotated[str, msgspec.Meta(max_length=60)]
    """The same for a person: "exit code 3" or "killed by SIGKILL"."""
    host: Annotated[str, msgspec.Meta(max_length=255)]
    """Where it ran."""
    last_line: str = ""
    """The last line of its error output; empty: there was none."""
    again: bool = False
    """Whether the launcher will start the rank again."""

    @classmethod
    def of(cls, rank: int, code: int, how: str, host: str, last_line: bytes, *, again: bool) -> RankEnded:
        """Return it, given the last line as the process has written it."""
        text = shortened(last_line.decode(errors="replace"))
        return cls(rank=rank, code=code, how=how, host=host, last_line=text, again=again)

    @property
    def text(self) -> str:
        """How it ended, for a person."""
        return self.how + (f"; last line of its error output: {self.last_line}" if self.last_line else "")


_decoder: Final = msgspec.json.Decoder(RankEnded)


def read_rank_ended(line: bytes) -> RankEnded:
    """Return what a line of the launcher says.

    Raises:
        PeerError: it is none.
    """
    try:
        ended = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerError(f"a line of the launcher that cannot be read: {error}") from None
    return msgspec.structs.replace(
        ended,
        how=shortened(ended.how),
        host=shortened(ended.host),
        last_line=shortened(ended.last_line),
    )


def shortened(text: str) -> str:
    """Return a text that others have written as part of one line: short and printable."""
    kept = printable(text.strip())
    return kept if len(kept) <= _MOST_CHARACTERS else kept[: _MOST_CHARACTERS - 1] + "…"


class LaunchedRanks:
    """The ranks that one launcher has started, as far as they have ended."""

    def __init__(self, nodes: int) -> None:
        """Begin with `nodes` ranks that run, if there is a launcher that says how they end."""
        self._nodes: Final = nodes
        self._ended: Final[dict[int, RankEnded]] = {}
        self._due: list[tuple[float, RankEnded]] = []

    def record(self, ended: RankEnded, now: float, *, in_the_job: bool) -> None:
        """Record how a rank's process has ended. `in_the_job`: it may have left in good order."""
        wait_s = _ORDERLY_S if in_the_job and ended.code == 0 else _MESSAGE_S
        self._due.append((now + wait_s, ended))

    def has_come(self, rank: int) -> None:
        """Record that a process has come for a rank: it was started again."""
        self._ended.pop(rank, None)

    def due(self, now: float) -> list[RankEnded]:
        """Return who has ended and had time to be heard, each once."""
        found = [ended for at, ended in self._due if at <= now]
        if found:
            self._due = [entry for entry in self._due if entry[0] > now]
            self._ended.update((ended.rank, ended) for ended in found if not ended.again)
        return found

    def next_due(self) -> float:
        """Return when `due` returns something."""
        return min((at for at, _ in self._due), default=math.inf)

    @property
    def gone(self) -> tuple[RankEnded, ...]:
        """Those that will not come any more, in order."""
        return tuple(self._ended.values())

    @property
    def some_run(self) -> bool:
        """Whether ranks still run, as far as the launcher has said; False without a launcher."""
        return bool(self._ended) and len(self._ended) < self._nodes
