"""What the scheduler tells the launcher at the end of a job: whose end was the first.

The order in which processes end does not show it: a node that has failed tells the others, and some of them
are gone before its interpreter is. The line travels with the output of the scheduler, which reaches the
launcher from any host.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["blamed_rank", "verdict_line"]

_LINE: Final = re.compile(rb"netstorm-verdict (-?[0-9]{1,9})")


def verdict_line(rank: int) -> str:
    """Return the line that says so; -1: nobody's."""
    return f"netstorm-verdict {rank}"


def blamed_rank(line: bytes) -> int | None:
    """Return the rank in such a line; None: it is another line."""
    found = _LINE.fullmatch(line)
    return None if found is None else int(found[1])
