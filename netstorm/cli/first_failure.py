"""The line by which the scheduler tells the launcher which rank failed first.

The order in which processes end does not show it: a failed node tells the others, and some of them end before
its interpreter does. The line is part of the scheduler's output, which reaches the launcher from any host.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["first_failed_rank", "first_failure_line"]

_LINE: Final = re.compile(rb"netstorm-verdict (-?[0-9]{1,9})")


def first_failure_line(rank: int) -> str:
    """Return the line for a rank; -1: no rank in particular."""
    return f"netstorm-verdict {rank}"


def first_failed_rank(line: bytes) -> int | None:
    """Return the rank in such a line; None: it is another line."""
    found = _LINE.fullmatch(line)
    return None if found is None else int(found[1])
