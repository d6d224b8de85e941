"""A `DeviceMesh` of sites and of the ranks inside each, to shard where the network is fast.

```python
mesh = site_mesh()
fully_shard(model, mesh=mesh)                       # HSDP: shards inside a site, replicas across sites
ddp_model.register_comm_hook(mesh, site_hook)       # DDP: see `site_sums`
```
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from netstorm.errors import UsageError
from netstorm.frontends.torch.autoload import autoload
from netstorm.frontends.torch.names import NAME
from netstorm.frontends.torch.plain_values import exchange_values
from netstorm.frontends.torch.take_over import own_name
from netstorm.settings import Settings

__all__ = ["LOCAL", "SITE", "ranks_by_site", "site_mesh"]

SITE: Final = "site"
LOCAL: Final = "local"
"""Names of the mesh's dimensions."""

_INSIDE: Final = {"cpu": "gloo", "cuda": "nccl"}
"""PyTorch's own backends; inside a site they have nothing to fear."""


def ranks_by_site(sites: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each site, the sites in the order of their lowest ranks.

    Args:
        sites: the name of each rank's site.

    Raises:
        UsageError: sites have different numbers of ranks; lists them.
    """
    by_site: dict[str, list[int]] = {}
    for rank, site in enumerate(sites):
        by_site.setdefault(site, []).append(rank)
    if len({len(ranks) for ranks in by_site.values()}) > 1:
        listed = "; ".join(
            f"{site}: {len(ranks)} rank{'s' * (len(ranks) > 1)} ({', '.join(map(str, ranks))})"
            for site, ranks in by_site.items()
        )
        raise UsageError(
            f"the sites have different numbers of ranks: {listed}. A mesh needs the same number in each: "
            "start as many processes at every site, or set NETSTORM_SITE, for which the host's name stands "
            "if it is not set"
        )
    return list(by_site.values())


def site_mesh(
    *,
    inner_backend: str | None = None,
    outer_backend: str | None = None,
    device_type: Literal["cpu", "cuda"] = "cpu",
) -> DeviceMesh:
    """Return a mesh with the dimensions "site" and "local". All ranks of the default group must call it.

    Args:
        inner_backend: sums inside a site; None: Gloo for "cpu", NCCL for "cuda".
        outer_backend: sums across sites; None: NetStorm.
        device_type: of the tensors.

    Raises:
        UsageError: there is no default group, or the sites have different numbers of ranks.
    """
    autoload()
    if not dist.is_initialized():
        raise UsageError("site_mesh needs the default process group: call init_process_group first")
    if device_type not in _INSIDE:
        raise UsageError(f"device_type={device_type!r}: expected cpu or cuda")
    site = Settings.from_environment().site or socket.gethostname()
    sites = exchange_values(str, site, "the sites of all ranks")
    outer = own_name(outer_backend or NAME)
    if NAME in outer and NAME not in dist.get_backend():
        # The first NetStorm group makes the job: with all ranks in it, sites' groups share its connections.
        dist.new_group(backend=NAME)
    return DeviceMesh(
        device_type,
        torch.tensor(ranks_by_site(sites), dtype=torch.int, device="cpu"),
        mesh_dim_names=(SITE, LOCAL),
        backend_override=(
            (outer, None),
            (own_name(inner_backend or _INSIDE[device_type]), None),
        ),
    )
