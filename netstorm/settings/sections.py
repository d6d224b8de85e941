"""The fields of `Settings`, by section. A new setting belongs in one of the sections' modules."""

from __future__ import annotations

from dataclasses import dataclass

from netstorm.settings.jobs import JobsSettings
from netstorm.settings.node import NodeSettings
from netstorm.settings.observability import ObservabilitySettings
from netstorm.settings.paper import PaperSettings
from netstorm.settings.planning import PlanningSettings
from netstorm.settings.rendezvous import RendezvousSettings
from netstorm.settings.security import SecuritySettings
from netstorm.settings.timeouts import TimeoutSettings

__all__ = ["Sections"]


@dataclass(frozen=True, kw_only=True)
class Sections(
    ObservabilitySettings,
    TimeoutSettings,
    PlanningSettings,
    JobsSettings,
    SecuritySettings,
    NodeSettings,
    PaperSettings,
    RendezvousSettings,
):
    """The fields of all sections. `Settings` adds how they are read and checked."""
