"""MixedSync: synchronous within a site, asynchronous between sites (GeoMX)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

from netstorm.errors import UsageError
from netstorm.frontends.torch.asynchronous.sgd import AsynchronousSGD
from netstorm.frontends.torch.elastic.ranks import group_of_all_ranks
from netstorm.frontends.torch.local_updates.elastic.site_averages import SiteAverages
from netstorm.frontends.torch.local_updates.parameters import by_kind
from netstorm.frontends.torch.names import NAME
from netstorm.kvstore.calls import Sites
from netstorm.kvstore.operations import UNBOUNDED

__all__ = ["MixedSync"]


class _Site(Protocol):
    """The ranks that take steps together."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """They, ascending."""

    @property
    def leader(self) -> int:
        """The one that pushes and pulls for all."""

    def average(self, vectors: Sequence[torch.Tensor]) -> None:
        """Replace vectors by their averages."""

    def share(self, vectors: Sequence[torch.Tensor]) -> bool:
        """Replace vectors by the leader's; return False if it has died: then another one leads."""


class _FixedSite:
    """The site as a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: Final = group

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self._group))

    @property
    def leader(self) -> int:
        return dist.get_global_rank(self._group, 0)

    def average(self, vectors: Sequence[torch.Tensor]) -> None:
        for vector in vectors:
            vector.mul_(1.0 / dist.get_world_size(self._group))
            dist.all_reduce(vector, group=self._group)

    def share(self, vectors: Sequence[torch.Tensor]) -> bool:
        for vector in vectors:
            dist.broadcast(vector, src=self.leader, group=self._group)
        return True


class _ElasticSite:
    """The site in an elastic job: those who have begun it there, and are left. Their lowest rank leads."""

    def __init__(self, *, is_newcomer: bool) -> None:
        self._averages: Final = SiteAverages(group_of_all_ranks().member, is_newcomer=is_newcomer)
        self.ranks = self._averages.ranks

    @property
    def leader(self) -> int:
        return self.ranks[0]

    def average(self, vectors: Sequence[torch.Tensor]) -> None:
        self.ranks = self._averages.average(vectors)

    def share(self, vectors: Sequence[torch.Tensor]) -> bool:
        leader = self.leader
        self.ranks = self._averages.copy_from(leader, vectors)
        return self.leader == leader


class MixedSync(AsynchronousSGD):
    """Averages gradients over a site, and trains asynchronously with those averages.

    One rank of each site, the leader, pushes the site's average to the owners and pulls; the others get the
    parameters from it. So the ranks of a site have the same bits after each step, and take steps together. No
    site waits for another one. A site counts as one worker, whatever number of ranks it has.

    Sites are those of NETSTORM_SITE, or hosts. See `AsynchronousSGD` for what else holds. All ranks make it
    at the same place of the program, because it makes process groups. The leader's learning rate counts.
    NETSTORM_STALENESS bounds how many steps a site may be ahead of the slowest one.

    In an elastic job a site goes on without ranks that have left; if the leader has, the next one leads, and
    that step's average of the site may be lost with it. A rank that joins later is a site of its own.

    Args:
        model: whose parameters are trained.
        lr: learning rate.
        momentum: from 0 to below 1; over corrected gradients.
        lamda: weight of the correction; 0: none.
        weight_decay: as in `torch.optim.SGD`.
        state: as in `AsynchronousSGD`.
        site_group: the ranks of this rank's site, over any backend; None: NetStorm's groups of the sites.

    Raises:
        UsageError: as `AsynchronousSGD`; also `site_group` in an elastic job, or one without this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        momentum: float = 0.0,
        lamda: float = 0.04,
        weight_decay: float = 0.0,
        site_group: dist.ProcessGroup | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, lr, momentum=momentum, lamda=lamda, weight_decay=weight_decay, state=state)
        runtime = self._runtime
        # Ranks that are no leaders push nothing, so their pushes cannot be their clocks.
        self._counts_clocks = runtime.settings.staleness != UNBOUNDED
        self._site: _Site
        if not runtime.node.requests.live.is_elastic:
            sites = Sites.of(runtime.node.members, runtime.rank)
            self._site = _FixedSite(_group_of_site(sites, site_group))
        elif site_group is None:
            self._site = _ElasticSite(is_newcomer=self._newcomer.waits)
        else:
            raise UsageError(
                "site_group= in an elastic job (NETSTORM_ELASTIC): leave it out, ranks come and go"
            )
        self._flat = by_kind(parameter for parameter in model.parameters() if parameter.requires_grad)

    @property
    def is_leader(self) -> bool:
        """Whether this rank pushes and pulls for its site."""
        return self._site.leader == self._runtime.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's site; in an elastic job those that are left of it."""
        return self._site.ranks

    def step(self) -> None:
        """Average gradients over the site; its leader pushes them and pulls. Wait for the parameters."""
        led = self.is_leader
        gradients = [
            torch.cat(
                [
                    torch.zeros_like(one).reshape(-1) if one.grad is None else one.grad.reshape(-1)
                    for one in flat.parameters
                ]
            )
            for flat in self._flat
        ]
        self._site.average(gradients)
        for flat, average in zip(self._flat, gradients, strict=True):
            flat.set_gradients(average)
        if self.is_leader:
            if not led:
                super().pull()  # so owners know from which parameters this rank goes on
            super().step()
        else:
            self._steps += 1
            if self._counts_clocks:
                self._end_clock(pushed=False)
        self._share()

    def pull(self) -> None:
        """Wait for the newest parameters; all ranks of the site must call it."""
        if self.is_leader:
            super().pull()
        self._share()

    def _share(self) -> None:
        """Give the site the leader's parameters."""
        while True:
            values = [flat.read() for flat in self._flat]
            if self._site.share(values):
                break
            if self.is_leader:
                super().pull()
        for flat, one in zip(self._flat, values, strict=True):
            flat.write(one)


def _group_of_site(sites: Sites, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if given is not None:
        if dist.get_rank(given) < 0:
            raise UsageError(
                f"site_group: rank {dist.get_rank()} is not in it; give the group of its own site"
            )
        return given
    groups = [dist.new_group(list(ranks), backend=NAME) for ranks in sites.ranks]
    return cast("dist.ProcessGroup", groups[sites.mine])
