"""All systems by name."""

from __future__ import annotations

from systems.base import System
from systems.gloo import Gloo
from systems.hivemind import Hivemind
from systems.mxnet_dist import MXNetDist
from systems.netstorm_store import NetStormStore, users_settings
from systems.openmpi.system import OpenMPI
from systems.shared_memory import BareSharedMemory
from systems.torch_ddp import TORCH_GLOO, TORCH_NETSTORM, TorchDDP

__all__ = ["SYSTEMS"]

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        NetStormStore(),
        NetStormStore(name="netstorm-encrypted", variables={"NETSTORM_SECURITY": "auto"}),
        MXNetDist(name="mxnet-1-server", servers=1),
        MXNetDist(name="mxnet-n-servers", servers=None),
        Gloo(),
        Gloo(
            name="netstorm-group",
            backend="netstorm",
            variables=users_settings(),
            settings={"backend": "netstorm", **users_settings()},
        ),
        BareSharedMemory(),
        OpenMPI(),
        Hivemind(),
        TorchDDP(kind=TORCH_GLOO, job=Gloo(name=TORCH_GLOO)),
        TorchDDP(kind=TORCH_NETSTORM, job=NetStormStore(name=TORCH_NETSTORM)),
    )
}
