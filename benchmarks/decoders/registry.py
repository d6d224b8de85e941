"""All targets."""

from __future__ import annotations

from typing import Final

from decoders import doctor, files, replicated, resumed, stored, values, web, wire
from netstorm.lab.testing.decoders import FuzzTarget

__all__ = ["TARGETS"]

TARGETS: Final[tuple[FuzzTarget, ...]] = (
    *wire.TARGETS,
    *values.TARGETS,
    *replicated.TARGETS,
    *files.TARGETS,
    *stored.TARGETS,
    *resumed.TARGETS,
    *web.TARGETS,
    *doctor.TARGETS,
)
