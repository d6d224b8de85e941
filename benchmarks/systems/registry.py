"""All systems by name."""

from __future__ import annotations

from systems.base import System
from systems.gloo import Gloo
from systems.hivemind import Hivemind
from systems.mxnet_dist import MXNetDist
from systems.netstorm_store import NetStormStore
from systems.openmpi.system import OpenMPI

__all__ = ["SYSTEMS"]

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        NetStormStore(),
        MXNetDist(name="mxnet-1-server", servers=1),
        MXNetDist(name="mxnet-n-servers", servers=None),
        Gloo(),
        OpenMPI(),
        Hivemind(),
    )
}
