"""The value that both estimators return: a link's rate and how far it can be trusted. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["LEAST_ERROR", "SINGLE_CHUNK_ERROR", "Estimate"]

SINGLE_CHUNK_ERROR: Final = 0.5
"""Standard error, as a fraction of the rate, of a link that was measured once."""

LEAST_ERROR: Final = 0.01
"""Standard error, as a fraction of the rate, that even the most regular samples have: TCP's headers and the
size of a batch are not known exactly."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A link's rate."""

    rate: float
    """Bit/s."""
    error: float
    """Standard error, as a fraction of `rate`."""
    chunks: int
    """Number of chunks that the estimate rests on."""
    shared: float = 0.0
    """Part of the measured time in which other links of the node were busy."""
    delivered: bool = False
    """The newest sample comes from the sender's kernel."""
