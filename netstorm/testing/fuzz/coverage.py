"""Which lines of NetStorm a call executes. Tracing slows it down ten times, so few inputs are traced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

__all__ = ["lines_of"]

_PACKAGE: Final = str(Path(__file__).parents[2])
_OWN: Final = str(Path(__file__).parent)


def lines_of(call: Callable[[], object], lines: set[tuple[str, int]]) -> None:
    """Add the lines that `call` executes to `lines`; what it raises is raised."""

    def of_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return of_line

    def of_call(frame: FrameType, _event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        return of_line if name.startswith(_PACKAGE) and not name.startswith(_OWN) else None

    before = sys.gettrace()
    sys.settrace(of_call)
    try:
        call()
    finally:
        sys.settrace(before)
