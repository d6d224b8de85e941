"""The lines by which the scheduler tells the launcher when the job begins, and which rank failed first.

The order in which processes end does not show the latter: a failed node tells the others, and some of them
end before its interpreter does. The lines are part of the scheduler's output, which reaches the launcher from
any host.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["BEGUN", "first_failure", "first_failure_line"]

BEGUN: Final = "netstorm-begun"
"""The line that all nodes have joined."""

_LINE: Final = re.compile(rb"netstorm-verdict (-?[0-9]{1,9}) (.*)")


def first_failure_line(rank: int, text: str) -> str:
    """Return the line for a rank, and for how the job went; -1: no rank in particular."""
    return f"netstorm-verdict {rank} {text}"


def first_failure(line: bytes) -> tuple[int, str] | None:
    """Return what such a line says; None: it is another line."""
    found = _LINE.fullmatch(line)
    return None if found is None else (int(found[1]), found[2].decode(errors="replace"))
