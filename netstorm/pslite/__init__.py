"""Links between processes: exactly-once sessions over any van, and the vans."""

from __future__ import annotations

from netstorm.pslite.endpoint import Endpoint, Stack
from netstorm.pslite.machine import Machine
from netstorm.pslite.session import Limits
from netstorm.pslite.van import Van

__all__ = ["Endpoint", "Limits", "Machine", "Stack", "Van"]
