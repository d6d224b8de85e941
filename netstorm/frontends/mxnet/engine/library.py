"""MXNet's C library, as its own code calls it and as we do: without giving up Python's lock."""

from __future__ import annotations

import ctypes
from typing import Final

from netstorm.frontends.mxnet.compat import mx

__all__ = ["LIBRARY", "LIBRARY_KEEPING_LOCK", "check_call"]

check_call: Final = mx.base.check_call
"""Raises MXNet's last error if a C function has not returned 0."""

LIBRARY: Final = mx.base._LIB  # noqa: SLF001 -- the only handle there is
"""Each call gives up Python's lock and then waits for it again."""

LIBRARY_KEEPING_LOCK: Final = ctypes.PyDLL(LIBRARY._name)  # noqa: SLF001 -- ctypes has no other name for it
"""For functions that wait for nothing. While this thread held the lock, one that waits for a thread of the
engine in our code would wait for ever."""
