"""SIGTERM ends a benchmark as Ctrl-C does: children stopped, results kept."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["stop_on_sigterm"]


def stop_on_sigterm() -> None:
    """Let SIGTERM raise `KeyboardInterrupt`."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
