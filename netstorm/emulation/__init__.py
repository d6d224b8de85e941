"""A WAN on one Linux machine: a network file becomes network namespaces, links and routes between them."""

from __future__ import annotations

from netstorm.emulation.rights import MissingRights, missing_rights
from netstorm.emulation.wan import LinkStatus, Wan

__all__ = ["LinkStatus", "MissingRights", "Wan", "missing_rights"]
