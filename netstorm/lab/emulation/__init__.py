"""Emulates a WAN on one Linux machine: network namespaces, with links and routes from a network file."""

from __future__ import annotations

from netstorm.emulation.requirements import UnmetRequirements, unmet_requirements
from netstorm.emulation.wan import LinkStatus, Wan

__all__ = ["LinkStatus", "UnmetRequirements", "Wan", "unmet_requirements"]
