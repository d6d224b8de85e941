"""Hierarchical frequency aggregation: averages within a site often, and across sites seldom (GeoMX)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from netstorm.errors import UsageError
from netstorm.frontends.torch.elastic.ranks import group_of_all_ranks
from netstorm.frontends.torch.local_updates.agreement import Settings
from netstorm.frontends.torch.local_updates.elastic.site_averages import SiteAverages
from netstorm.frontends.torch.local_updates.fragment import accumulator_type, check_finite
from netstorm.frontends.torch.local_updates.local_sgd import LocalSGD
from netstorm.frontends.torch.local_updates.ranks import ProcessGroupRanks
from netstorm.frontends.torch.site_mesh import LOCAL, site_mesh
from netstorm.frontends.torch.site_sums import hierarchical_all_reduce

__all__ = ["HFA"]


class HFA(LocalSGD):
    """Averages parameters over the ranks of a site every `k1` steps, and over all at every `k2`-th average.

    ```python
    with HFA(model, optimizer, k1=20, k2=10):
        for batch in batches:
            ...
            optimizer.step()  # every 20th one averages in the site, every 200th one over all
    ```

    A site's average does not leave it. One over all is summed inside sites first, so that it crosses the WAN
    once a site. See `LocalSGD` for what else holds.

    Args:
        model: whose parameters are averaged; those that need no gradient are not.
        optimizer: whose steps are counted.
        k1: steps between averages.
        k2: averages of a site from one over all ranks to the next, which is one of them.
        mesh: of sites; None: `site_mesh()`, whose sites are those of NETSTORM_SITE. Elastic jobs have none:
            an average over all goes along the job's trees there, and a rank that has joined later is in no
            average of a site.
        state: in an elastic job, what else travels to ranks that join later, as `ElasticState` takes it.

    Raises:
        UsageError: a value is not allowed, there is no process group, or no mesh of sites.
        Disagreement: on entering; ranks have different settings.
        NonFiniteUpdate: in `optimizer.step()`; the average is not finite. Parameters stay as they were.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        k1: int,
        k2: int,
        *,
        mesh: DeviceMesh | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if k1 < 1 or k2 < 1:
            raise UsageError(f"k1={k1}, k2={k2}: both must be at least 1")
        super().__init__(model, optimizer, k1, state=state)
        self._k2 = k2
        self._of_site: ProcessGroupRanks | SiteAverages
        if self._elastic is not None:
            if mesh is not None:
                raise UsageError(
                    "mesh= in an elastic job (NETSTORM_ELASTIC): leave it out, ranks come and go"
                )
            member = group_of_all_ranks().member
            self._of_site = SiteAverages(member, is_newcomer=self._elastic.is_newcomer)
            return
        self._mesh = site_mesh() if mesh is None else mesh
        if LOCAL not in (self._mesh.mesh_dim_names or ()):
            raise UsageError(
                f"a mesh with the dimensions {self._mesh.mesh_dim_names}: expected one of site_mesh()"
            )
        self._of_site = ProcessGroupRanks(self._mesh.get_group(LOCAL))

    def sync_site(self) -> None:
        """Average over the ranks of the site now; all of them must call it at the same step."""
        if isinstance(self._of_site, ProcessGroupRanks):
            self._average(self._of_site)
            return
        averages = [flat.read().to(accumulator_type(flat.dtype)) for flat in self._flat]
        self._of_site.average(averages)
        check_finite(averages, "the average of the model", self._flat)
        for flat, average in zip(self._flat, averages, strict=True):
            flat.write(average)

    def sync(self) -> None:
        """Average over all ranks now; all must call it at the same step."""
        if self._elastic is not None:
            super().sync()
            return
        averages = [flat.read().to(accumulator_type(flat.dtype)) for flat in self._flat]
        for average in averages:
            hierarchical_all_reduce(average, self._mesh, dist.ReduceOp.AVG)
        check_finite(averages, "the average of the model", self._flat)
        for flat, average in zip(self._flat, averages, strict=True):
            flat.write(average)

    def _settings(self) -> Settings:
        return {**super()._settings(), "k2": self._k2}

    def _next_average(self, step: int) -> int:
        period = self._sync_every * self._k2
        return -(-step // period) * period

    def _period_ends(self) -> bool:
        return self._steps % (self._sync_every * self._k2) == 0

    def _after_step(self) -> None:
        if self._steps % (self._sync_every * self._k2) == 0:
            self.sync()
        elif self._steps % self._sync_every == 0:
            self.sync_site()
