"""The stores: after how many steps values are averaged, and over which ranks."""

from __future__ import annotations

import dataclasses
from typing import Final

from netstorm.frontends.mxnet.errors import methods_raise_mxnet_errors
from netstorm.frontends.mxnet.local_updates.entry import DueAverage, LocalEntry
from netstorm.frontends.mxnet.local_updates.schedule import Paced, Periodic
from netstorm.frontends.mxnet.local_updates.store import LocalUpdatesKVStore
from netstorm.kvstore.process.elastic import StepPacer

__all__ = ["HFA", "ESync", "LocalSGD"]


@methods_raise_mxnet_errors
class LocalSGD(LocalUpdatesKVStore):
    """Replaces values by their average over all ranks every `sync_every` steps (arXiv 1805.09767)."""

    def __init__(self, sync_every: int) -> None:
        """Join the job; all ranks give the same `sync_every`.

        Raises:
            UsageError: it is below 1.
        """
        super().__init__()
        self._schedule = Periodic("LocalSGD", k1=sync_every, k2=1)


@methods_raise_mxnet_errors
class HFA(LocalUpdatesKVStore):
    """Hierarchical frequency aggregation: averages within sites often, and across them seldom (GeoMX).

    After every `k1` steps the average of the site, and at every `k2`-th of these times the average of all
    ranks. The first does not cross the WAN, the second once a site. Sites are those of NETSTORM_SITE, which
    `netstorm launch` sets from the network file, or hosts. In an elastic job the second goes along the job's
    trees, and a rank that has joined later takes no part in the first.
    """

    _hierarchical = True

    def __init__(self, k1: int | None = None, k2: int | None = None) -> None:
        """Join the job; all ranks give the same periods.

        Args:
            k1: steps between averages of the site; None: MXNET_KVSTORE_HFA_K1.
            k2: of these, how many there are to one average of all; None: MXNET_KVSTORE_HFA_K2.

        Raises:
            UsageError: a period below 1.
        """
        super().__init__()
        settings = self._runtime.settings
        self._schedule = Periodic(
            "HFA",
            k1=settings.hfa_k1 if k1 is None else k1,
            k2=settings.hfa_k2 if k2 is None else k2,
        )


@methods_raise_mxnet_errors
class ESync(LocalUpdatesKVStore):
    """Averages over all ranks, each of which has taken as many steps as fit into the time of the slowest.

    A rank that is four times slower takes one step while the others take four. The numbers follow what ranks
    measure; the scheduler's state server computes them (Li et al., IEEE TSC 2022).
    """

    def __init__(self, least_steps: int = 1, most_steps: int = 100) -> None:
        """Join the job; all ranks give the same numbers.

        Args:
            least_steps: steps of the slowest rank between averages.
            most_steps: bound for all ranks: after many steps alone values are far apart.

        Raises:
            UsageError: these are no bounds.
        """
        super().__init__()
        self._pacer: Final = StepPacer(self._runtime, least=least_steps, most=most_steps)
        name = f"ESync least={least_steps} most={most_steps}"
        self._paced: Final = Paced(name, self._pacer)
        is_alone = self._elastic is None and self.num_workers == 1
        self._schedule = Periodic(name, k1=least_steps, k2=1) if is_alone else self._paced

    @property
    def steps(self) -> int:
        """The number of steps of the present round; waits until it is known."""
        return self._pacer.steps()

    def _due(self, entry: LocalEntry, fingerprint: str, priority: int) -> DueAverage:
        pacer, round = self._pacer, self._paced.averages - 1
        return dataclasses.replace(
            super()._due(entry, fingerprint, priority),
            begins=lambda: pacer.exchange_begins(round),
            ends=pacer.exchange_ends,
        )
