"""What can go wrong with an average and is nobody's connection."""

from __future__ import annotations

from netstorm.errors import UsageError

__all__ = ["NonFiniteUpdate"]


class NonFiniteUpdate(UsageError):
    """An average has NaN or infinite values: training has diverged at some rank. Raised at all ranks."""
