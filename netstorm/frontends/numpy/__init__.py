"""NumPy's frontend: `netstorm.Group`, whose calls take arrays. Importing it does nothing else."""

from __future__ import annotations

from netstorm.frontends.numpy.future import GroupFuture
from netstorm.frontends.numpy.group import Group

__all__ = ["Group", "GroupFuture"]
