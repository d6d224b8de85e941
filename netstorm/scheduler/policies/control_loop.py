"""The scheduler's half of awareness: what was measured, what is formed for it, and what became of that."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from netstorm.protocol.messages import Measured, NodeStatus
from netstorm.scheduler.awareness.collector import Collector
from netstorm.scheduler.policies.adaptation import Adaptation, Assumed, Summed
from netstorm.scheduler.policies.formation import Formation, Formed
from netstorm.scheduler.policies.outcome import Outcome
from netstorm.scheduler.rounds.key_registry import KeyRegistry
from netstorm.topology.policy import Policy

__all__ = ["Awareness", "summed_of"]

_log = logging.getLogger(__name__)

_FIXED: Final = ("sharded", "balanced", "ring", "custom")
"""Topologies that are the same in every network."""


class Awareness:
    """Of one job.

    Attributes:
        collector: what is known of the network.
        adaptation: why there is the policy that there is.
    """

    def __init__(self, assumed: Assumed, first: Policy, now: float, *, one_machine: bool) -> None:
        """Begin under the policy that was formed for what is assumed.

        On one machine, unless somebody has described links, rates say how busy its processors are: they are
        collected for people, and no policy follows from them. Nor does any where rates are known and trusted.
        """
        self._assumed = assumed
        self.collector: Final = Collector(
            assumed.planned, known=assumed.known, find_routes=assumed.find_routes and not assumed.described
        )
        self.adaptation: Final = Adaptation(assumed, self.collector, first, now)
        self._replan = False
        """What is assumed has changed since a policy was last formed."""
        self._outcome: Final = Outcome()
        self._tried = -1
        """Version of the last policy that was taken for what it is predicted to do."""
        self._expected_s = 0.0
        """What rounds are predicted to take without it."""
        self._active: Final = (
            assumed.network.size > 1
            and assumed.plan.topology not in _FIXED
            and not (one_machine and not assumed.described)
            and not (assumed.known and assumed.trusted)
        )

    def measured(self, rank: int, report: Measured, now: float) -> None:
        """Take a node's report."""
        self.collector.take(rank, report, now)

    def took(self, status: NodeStatus) -> None:
        """Take a node's word on what its newest round took."""
        self._outcome.took(status.last_round, status.round_s)

    def installed(self, policy: Policy, before: Policy, first_rounds: Mapping[int, int]) -> None:
        """A policy follows `before` from these rounds on, by key."""
        if policy.version == self._tried:
            self._outcome.installed(before, first_rounds, expected_s=self._expected_s)
        else:
            self._outcome.forget()

    @property
    def active(self) -> bool:
        """Whether policies follow what is measured."""
        return self._active

    def avoid(self, links: Iterable[tuple[int, int]]) -> None:
        """Plan without these links, and with all others, from now on."""
        self.collector.avoid(links)

    def take_link_share(self, share: float, why: str) -> None:
        """Plan with another share of each link that somebody has described; `why`: for a person."""
        if not self._assumed.known:
            return
        self._assumed = replace(self._assumed, link_share=share)
        self.collector.assume(self._assumed.planned)
        if self._assumed.network.size > 1 and self._assumed.plan.topology not in _FIXED:
            self._replan = True
            self.adaptation.replan(why)

    def registered(self, keys: KeyRegistry, now: float) -> None:
        """Take note of what the job sums by now."""
        summed = summed_of(keys)
        if summed is not None and self._assumed.plan.topology not in _FIXED:
            self.adaptation.sums(summed, now)

    def due(self) -> float:
        """Return when `look` may have something to ask."""
        asks = self._active or self._replan or self.adaptation.summed_anew
        return self.adaptation.due() if asks else math.inf

    def look(self, policy: Policy, keys: KeyRegistry, now: float) -> Policy | Formation | None:
        """Return what is to be formed, if anything is, or the policy to go back to."""
        if now < self.due():
            return None
        worse = self._outcome.verdict()
        if worse is not None:
            back = self.adaptation.go_back(*worse, policy)
            _log.info("policy version %d: %s", back.version, back.reason)
            return back
        question = self.adaptation.look(policy, summed_of(keys), now)
        self._replan = self._replan and self.adaptation.urgent
        if question is not None:
            _log.info("a new policy is being formed: %s", self.adaptation.reason)
        return question

    def formed(self, answer: Formed, policy: Policy, now: float) -> Policy | None:
        """Return what is to follow the policy in force, if what was formed is worth it."""
        found = self.adaptation.formed(answer, policy, now)
        took = f" (formed in {answer.took_s:.2f} s)" if answer.took_s else ""
        if found is not None and self._active and not answer.only_detours:
            self._tried, self._expected_s = found.version, answer.seconds_before
        if found is None:
            _log.info("policy version %d stays: %s%s", policy.version, self.adaptation.reason, took)
        else:
            _log.info("policy version %d: %s%s", found.version, found.reason, took)
        return found


def summed_of(keys: KeyRegistry) -> Summed | None:
    """Return what a job sums; None: nothing so far."""
    return Summed(keys.sizes, keys.chunk_bytes) if sum(keys.sizes) else None
