"""KVStores whose ranks train alone for some steps, and exchange what they have learnt less often.

`LocalSGD` averages the values of all ranks every few steps; `HFA` averages within sites, and less often
across them; `ESync` gives each rank as many steps as let all be ready at once; `MixedSync` sums gradients
within a site and pushes them to owners, which wait for nobody. Each is what `gluon.Trainer` and `Module` take
as `kvstore`.
"""

from __future__ import annotations

from netstorm.frontends.mxnet.local_updates.mixed_sync import MixedSync
from netstorm.frontends.mxnet.local_updates.stores import HFA, ESync, LocalSGD

__all__ = ["HFA", "ESync", "LocalSGD", "MixedSync"]
