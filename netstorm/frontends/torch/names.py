"""The name of the backend, as scripts write it."""

from __future__ import annotations

from typing import Final

__all__ = ["NAME"]

NAME: Final = "netstorm"
