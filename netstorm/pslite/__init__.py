"""Links between processes: exactly-once sessions over any van, and the vans."""

from __future__ import annotations

from netstorm.pslite.endpoint.endpoint import Endpoint
from netstorm.pslite.endpoint.stack import Stack
from netstorm.pslite.machine import Machine
from netstorm.pslite.session.limits import Limits
from netstorm.pslite.van.interface import Van

__all__ = ["Endpoint", "Limits", "Machine", "Stack", "Van"]
