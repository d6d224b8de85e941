"""Training with local updates: ranks take many steps alone, and exchange what they have learnt now and then.

`LocalSGD` averages parameters every few steps; `DiLoCo` averages the change since the last time and gives it
to an outer optimizer, fragment by fragment, while training goes on. The names and their meaning are
torchft's. `HFA` averages within sites, and less often across them; `ESync` gives each rank as many steps as
let all be ready at once. All but `ESync` use the public interface of `torch.distributed` alone, so any
process group will do.
"""

from __future__ import annotations

from netstorm.frontends.torch.local_updates.codecs import CodecFactory, OuterCodec
from netstorm.frontends.torch.local_updates.diloco import DiLoCo
from netstorm.frontends.torch.local_updates.errors import NonFiniteUpdate
from netstorm.frontends.torch.local_updates.esync import ESync
from netstorm.frontends.torch.local_updates.hfa import HFA
from netstorm.frontends.torch.local_updates.local_sgd import LocalSGD
from netstorm.frontends.torch.local_updates.ranks import Ranks, Waitable

__all__ = [
    "HFA",
    "CodecFactory",
    "DiLoCo",
    "ESync",
    "LocalSGD",
    "NonFiniteUpdate",
    "OuterCodec",
    "Ranks",
    "Waitable",
]
