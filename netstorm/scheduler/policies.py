"""The scheduler's control loop: reports in, requests to form policies and their results, new policies out."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from netstorm.protocol.messages import Measured
from netstorm.scheduler.awareness.collector import Collector
from netstorm.scheduler.policies.adaptation import Adaptation
from netstorm.scheduler.policies.assumptions import FIXED_TOPOLOGIES, InitialAssumptions, workload_of
from netstorm.scheduler.policies.formation import FormationRequest, FormationResult
from netstorm.scheduler.rounds.key_registry import KeyRegistry
from netstorm.topology.policy import Policy

__all__ = ["Awareness"]

_log = logging.getLogger(__name__)


class Awareness:
    """The awareness of one job.

    Attributes:
        collector: estimates the network.
        adaptation: decides on policies.
        active: policies follow what is measured.
    """

    def __init__(
        self,
        assumptions: InitialAssumptions,
        first: Policy,
        now: float,
        *,
        one_machine: bool,
        fixed: bool = False,
    ) -> None:
        """Begin under the policy that was formed for what is assumed.

        On one machine without a network file, rates show how busy the processors are: they are collected for
        people, and no policy follows from them. Nor does any if the rates of a file are trusted, or if
        policies are `fixed`: then they do not follow what the job sums, either.
        """
        self._assumptions = assumptions
        self.collector: Final = Collector(
            assumptions.planned,
            known=assumptions.known,
            find_routes=assumptions.find_routes and not assumptions.described,
        )
        self.adaptation: Final = Adaptation(assumptions, self.collector, first, now)
        self._requested = False
        """Another network is assumed than the one that a policy was last formed for."""
        self._adaptable: Final = assumptions.settings.topology not in FIXED_TOPOLOGIES and not fixed
        self.active: Final = (
            assumptions.network.size > 1
            and self._adaptable
            and not (one_machine and not assumptions.described)
            and not (assumptions.known and assumptions.trusted)
        )

    def record_report(self, rank: int, report: Measured, now: float) -> None:
        """Record a node's report."""
        self.collector.record(rank, report, now)

    def exclude(self, links: Iterable[tuple[int, int]]) -> None:
        """Plan without these links, and with all others, from now on."""
        self.collector.exclude(links)

    def set_link_share(self, share: float, why: str) -> None:
        """Plan with another share of each known rate; `why`: for a person."""
        if not self._assumptions.known:
            return
        self._assumptions = replace(self._assumptions, link_share=share)
        self.collector.replace_prior(self._assumptions.planned)
        if self._assumptions.network.size > 1 and self._adaptable:
            self._requested = True
            self.adaptation.request(why)

    def members_changed(self, why: str) -> None:
        """Form a policy for other members of the job; `why`: for a person."""
        if self.active:
            self._requested = True
            self.adaptation.request(why)

    def record_keys(self, keys: KeyRegistry, now: float) -> None:
        """Record what the job sums by now."""
        workload = workload_of(keys)
        if workload is not None and self._adaptable:
            self.adaptation.record_workload(workload, now)

    def due(self) -> float:
        """Return the time of the next `poll`."""
        asks = self.active or self._requested or self.adaptation.workload_changed
        return self.adaptation.due() if asks else math.inf

    def poll(self, policy: Policy, keys: KeyRegistry, now: float) -> FormationRequest | None:
        """Return a request to form a policy, if one is needed; `policy`: the one in force."""
        if now < self.due():
            return None
        request = self.adaptation.poll(policy, workload_of(keys), now)
        self._requested = self._requested and self.adaptation.urgent
        if request is not None:
            _log.info("a new policy is being formed: %s", self.adaptation.reason)
        return request

    def decide(self, result: FormationResult, policy: Policy) -> Policy | None:
        """Return the policy that follows `policy`, now in force, if the result is worth it."""
        found = self.adaptation.decide(result, policy)
        took = f" (formed in {result.took_s:.2f} s)" if result.took_s else ""
        if found is None:
            _log.info("policy version %d stays: %s%s", policy.version, self.adaptation.reason, took)
        else:
            _log.info("policy version %d: %s%s", found.version, found.reason, took)
        return found
