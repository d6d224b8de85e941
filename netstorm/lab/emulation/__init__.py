"""Emulates a WAN on one Linux machine: network namespaces, with links and routes from a network file."""

from __future__ import annotations

from netstorm.lab.emulation.namespaces import UnmetRequirements, unmet_requirements
from netstorm.lab.emulation.wan import EmulatedLinkStatus, Wan

__all__ = ["EmulatedLinkStatus", "UnmetRequirements", "Wan", "unmet_requirements"]
